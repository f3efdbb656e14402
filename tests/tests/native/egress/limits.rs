//! The network limits of one box.

use super::*;

fn echo() -> Server {
    Server::start("127.0.0.7", |mut stream| {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..length]).is_err() {
                return;
            }
        }
    })
}

fn to_peer(config: &mut NativeConfig) {
    let hosts = [("peer.test", "127.0.0.7")];
    open(config, json!(["peer.test", "127.0.0.7"]), &hosts);
}

#[tokio::test]
async fn connections_beyond_the_limit_are_refused_until_one_ends() {
    let server = echo();
    let set_up = |config: &mut NativeConfig| {
        to_peer(config);
        config.egress.connections = 3;
    };
    let text = format!(
        "def one():
    s = dial('peer.test', {}); s.sendall(b'x'); s.recv(1); return s
held = [one() for _ in range(3)]
print(word(one))
held.pop().close()
for _ in range(2400):
    again = word(one)
    if again != 'ECONNREFUSED': break
    time.sleep(0.05)
print(type(again).__name__)",
        server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "few", &text).await, "ECONNREFUSED\nsocket");
        // Another box has its own limit.
        assert_eq!(says(machine, "other", &text).await, "ECONNREFUSED\nsocket");
    })
    .await;
}

#[tokio::test]
async fn connections_beyond_the_rate_wait_and_are_not_refused() {
    let server = echo();
    let set_up = |config: &mut NativeConfig| {
        to_peer(config);
        // More connections arrive at once than may be open at once.
        config.egress.connections = 40;
        config.egress.connections_per_sec = 20;
    };
    let text = format!(
        "import asyncio
to = socket.gethostbyname('peer.test')
async def one():
    reader, writer = await asyncio.open_connection(to, {})
    writer.write(b'x')
    said = await reader.read(1)
    writer.close()
    return said
async def all():
    return await asyncio.gather(*[one() for _ in range(80)], return_exceptions=True)
begun = time.monotonic()
said = asyncio.run(all())
print(said.count(b'x'), time.monotonic() - begun > 2)",
        server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "fast", &text).await, "80 True");
    })
    .await;
}

#[tokio::test]
async fn connections_are_cut_at_the_byte_limit_of_their_box() {
    let server = echo();
    let set_up = |config: &mut NativeConfig| {
        to_peer(config);
        config.egress.bytes = 1 << 20;
    };
    let text = format!(
        "s = dial('peer.test', {port})
def pump():
    for _ in range(100):
        s.sendall(bytes(1 << 16))
        left = 1 << 16
        while left: 
            piece = s.recv(left)
            if not piece: return 'ended'
            left -= len(piece)
    return 'unlimited'
print(word(pump) in ('ECONNRESET', 'EPIPE'), word(lambda: first('peer.test', {port}, b'x')))",
        port = server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "bytes", &text).await, "True ECONNREFUSED");
    })
    .await;
}

#[tokio::test]
async fn the_proxy_of_the_operator_gets_the_host_name() {
    let target = Server::http("127.0.0.7", "through the proxy");
    let (asked, heads) = std::sync::mpsc::channel();
    let to = target.address;
    let proxy = Server::start("127.0.0.6", move |mut stream| {
        let Some(head) = request(&mut stream) else {
            return;
        };
        let good = head.starts_with("CONNECT web.test:80 ");
        let _ = asked.send(head);
        if !good {
            let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n");
            return;
        }
        let mut far = TcpStream::connect(to).unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n");
        let (mut from, mut into) = (stream.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut into));
        let _ = std::io::copy(&mut far, &mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    });
    let set_up = |config: &mut NativeConfig| {
        config.egress.policy = policy(json!({"deny": ["denied.test"]}));
        let mut upstream = box_runtime::egress::Proxy::new("127.0.0.6", proxy.port());
        upstream.authorization = Some("Basic c2VjcmV0".to_owned());
        config.egress.proxy = Some(upstream);
    };
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let page = online(machine, "proxied", "curl -sS http://web.test/").await;
        assert_eq!(printed(&page), "through the proxy");
        let head = heads.recv_timeout(TEST_LIMIT).unwrap();
        assert!(
            head.contains("Proxy-Authorization: Basic c2VjcmV0\r\n"),
            "{head}"
        );
        let refused = online(machine, "proxied", "curl -4 -sS http://forbidden.test/").await;
        assert_eq!(refused.exit_code, Some(7), "{refused:?}");
        let _ = heads.recv_timeout(TEST_LIMIT).unwrap();
        let denied = online(
            machine,
            "proxied",
            "curl -sS http://denied.test/; curl -sS http://10.0.0.1/",
        )
        .await;
        assert!(denied.stderr.contains("Could not resolve"), "{denied:?}");
        assert_eq!(denied.exit_code, Some(7), "{denied:?}");
        assert!(
            heads.try_recv().is_err(),
            "the proxy is not asked for a denied destination"
        );
    })
    .await;
}
