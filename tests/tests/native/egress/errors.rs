//! Failed connections report the same error as outside a box, and a successful one has a server at
//! its end.

use box_protocol::actions::{BoxDelete, BoxExec, BoxStats};
use box_test_wait::eventually;
use box_tests::machine::on_each_machine;
use rustix::net::{AddressFamily, SocketType};

use super::*;
use crate::adoption::Host;

async fn run(host: &Host, cmd: String) -> String {
    let spec = json!({"box_id": "reported", "network": "on", "timeout_sec": 100, "cmd": cmd});
    let ran = host.call::<BoxExec>(json!({ "spec": spec })).await.unwrap();
    assert_eq!(ran.exit_code, Some(0), "{ran:?}");
    ran.stdout.trim().to_owned()
}

async fn end(host: Host) {
    let delete = json!({"box_id": "reported", "force": true});
    host.call::<BoxDelete>(delete).await.unwrap();
    host.kill().await;
}

async fn connections(host: &Host) -> Option<u64> {
    let used = host.call::<BoxStats>(json!({"box_id": "reported"})).await;
    used.unwrap().network_connections
}

#[tokio::test]
async fn connections_succeed_and_fail_as_they_do_outside_a_box() {
    // The machine of this runtime: a loopback interface without servers, and two routes that lead
    // nowhere.
    let within = "ip link set lo up
ip route add unreachable 192.0.2.9
ip -6 route add unreachable 2001:db8::9";
    let hosts = json!({"refuses.test": ["127.0.0.7"], "away.test": ["192.0.2.9"], "nowhere.test": ["192.0.2.10"],
        "mixed.test": ["192.0.2.10", "127.0.0.7", "192.0.2.9"], "denied.test": ["127.0.0.8"]});
    let allow = json!([
        "*.test",
        "127.0.0.7",
        "192.0.2.9",
        "192.0.2.10",
        "2001:db8::9"
    ]);
    let network = json!({"policy": {"allow": allow}, "hosts": hosts, "within": within});
    let reported = script(
        "def six(name):
    to = socket.getaddrinfo(name, 80, socket.AF_INET6, socket.SOCK_STREAM)[0][4]
    socket.socket(socket.AF_INET6).connect(to)
for host in ['refuses.test', 'away.test', 'nowhere.test', 'mixed.test', 'denied.test', '192.0.2.9', '2001:db8::9', '192.0.2.11']:
    print(host, word(lambda: dial(host, 80)))
for name in ['refuses.test', 'away.test', 'nowhere.test']:
    print(name, word(lambda: six(name)))
import asyncio
print('asyncio', word(lambda: asyncio.run(asyncio.open_connection('192.0.2.9', 80))))",
    );
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let host = Host::start_with(machine, dir.path(), network.clone())
            .await
            .unwrap();
        let reported = run(&host, reported.clone()).await;
        let expected = [
            "refuses.test ECONNREFUSED",
            "away.test EHOSTUNREACH",
            "nowhere.test ENETUNREACH",
            "mixed.test ECONNREFUSED",
            "denied.test ECONNREFUSED",
            "192.0.2.9 EHOSTUNREACH",
            "2001:db8::9 EHOSTUNREACH",
            "192.0.2.11 ECONNREFUSED",
            "refuses.test ECONNREFUSED",
            "away.test EHOSTUNREACH",
            "nowhere.test ENETUNREACH",
            "asyncio EHOSTUNREACH",
        ];
        assert_eq!(
            reported.lines().collect::<Vec<_>>(),
            expected,
            "{}",
            machine.name
        );
        end(host).await;
    })
    .await;
}

/// A host that accepts no connection until the test says so.
struct SlowHost {
    listener: TcpListener,
    /// Connections that fill its queue.
    waiting: Vec<TcpStream>,
}

