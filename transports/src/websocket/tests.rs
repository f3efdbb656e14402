use std::{collections::VecDeque, io::Cursor, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
    time::Instant,
};

use tungstenite::protocol::frame::{
    Frame, FrameHeader,
    coding::{Control, Data, OpCode},
};

use super::*;

const TEXT: OpCode = OpCode::Data(Data::Text);
const CONTINUATION: OpCode = OpCode::Data(Data::Continue);
const BINARY: OpCode = OpCode::Data(Data::Binary);
const PING: OpCode = OpCode::Control(Control::Ping);
const PONG: OpCode = OpCode::Control(Control::Pong);
const CLOSE: OpCode = OpCode::Control(Control::Close);

type Halves = (Box<dyn SendHalf>, Box<dyn ReceiveHalf>);

fn limits(message_bytes: usize) -> Limits {
    let mut limits = Limits::default();
    limits.message_bytes = message_bytes;
    limits
}

/// Creates a websocket in `role`, and the raw stream of its peer.
fn raw(role: Role, limits: &Limits) -> (Halves, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    (Box::new(from_upgraded(near, role, limits)).split(), far)
}

fn frame(last: bool, opcode: OpCode, payload: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    let header = FrameHeader {
        is_final: last,
        opcode,
        mask,
        ..FrameHeader::default()
    };
    let mut bytes = Vec::new();
    Frame::from_payload(header, payload.to_vec().into())
        .format(&mut bytes)
        .unwrap();
    bytes
}

/// Returns a frame as a client sends it.
fn masked(last: bool, opcode: OpCode, payload: &[u8]) -> Vec<u8> {
    frame(last, opcode, payload, Some([7, 77, 177, 237]))
}

async fn read_frame(stream: &mut UnixStream) -> (FrameHeader, Vec<u8>) {
    let mut bytes = Vec::new();
    loop {
        let mut cursor = Cursor::new(&bytes);
        if let Some((header, length)) = FrameHeader::parse(&mut cursor).unwrap()
            && bytes.len() as u64 == cursor.position() + length
        {
            let mut payload = bytes.split_off(header.len(length));
            if let Some(mask) = header.mask {
                let mask = mask.iter().cycle();
                payload
                    .iter_mut()
                    .zip(mask)
                    .for_each(|(byte, key)| *byte ^= key);
            }
            return (header, payload);
        }
        bytes.push(stream.read_u8().await.unwrap());
    }
}

async fn text(receive: &mut dyn ReceiveHalf) -> String {
    receive.receive().await.unwrap().unwrap()
}

#[tokio::test]
async fn messages_survive_every_way_of_splitting_the_stream() {
    let mut bytes = masked(true, TEXT, "é".repeat(100).as_bytes());
    bytes.extend(masked(false, TEXT, b"one "));
    bytes.extend(masked(true, PING, b"are you there"));
    bytes.extend(masked(false, CONTINUATION, b""));
    bytes.extend(masked(false, CONTINUATION, b"two"));
    bytes.extend(masked(true, PONG, b""));
    // The client of Python's `websockets` ends a long message like this.
    bytes.extend(masked(true, CONTINUATION, b""));
    bytes.extend(masked(true, TEXT, b""));
    bytes.extend(masked(true, CLOSE, &1000_u16.to_be_bytes()));
    for split in 0..bytes.len() {
        let ((_send, mut receive), mut far) = raw(Role::Server, &Limits::default());
        let read = async {
            let messages = [
                text(&mut *receive).await,
                text(&mut *receive).await,
                text(&mut *receive).await,
            ];
            assert_eq!(receive.receive().await.unwrap(), None);
            messages
        };
        let peer = async {
            far.write_all(&bytes[..split]).await.unwrap();
            tokio::task::yield_now().await;
            far.write_all(&bytes[split..]).await.unwrap();
            read_frame(&mut far).await
        };
        let (messages, (header, payload)) = tokio::join!(read, peer);
        assert_eq!(
            messages,
            ["é".repeat(100), "one two".to_owned(), String::new()]
        );
        assert_eq!(
            (header.opcode, payload.as_slice()),
            (PONG, &b"are you there"[..]),
            "split at {split}"
        );
    }
}

