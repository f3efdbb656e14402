//! Attempts of a program in a box to reach a denied destination. Each attempt has its control.

use super::*;

fn set_up(config: &mut NativeConfig) {
    let hosts = [("web.test", "127.0.0.7"), ("trap.test", "127.0.0.1")];
    open(config, json!(["*.test", "127.0.0.7"]), &hosts);
}

#[tokio::test]
async fn no_name_and_no_address_reaches_the_loopback_of_the_host() {
    let secret = Server::http("127.0.0.1", "secret");
    let port = secret.port();
    // The control: the server exists, and the same command reaches it from outside.
    let outside = std::process::Command::new("curl")
        .args(["-sS", &format!("http://127.0.0.1:{port}/")])
        .output()
        .unwrap();
    assert_eq!(outside.stdout, b"secret");
    let web = Server::http("127.0.0.7", "web");
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        for host in [
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "127.1",
            "2130706433",
            "0x7f.1",
            "0177.0.0.1",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "trap.test",
            "TRAP.test.",
            "198.18.0.1",
            "box",
            "169.254.169.254",
            "[fd00:ec2::254]",
        ] {
            let ran = online(
                machine,
                "own",
                &format!("curl -sS -m 20 'http://{host}:{port}/'"),
            )
            .await;
            assert_ne!(ran.exit_code, Some(0), "{host}: {ran:?}");
            assert_ne!(ran.exit_code, Some(28), "{host} hangs");
        }
        let reached = online(
            machine,
            "own",
            &format!("curl -sS http://web.test:{}/", web.port()),
        )
        .await;
        assert_eq!(
            printed(&reached),
            "web",
            "the control: the box reaches an allowed server"
        );
        assert_eq!(secret.taken(), 1, "only the connection of the control");
    })
    .await;
}

#[tokio::test]
async fn egress_sockets_abstract_sockets_and_other_boxes_are_unreachable() {
    use std::os::linux::net::SocketAddrExt as _;
    let name = format!("box-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    assert!(
        std::os::unix::net::UnixStream::connect_addr(&address).is_ok(),
        "the control"
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let listen = "python3 -m http.server 8000 --bind 0.0.0.0 >/dev/null 2>&1 & sleep 1; curl -sS -o /dev/null -w '%{http_code}' http://198.18.0.1:8000/";
        assert_eq!(printed(&online(machine, "neighbour", listen).await), "200", "the control: a box reaches itself at its address");
        let text = format!(
            "def unix():
    s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}')
print(word(unix))
print(word(lambda: first('127.0.0.1', 1, b'x')), word(lambda: first('::1', 1, b'x')))
print(word(lambda: first('198.18.0.1', 8000)), word(lambda: first('fd00:b0::1', 8000)))
def bind(port):
    s = socket.socket(); s.bind(('127.0.0.1', port))
print(word(lambda: bind(1)), word(lambda: bind(53)), word(lambda: bind(8001)))"
        );
        let answer = says(machine, "tries", &text).await;
        let lines: Vec<_> = answer.lines().collect();
        assert_eq!(lines[0], "ECONNREFUSED");
        assert!(lines[1].split(' ').all(|word| ["ECONNRESET", "ECONNREFUSED"].contains(&word)), "{answer}");
        assert_eq!(lines[2..], ["ECONNREFUSED ECONNREFUSED", "EACCES EACCES None"]);
    })
    .await;
}

#[tokio::test]
async fn routes_rules_and_interfaces_cannot_be_changed_from_inside() {
    let web = Server::http("127.0.0.7", "web");
    let page = format!("curl -sS http://web.test:{}/", web.port());
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let text = "
def netlink(kind, body, flags=0x605, protocol=0):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    s.send(struct.pack('IHHII', 16 + len(body), kind, flags, 1, 0) + body)
    code = struct.unpack('i', s.recv(4096)[16:20])[0]
    if code: raise OSError(-code, 'refused')
    return 'changed'
lo = struct.pack('BxHiII', 0, 0, 1, 0, 1)
print(word(lambda: netlink(16, lo)))
print(word(lambda: netlink(24, struct.pack('BBBBBBBBI', 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack('HHI', 8, 4, 1))))
print(word(lambda: netlink(25, struct.pack('BBBBBBBBI', 2, 0, 0, 0, 254, 0, 0, 0, 0))))
print(word(lambda: netlink(21, struct.pack('BBBBI', 2, 32, 0, 0, 1) + struct.pack('HH4s', 8, 2, socket.inet_aton('198.18.0.1')))))
print(word(lambda: netlink(0xa02, b'', protocol=12)))
print(word(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)), word(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)))
print(word(lambda: open('/proc/sys/net/ipv4/ip_unprivileged_port_start', 'w').write('0')))
print(word(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)).__class__.__name__)
print(word(lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 36, 4711)))";
        let answer = says(machine, "change", text).await;
        let lines: Vec<_> = answer.lines().collect();
        assert_eq!(lines[..4], ["EPERM"; 4], "{answer}");
        assert!(["EPROTONOSUPPORT", "EPERM"].contains(&lines[4]), "{answer}");
        assert!(!lines[5].contains("socket"), "{answer}");
        assert!(["EROFS", "EACCES", "EPERM"].contains(&lines[6]), "{answer}");
        assert_eq!(lines[7], "socket", "the control: netlink itself is there");
        assert_eq!(lines[8], "EPERM", "the marks by which rules know what was decided");
        assert_eq!(printed(&online(machine, "change", &page).await), "web", "and everything is as it was");
    })
    .await;
}