impl SlowHost {
    fn start() -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.7:0".parse().unwrap();
        rustix::net::bind(&socket, &any).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let address = listener.local_addr().unwrap();
        let soon = Duration::from_millis(200);
        let (mut waiting, mut in_vain) = (Vec::new(), 0);
        while in_vain < 2 {
            match TcpStream::connect_timeout(&address, soon) {
                Ok(stream) => waiting.push(stream),
                Err(_) => in_vain += 1,
            }
        }
        Self { listener, waiting }
    }

    fn network() -> Value {
        json!({"policy": {"allow": ["slow.test", "127.0.0.7"]}, "hosts": {"slow.test": ["127.0.0.7"]}})
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// Accepts all waiting connections and the next one. Returns whether that one ends without
    /// data.
    fn answer(self) -> std::thread::JoinHandle<bool> {
        std::thread::spawn(move || {
            let filled = self.waiting.len();
            let mut stream = None;
            for _ in 0..=filled {
                let mut next = self.listener.accept().unwrap().0;
                let _ = next.write_all(b"late");
                stream = Some(next);
            }
            matches!(stream.unwrap().read(&mut [0; 10]), Ok(0) | Err(_))
        })
    }
}

#[tokio::test]
async fn a_connection_attempt_is_repeated_by_the_next_runtime() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let slow = SlowHost::start();
        let network = SlowHost::network();
        let start = || Host::start_with(machine, dir.path(), network.clone());
        let first = start().await.unwrap();
        let waits = script(&format!(
            "s = socket.create_connection((socket.gethostbyname('slow.test'), {}), 60)
open('/tmp/connected', 'w')
with open('/tmp/part', 'wb') as got: got.write(s.recv(10))
os.rename('/tmp/part', '/tmp/got')",
            slow.port()
        ));
        let waits = format!("({waits}\n) >/dev/null 2>&1 &");
        run(&first, waits).await;
        eventually("a connection is open", async || {
            connections(&first).await == Some(1)
        })
        .await;
        assert_eq!(
            run(&first, "ls /tmp".to_owned()).await,
            "test.py",
            "no server has answered"
        );
        first.kill().await;

        let second = start().await.unwrap();
        second.adopts(1).await;
        assert_eq!(
            run(&second, "ls /tmp".to_owned()).await,
            "test.py",
            "also not after the adoption"
        );
        slow.answer();
        let got =
            "for n in $(seq 300); do test -e /tmp/got && break; sleep 0.1; done; cat /tmp/got";
        assert_eq!(
            run(&second, got.to_owned()).await,
            "late",
            "{}",
            machine.name
        );
        end(second).await;
    })
    .await;
}

#[tokio::test]
async fn an_abandoned_connection_attempt_ends_outside_the_box() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let slow = SlowHost::start();
        let host = Host::start_with(machine, dir.path(), SlowHost::network())
            .await
            .unwrap();
        let gives_up = script(&format!(
            "print(word(lambda: socket.create_connection((socket.gethostbyname('slow.test'), {}), 1)))",
            slow.port()
        ));
        assert_eq!(run(&host, gives_up).await, "TimeoutError");
        assert_eq!(connections(&host).await, Some(1), "a connection is attempted");
        let ended = slow.answer();
        let ended = tokio::task::spawn_blocking(|| ended.join().unwrap());
        assert!(ended.await.unwrap());
        eventually("the connection is closed", async || connections(&host).await == Some(0)).await;
        end(host).await;
    })
    .await;
}

#[tokio::test]
async fn connections_from_one_port_to_two_hosts_are_distinct() {
    let (one, two) = (
        Server::http("127.0.0.7", "one"),
        Server::http("127.0.0.8", "two"),
    );
    let set_up = |config: &mut NativeConfig| {
        let hosts = [("one.test", "127.0.0.7"), ("two.test", "127.0.0.8")];
        open(config, json!(["*.test", "127.0.0.7", "127.0.0.8"]), &hosts);
    };
    let text = format!(
        "def at(name, port, own):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(('198.18.0.1', own))
    s.connect((name, port))
    return s
for own in range(20000, 20050):
    both = at('one.test', {}, own), at('two.test', {}, own)
    for s in both: s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')
    said = [s.makefile().read()[-3:] for s in both]
    assert said == ['one', 'two'], said
print('distinguished')",
        one.port(),
        two.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "ports", &text).await, "distinguished");
    })
    .await;
}