#[tokio::test]
async fn an_oversize_message_is_skipped_and_the_connection_lives() {
    for pieces in [1, 7] {
        let ((_send, mut receive), mut far) = raw(Role::Server, &limits(100_000));
        let payload = format!("{{\"id\":7,{}", "x".repeat(3_000_000));
        let writer = tokio::spawn(async move {
            let parts: Vec<&[u8]> = payload
                .as_bytes()
                .chunks(payload.len() / pieces + 1)
                .collect();
            for (at, part) in parts.iter().enumerate() {
                let opcode = if at == 0 { TEXT } else { CONTINUATION };
                far.write_all(&masked(at + 1 == parts.len(), opcode, part))
                    .await
                    .unwrap();
            }
            far.write_all(&masked(true, TEXT, b"next")).await.unwrap();
            far
        });
        let outcome = receive.receive().await;
        let Err(ConnectionError::TooLarge { head, limit }) = outcome else {
            panic!("expected TooLarge, got {outcome:?}");
        };
        assert_eq!((head.len(), limit), (512, 100_000));
        assert!(head.starts_with("{\"id\":7,xxx"), "{head}");
        assert_eq!(text(&mut *receive).await, "next");
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn the_head_of_a_skipped_message_is_joined_from_its_frames() {
    let ((_send, mut receive), mut far) = raw(Role::Server, &limits(10));
    let text = "{\"id\":7,é…}";
    let parts: Vec<&[u8]> = text.as_bytes().chunks(3).collect();
    for (at, part) in parts.iter().enumerate() {
        let opcode = if at == 0 { TEXT } else { CONTINUATION };
        let bytes = masked(at + 1 == parts.len(), opcode, part);
        far.write_all(&bytes).await.unwrap();
        far.write_all(&masked(true, PING, b"")).await.unwrap();
    }
    far.write_all(&masked(true, TEXT, b"next")).await.unwrap();
    let outcome = receive.receive().await;
    assert!(
        matches!(&outcome, Err(ConnectionError::TooLarge { head, .. }) if head == text),
        "{outcome:?}"
    );
    assert_eq!(super::tests::text(&mut *receive).await, "next");
}

#[tokio::test]
async fn a_length_may_be_written_in_more_bytes_than_it_needs() {
    let ((_send, mut receive), mut far) = raw(Role::Client, &Limits::default());
    far.write_all(&[0x81, 127, 0, 0, 0, 0, 0, 0, 0, 2, b'h', b'i'])
        .await
        .unwrap();
    far.write_all(&frame(true, TEXT, b"next", None))
        .await
        .unwrap();
    assert_eq!(text(&mut *receive).await, "hi");
    assert_eq!(text(&mut *receive).await, "next");
}

#[tokio::test]
async fn a_message_of_exactly_the_limit_passes() {
    for length in [1000, 1001] {
        let ((_send, mut receive), mut far) = raw(Role::Server, &limits(1000));
        far.write_all(&masked(false, TEXT, &vec![b'x'; length - 1]))
            .await
            .unwrap();
        far.write_all(&masked(true, CONTINUATION, b"y"))
            .await
            .unwrap();
        assert_eq!(receive.receive().await.is_ok(), length == 1000);
    }
}

#[tokio::test]
async fn a_protocol_violation_closes_with_its_status() {
    let cases: [(Role, Vec<u8>, u16); 8] = [
        (Role::Server, masked(true, BINARY, b"x"), 1003),
        (Role::Server, masked(true, TEXT, b"\xff"), 1007),
        (Role::Server, masked(true, CONTINUATION, b"x"), 1002),
        (Role::Server, frame(true, TEXT, b"bare", None), 1002),
        (Role::Client, masked(true, TEXT, b"masked"), 1002),
        (Role::Server, masked(false, PING, b""), 1002),
        (
            Role::Server,
            [masked(false, TEXT, b""), masked(true, TEXT, b"")].concat(),
            1002,
        ),
        (
            Role::Server,
            [
                masked(false, TEXT, b""),
                masked(false, CONTINUATION, b"").repeat(4096),
            ]
            .concat(),
            1008,
        ),
    ];
    for (role, bytes, status) in cases {
        let ((mut send, mut receive), mut far) = raw(role, &Limits::default());
        let writer = async {
            far.write_all(&bytes).await.unwrap();
            read_frame(&mut far).await
        };
        let (outcome, (header, payload)) = tokio::join!(receive.receive(), writer);
        assert!(
            matches!(outcome, Err(ConnectionError::Framing(_))),
            "{outcome:?}"
        );
        assert_eq!(
            (header.opcode, &payload[..2]),
            (CLOSE, &status.to_be_bytes()[..])
        );
        assert_eq!(receive.receive().await.unwrap(), None);
        assert!(matches!(
            send.send(String::new()).await,
            Err(ConnectionError::Closed)
        ));
    }
}

#[tokio::test]
async fn an_event_between_ready_messages_is_reported_in_order() {
    let ((_send, mut receive), mut far) = raw(Role::Server, &limits(10));
    let bytes = [
        masked(true, TEXT, b"a"),
        masked(true, TEXT, b"b"),
        masked(true, TEXT, b"much too long for it"),
        masked(true, TEXT, b"c"),
        masked(true, CLOSE, b""),
    ]
    .concat();
    far.write_all(&bytes).await.unwrap();
    assert_eq!(text(&mut *receive).await, "a");
    assert_eq!(receive.receive_ready().as_deref(), Some("b"));
    assert_eq!(receive.receive_ready(), None);
    assert_eq!(receive.receive_ready(), None);
    assert!(matches!(
        receive.receive().await,
        Err(ConnectionError::TooLarge { .. })
    ));
    assert_eq!(receive.receive_ready().as_deref(), Some("c"));
    assert_eq!(receive.receive_ready(), None);
    assert_eq!(receive.receive().await.unwrap(), None);
}

#[tokio::test]
async fn a_peer_that_vanishes_is_an_error() {
    let ((_send, mut receive), far) = raw(Role::Server, &Limits::default());
    drop(far);
    assert!(matches!(
        receive.receive().await,
        Err(ConnectionError::Closed)
    ));
}

#[tokio::test(start_paused = true)]
async fn a_message_must_end_in_time_once_started() {
    let ((_send, mut receive), mut far) = raw(Role::Server, &Limits::default());
    let begin = Instant::now();
    let trickle = tokio::spawn(async move {
        far.write_all(&masked(false, TEXT, b"x")).await.unwrap();
        loop {
            tokio::time::sleep(Duration::from_secs(7)).await;
            let more = masked(false, CONTINUATION, b"x");
            if far.write_all(&more).await.is_err() {
                return;
            }
        }
    });
    let outcome = receive.receive().await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    assert_eq!(begin.elapsed().as_secs(), 60);
    trickle.abort();
}

#[tokio::test]
async fn both_roles_exchange_messages_and_close_separately() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, mut receive) =
        Box::new(from_upgraded(near, Role::Client, &Limits::default())).split();
    let (mut server_send, mut server_receive) =
        Box::new(from_upgraded(far, Role::Server, &Limits::default())).split();
    let messages: Vec<String> = [0, 125, 126, 65_535, 65_536, 1_000_000, 3]
        .iter()
        .map(|length| "é".repeat(*length))
        .collect();
    let mut batch: VecDeque<String> = messages.iter().cloned().collect();
    let client = tokio::spawn(async move {
        send.send_all(&mut batch).await.unwrap();
        send.close().await.unwrap();
        assert!(matches!(
            send.send(String::new()).await,
            Err(ConnectionError::Closed)
        ));
    });
    let mut received = VecDeque::new();
    while let Some(message) = server_receive.receive().await.unwrap() {
        received.push_back(message);
        received.extend(std::iter::from_fn(|| server_receive.receive_ready()));
    }
    client.await.unwrap();
    assert_eq!(received, messages);
    let server = tokio::spawn(async move {
        server_send.send_all(&mut received).await.unwrap();
        server_send.close().await.unwrap();
    });
    for message in messages {
        assert_eq!(text(&mut *receive).await, message);
    }
    assert_eq!(receive.receive().await.unwrap(), None);
    server.await.unwrap();
}

