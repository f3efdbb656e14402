//! Data arrives complete and in order, whatever the two ends do.

use super::*;

const LARGE: usize = 64 << 20;

fn set_up(config: &mut NativeConfig) {
    open(
        config,
        json!(["peer.test", "127.0.0.7"]),
        &[("peer.test", "127.0.0.7")],
    );
}

/// The first `length` bytes of a known stream.
fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|n| u8::try_from((n ^ (n >> 8) ^ (n >> 16)) & 0xff).unwrap())
        .collect()
}

#[tokio::test]
async fn many_bytes_flow_in_both_directions_and_each_direction_ends_separately() {
    // Reads to the end of input and only then answers, which needs a half-closed connection.
    let server = Server::start("127.0.0.7", |mut stream| {
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        let right = all == pattern(LARGE);
        let _ = stream.write_all(&[u8::from(right)]);
        let _ = stream.write_all(&pattern(LARGE));
    });
    let text = format!(
        "size = {LARGE}
data = bytes(bytearray((n ^ (n >> 8) ^ (n >> 16)) & 0xff for n in range(1 << 16)))
whole = b''.join(bytes(b ^ (h & 0xff) for b in data) for h in range(size >> 16))
s = dial('peer.test', {})
s.sendall(whole); s.shutdown(socket.SHUT_WR)
back = bytearray()
while piece := s.recv(1 << 20):
    back += piece
print(back[0], bytes(back[1:]) == whole, len(back))",
        server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let answer = says(machine, "large", &text).await;
        assert_eq!(answer, format!("1 True {}", LARGE + 1));
        let used = serde_json::from_value(json!({"box_id": "large"})).unwrap();
        let used = machine
            .runtime
            .stats(&box_runtime::Caller::Local, used, None)
            .await
            .unwrap();
        let moved = (used.network_sent_bytes, used.network_received_bytes);
        assert_eq!(
            moved,
            (Some(LARGE as u64), Some(LARGE as u64 + 1)),
            "and is counted"
        );
    })
    .await;
}

#[tokio::test]
async fn resets_and_ends_of_connections_are_passed_on() {
    let server = Server::start("127.0.0.7", |mut stream| {
        let mut how = [0];
        if stream.read(&mut how).unwrap_or(0) == 1 && &how == b"r" {
            let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        }
    });
    let (sender, resets) = std::sync::mpsc::channel();
    let watcher = Server::start("127.0.0.7", move |mut stream| {
        let _ = stream.write_all(b"!");
        let end = stream.read(&mut [0; 10]).map_err(|error| error.kind());
        let _ = sender.send(end);
    });
    let text = format!(
        "print(word(lambda: first('peer.test', {port}, b'r')), repr(first('peer.test', {port}, b'e')))
for linger in 1, 0:
    s = dial('peer.test', {})
    s.recv(1)
    if linger: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    s.close()",
        watcher.port(),
        port = server.port(),
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "reset", &text).await, "ECONNRESET ''");
        let mut ends: Vec<_> = (0..2)
            .map(|_| resets.recv_timeout(TEST_LIMIT).unwrap())
            .collect();
        ends.sort_by_key(Result::is_ok);
        assert_eq!(ends, [Err(std::io::ErrorKind::ConnectionReset), Ok(0)]);
    })
    .await;
}

#[tokio::test]
async fn a_thousand_connections_are_open_at_once_and_apart() {
    let server = Server::start("127.0.0.7", |mut stream| {
        let mut word = [0; 4];
        while stream.read_exact(&mut word).is_ok() {
            let _ = stream.write_all(&word);
        }
    });
    let text = format!(
        "all = [dial('peer.test', {}) for _ in range(1000)]
for n, s in enumerate(all): s.sendall(struct.pack('>I', n))
print(sum(struct.unpack('>I', s.recv(4))[0] == n for n, s in enumerate(all)))",
        server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let before = server.taken();
        assert_eq!(says(machine, "many", &text).await, "1000");
        assert_eq!(server.taken(), before + 1000);
    })
    .await;
}

#[tokio::test]
async fn slow_peers_lose_nothing_and_delay_no_other_connection() {
    let server = Server::start("127.0.0.7", |mut stream| {
        let mut how = [0];
        let _ = stream.read(&mut how);
        match &how {
            b"s" => {
                for byte in b"slowly".repeat(8) {
                    std::thread::sleep(Duration::from_millis(10));
                    let _ = stream.write_all(&[byte]);
                }
            }
            _ => drop(stream.write_all(&vec![7; 32 << 20])),
        }
    });
    let text = format!(
        "slow, idle = dial('peer.test', {port}), dial('peer.test', {port})
slow.sendall(b's'); idle.sendall(b'm')
quick = dial('peer.test', {port}); quick.sendall(b'm')
got = 0
while piece := quick.recv(1 << 20): got += len(piece)
print(got == 32 << 20)
answer = b''
while piece := slow.recv(100): answer += piece
print(answer == b'slowly' * 8)
got = 0
while piece := idle.recv(1 << 20): got += len(piece)
print(got == 32 << 20)",
        port = server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(says(machine, "slow", &text).await, "True\nTrue\nTrue");
    })
    .await;
}
