//! A box with a network reaches whom it may, and nobody else.

mod basics;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::{BoxExecutionResult, HostName, NetworkPolicy};
use box_runtime::native::NativeConfig;
use serde_json::{Value, json};

use super::support::{Machine, on_each_machine_set_up, printed, spec};

/// A policy from its JSON.
fn policy(json: Value) -> NetworkPolicy {
    serde_json::from_value(json).unwrap()
}

/// The operator's policy, and addresses of names.
fn open(config: &mut NativeConfig, allow: Value, hosts: &[(&str, &str)]) {
    config.egress.policy = policy(json!({ "allow": allow }));
    for (name, address) in hosts {
        let addresses = vec![address.parse::<IpAddr>().unwrap()];
        config
            .egress
            .hosts
            .insert(HostName::new(name).unwrap(), addresses);
    }
}

/// Runs a command in a box that has a network.
async fn online(machine: &Machine, session: &str, cmd: &str) -> BoxExecutionResult {
    let asked = json!({"session_id": session, "network": "on", "cmd": cmd});
    let ran = machine.exec_spec(spec(asked)).await;
    ran.unwrap_or_else(|error| panic!("{}: {cmd}: {error:?}", machine.name))
}

/// A host of the test: a thread for each connection, which does as it is told.
struct Server {
    address: SocketAddr,
    /// Connections so far.
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

    /// One that answers every request with the same text.
    fn http(at: &str, body: &'static str) -> Self {
        Self::start(at, move |mut stream| {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).unwrap_or(0) == 0 {
                    return;
                }
                head.extend(byte);
            }
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        })
    }

    fn port(&self) -> u16 {
        self.address.port()
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// How long a test of this kind may take on one machine.
const LONG: Duration = Duration::from_mins(3);