/// Sends `request` to a server with `policy`; returns the first line of the response.
async fn status_of(request: &str, policy: &dyn CheckUpgrade) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let outcome = accept(stream, &Limits::default(), policy).await;
    let mut answer = Vec::new();
    let admitted = outcome.is_ok();
    drop(outcome);
    client.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert_eq!(admitted, answer.starts_with("HTTP/1.1 101 "), "{answer}");
    answer.split(' ').nth(1).unwrap().to_owned()
}

fn request(path: &str, more: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: box:1\r\nUpgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    )
}

#[test]
fn a_host_without_a_port_matches_any_port() {
    use super::upgrade_policy::is_host;
    for (ours, host) in [
        ("box", "BOX"),
        ("box", "box:80"),
        ("box:80", "box:80"),
        ("[::1]", "[::1]:80"),
        ("127.0.0.1", "127.0.0.1:7070"),
    ] {
        assert!(is_host(ours, host), "{ours} {host}");
    }
    for (ours, host) in [
        ("box", "boxes"),
        ("box", "box:"),
        ("box", "box:80.evil"),
        ("box", "box80"),
        ("box:80", "box"),
        ("box:80", "box:8080"),
        ("box:80", "box:80:80"),
        ("::1", "::1:80"),
        ("box", ""),
    ] {
        assert!(!is_host(ours, host), "{ours} {host}");
    }
}

