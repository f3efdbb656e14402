//! A box with a network reaches the allowed destinations, and no others.

mod adoption;
mod basics;
mod dns;
mod errors;
mod escapes;
mod limits;
mod programs;
mod streams;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::{BoxExecutionResult, HostName, NetworkPolicy};
use box_runtime::native::NativeConfig;
use box_tests::machine::{Machine, on_each_machine_set_up, printed, spec};
use serde_json::{Value, json};

/// A policy from its JSON.
fn policy(json: Value) -> NetworkPolicy {
    serde_json::from_value(json).unwrap()
}

/// Sets the operator's policy and the addresses of names. Other names do not exist, and the runtime
/// queries no DNS server.
fn open(config: &mut NativeConfig, allow: Value, hosts: &[(&str, &str)]) {
    config.egress.policy = policy(json!({ "allow": allow }));
    for (name, address) in hosts {
        let addresses = address.split_whitespace();
        let addresses = addresses.map(|address| address.parse::<IpAddr>().unwrap());
        config
            .egress
            .hosts
            .insert(HostName::new(name).unwrap(), addresses.collect());
    }
}

/// Runs a command in a box that has a network.
async fn online(machine: &Machine, session: &str, cmd: &str) -> BoxExecutionResult {
    let asked = json!({"box_id": session, "network": "on", "cmd": cmd, "timeout_sec": 120, "pids_limit": 256});
    let ran = machine.exec_spec(spec(asked)).await;
    ran.unwrap_or_else(|error| panic!("{}: {cmd}: {error:?}", machine.name))
}

/// A server of the test, with a thread for each connection.
struct Server {
    address: SocketAddr,
    /// The number of connections so far.
    taken: Arc<AtomicUsize>,
}

impl Server {
    fn start(at: &str, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((at, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let taken = Arc::new(AtomicUsize::new(0));
        let (count, serve) = (Arc::clone(&taken), Arc::new(serve));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { address, taken }
    }

    /// A server that answers every request with the same text.
    fn http(at: &str, body: &'static str) -> Self {
        Self::start(at, move |mut stream| {
            if request(&mut stream).is_none() {
                return;
            }
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        })
    }

    /// A server with these files. Other paths are not found.
    fn files(at: &str, files: Vec<(String, Vec<u8>)>) -> Self {
        Self::start(at, move |mut stream| {
            let Some(head) = request(&mut stream) else {
                return;
            };
            let path = head.split_whitespace().nth(1).unwrap_or_default();
            let path = path.split('?').next().unwrap_or_default();
            let found = files.iter().find(|(name, _)| name == path);
            let (status, body) =
                found.map_or(("404 Not Found", &b""[..]), |(_, body)| ("200 OK", body));
            let kind = if path.ends_with('/') {
                "text/html"
            } else {
                "application/octet-stream"
            };
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            );
            let _ = stream.write_all(body);
        })
    }

    fn port(&self) -> u16 {
        self.address.port()
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// The head of a request.
fn request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).unwrap_or(0) == 0 {
            return None;
        }
        head.extend(byte);
    }
    String::from_utf8(head).ok()
}

/// How long a test of this kind may take on one machine.
const TEST_LIMIT: Duration = Duration::from_mins(8);

/// Python helpers for connections.
const HELP: &str = "\
import errno, hashlib, os, socket, struct, sys, time
def word(work):
    try:
        return work()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def dial(host, port, **more):
    return socket.create_connection((host, port), timeout=30, **more)
def first(host, port, say=b''):
    with dial(host, port) as s:
        s.sendall(say)
        return s.recv(100).decode()
";

/// A shell command that runs Python with these helpers.
fn script(text: &str) -> String {
    format!("cat >/tmp/test.py <<'END'\n{HELP}\n{text}\nEND\npython3 /tmp/test.py")
}

/// Runs Python in a box with a network.
async fn python(machine: &Machine, session: &str, text: &str) -> BoxExecutionResult {
    online(machine, session, &script(text)).await
}

/// As [`python`], and returns its output.
async fn says(machine: &Machine, session: &str, text: &str) -> String {
    let ran = python(machine, session, text).await;
    assert_eq!(ran.exit_code, Some(0), "{}: {ran:?}", machine.name);
    printed(&ran).to_owned()
}
