//! Pulls through an HTTP proxy.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use super::machine::{Machine, on_each_machine};
use super::registry::{REMOTE, Registry, layout};
use super::{FACTS, ITS_FACTS, settings};

/// A proxy that connects every request to one registry, and remembers the heads of the requests.
struct Proxy {
    port: u16,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    fn start(registry: &Registry) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            heads: Arc::default(),
        };
        let (heads, to) = (Arc::clone(&proxy.heads), registry.port());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let heads = Arc::clone(&heads);
                std::thread::spawn(move || serve(client, to, &heads));
            }
        });
        proxy
    }

    fn heads(&self) -> Vec<String> {
        std::mem::take(&mut self.heads.lock().unwrap())
    }
}

fn serve(client: TcpStream, to: u16, heads: &Mutex<Vec<String>>) -> io::Result<()> {
    // A client of a proxy sends nothing before the answer.
    let mut lines = BufReader::new(client.try_clone()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if lines.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let may = head.contains("Proxy-Authorization: Basic bWU6cEBzcw==\r\n");
    heads.lock().unwrap().push(head);
    let mut client = client;
    if !may {
        return client.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n");
    }
    let mut server = TcpStream::connect(("127.0.0.1", to))?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    let (mut from, mut into) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut into);
        let _ = into.shutdown(Shutdown::Write);
    });
    io::copy(&mut server, &mut client)?;
    client.shutdown(Shutdown::Both)
}

#[test]
fn a_registry_on_another_machine_is_reached_through_the_proxy() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    registry.push(&layout(folder.path(), 1 << 20, &settings()), "app:1");
    let remote = format!("{REMOTE}:{}", registry.port());
    let (image, local) = (format!("{remote}/app:1"), registry.reference("app:1"));
    on_each_machine(|machine| {
        machine.trust(&registry);
        let proxy = Proxy::start(&registry);
        let with = |login: &str, except: &str| {
            let mut serve = machine.boxd(&["serve"]);
            serve.env(
                "HTTPS_PROXY",
                format!("http://{login}127.0.0.1:{}", proxy.port),
            );
            Machine::start(serve.env("NO_PROXY", except))
        };
        let server = with("me:p%40ss@", "other.test");
        assert!(machine.login(&remote, "secret").status.success());
        let run = ["run", "--name", "b", "--image", &image, FACTS];
        assert_eq!(machine.ok(&run), ITS_FACTS);
        let heads = proxy.heads();
        let connect = format!("CONNECT {remote} HTTP/1.1\r\n");
        assert!(!heads.is_empty(), "{heads:?}");
        assert!(
            heads.iter().all(|head| head.starts_with(&connect)),
            "{heads:?}"
        );
        // A registry on this machine is reached directly.
        let host = local.split_once('/').unwrap().0;
        assert!(machine.login(host, "secret").status.success());
        machine.ok(&["image", "pull", &local]);
        assert_eq!(proxy.heads(), [""; 0]);
        drop(server);

        // An exception; the name has no address.
        let server = with("me:p%40ss@", &format!("localhost,{REMOTE}"));
        let problem = first_problem(machine, &image);
        let error = "it cannot be reached; check the name and the network";
        assert!(problem.contains(error), "{problem}");
        assert_eq!(proxy.heads(), [""; 0]);
        drop(server);

        // A proxy that refuses; its password is in no message.
        let server = with("me:wrong@", "");
        let problem = first_problem(machine, &image);
        let error = "it cannot be reached through the proxy; check the name and the proxy";
        assert!(problem.contains(error), "{problem}");
        assert!(!problem.contains("wrong"), "{problem}");
        drop(server);
    });
}

/// Returns the first problem of a pull, which would be repeated several times.
fn first_problem(machine: &Machine, image: &str) -> String {
    let mut pull = machine.boxd(&["image", "pull", image]);
    let mut pull = pull.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(pull.stderr.take().unwrap());
    lines.read_line(&mut line).unwrap();
    pull.kill().unwrap();
    pull.wait().unwrap();
    line
}