#[tokio::test]
async fn the_policy_checks_paths_origins_hosts_and_tokens() {
    let open = UpgradePolicy::new();
    let strict = UpgradePolicy::new()
        .origins(["https://ours"])
        .hosts(["BOX:1"])
        .token("secret");
    let other_host = UpgradePolicy::new().hosts(["elsewhere"]);
    let token = "Authorization: Bearer secret\r\n";
    for (request, policy, status) in [
        (request("/", ""), &open, "101"),
        (request("/rpc/ws?x=1", ""), &open, "101"),
        (request("/other", ""), &open, "404"),
        (request("/", "Origin: https://evil\r\n"), &open, "403"),
        (request("/", "Origin: https://evil\r\n"), &strict, "403"),
        (
            request(
                "/",
                &format!("Origin: https://ours\r\nOrigin: x\r\n{token}"),
            ),
            &strict,
            "403",
        ),
        (
            request("/", &format!("Origin: https://ours\r\n{token}")),
            &strict,
            "101",
        ),
        (request("/", token), &strict, "101"),
        (request("/", ""), &strict, "401"),
        (
            request("/", "Authorization: Bearer secre\r\n"),
            &strict,
            "401",
        ),
        (request("/", ""), &other_host, "403"),
        (request("/", "").replace("GET", "POST"), &open, "405"),
        (request("/", "").replace("WebSocket", "h2c"), &open, "426"),
        (
            request("/", "").replace("Version: 13", "Version: 8"),
            &open,
            "426",
        ),
        (request("/", "").replace("dGhl", "d"), &open, "400"),
        ("\u{1}\r\n\r\n".to_owned(), &open, "400"),
        (request("/", &"X: y\r\n".repeat(200)), &open, "431"),
        (
            request("/", &format!("X: {}", "y".repeat(17_000))),
            &open,
            "431",
        ),
        (
            request("/", &format!("Authorization: {}", "y".repeat(100_000))),
            &strict,
            "431",
        ),
    ] {
        assert_eq!(status_of(&request, policy).await, status, "{request}");
    }
    let closure = |request: &UpgradeRequest<'_>| match request.header("x-key") {
        Some("1") => Ok(()),
        _ => Err(UpgradeRejection::new(418, "no")),
    };
    assert_eq!(
        status_of(&request("/any", "X-Key: 1\r\n"), &closure).await,
        "101"
    );
    assert_eq!(status_of(&request("/any", ""), &closure).await, "418");
}

#[test]
fn a_policy_does_not_show_its_token() {
    let shown = format!("{:?}", UpgradePolicy::new().token("secret"));
    assert!(!shown.contains("secret"), "{shown}");
}

#[test]
fn the_accept_key_matches_the_specification() {
    let answer = accept_key("dGhlIHNhbXBsZSBub25jZQ==");
    assert_eq!(answer.as_deref(), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    for invalid in ["", "==", "dGhlIHNhbXBsZSBub25j", "dGhlIHNhbXBsZSBub25jZ_=="] {
        assert_eq!(accept_key(invalid), None, "{invalid}");
    }
}

#[tokio::test]
async fn frames_sent_with_the_request_are_not_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let mut bytes = request("/rpc/ws", "").into_bytes();
    bytes.extend(masked(true, TEXT, b"early"));
    client.write_all(&bytes).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let socket = accept(stream, &Limits::default(), &UpgradePolicy::new())
        .await
        .unwrap();
    let (_send, mut receive) = Box::new(socket).split();
    assert_eq!(text(&mut *receive).await, "early");
}

#[tokio::test]
async fn a_client_reports_refusals_and_bad_headers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("ws://{}/rpc/ws", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let policy = UpgradePolicy::new().token("secret");
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let _ = accept(stream, &Limits::default(), &policy).await;
        }
    });
    let attempt = async |name: &str, value: &str| {
        let headers = [(name.to_owned(), value.to_owned())];
        match connect(&url, &headers, &ClientTls::default(), &Limits::default()).await {
            Ok(_) => "connected".to_owned(),
            Err(error) => error.to_string(),
        }
    };
    assert_eq!(attempt("Authorization", "Bearer secret").await, "connected");
    assert_eq!(
        attempt("Authorization", "Bearer wrong").await,
        "connection: permission denied"
    );
    assert_eq!(
        attempt("X", "a\r\nY: b").await,
        "connection: invalid input parameter"
    );
    server.abort();
}
