//! Ports of real boxes over HTTP: by signed URL and by token.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_test_wait::{LONG, eventually};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use box_client::{BoxClient, BoxHandle, SpecDraft};

use crate::support::{ANN, Answer, BOB, Client, RunningServer, Setup, bearer};

/// The application in the box: it reports its request, counts the received bytes, and echoes on a
/// websocket.
const APP: &str = include_str!("app.py");

fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

/// A box with an application on port 8000.
async fn a_box(client: &BoxClient, id: &str) -> BoxHandle {
    let handle = client.create(SpecDraft::new(id)).await.unwrap();
    listens(&handle, APP).await;
    handle
}

async fn listens(handle: &BoxHandle, program: &'static str) {
    handle.files().write("/tmp/app.py", program).await.unwrap();
    let app = handle.program(["python3", "/tmp/app.py"]).detached();
    app.start().await.unwrap();
    eventually("a server listens", async || {
        handle.connect_port(port(8000)).await.is_ok()
    })
    .await;
}

/// The path of a signed URL.
async fn path(handle: &BoxHandle, number: u16, expires_after: Option<Duration>) -> String {
    let shared = handle
        .share_port(port(number), expires_after)
        .await
        .unwrap();
    assert_eq!(shared.expires_at.is_some(), expires_after.is_some());
    let (_, path) = shared.url.split_once("/boxes/").unwrap();
    format!("/boxes/{path}")
}

fn get(server: &RunningServer, path: &str, headers: &[(&str, &str)]) -> Answer {
    server.client().get(path, headers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_url_opens_one_port_of_one_box_and_nothing_else() {
    let server = Setup::new().with_tokens().start();
    let client = crate::rpc::connect(&server.rpc(), Some(ANN)).await;
    let web = a_box(&client, "a b~c").await;
    let other = a_box(&client, "other").await;
    let shared_path = path(&web, 8000, None).await;
    let unique = |path: &str| {
        path["/boxes/".len()..]
            .split('~')
            .next()
            .unwrap()
            .to_owned()
    };
    let (id, others) = (
        unique(&shared_path),
        unique(&path(&other, 8000, None).await),
    );
    let answer = get(&server, &format!("{shared_path}x/y%2Fz?q=1"), &[]);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["path"], "/x/y%2Fz?q=1");
    // Also without its last slash.
    assert_eq!(
        get(&server, shared_path.trim_end_matches('/'), &[]).status,
        200
    );

    let signature = shared_path
        .split('~')
        .nth(1)
        .unwrap()
        .split('/')
        .next()
        .unwrap();
    for index in [0, 10, 14, 20, 43] {
        let mut wrong = signature.to_owned();
        let other = if &wrong[index..=index] == "x" {
            "y"
        } else {
            "x"
        };
        wrong.replace_range(index..=index, other);
        let answer = get(&server, &shared_path.replace(signature, &wrong), &[]);
        assert_eq!(answer.status, 401, "{index}: {answer:?}");
        assert!(answer.body.contains("address"), "{answer:?}");
    }
    for elsewhere in [
        shared_path.replace("/port/8000/", "/port/8001/"),
        shared_path.replace(&id, &others),
        shared_path.replace(&id, "absent"),
        format!("/boxes/other~{signature}/port/8000/"),
    ] {
        assert_eq!(get(&server, &elsewhere, &[]).status, 401, "{elsewhere}");
    }

    let short = path(&web, 8000, Some(Duration::from_millis(1))).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(get(&server, &short, &[]).status, 401, "the URL has expired");
    let absent = path(&web, 8001, None).await;
    let answer = get(&server, &absent, &[]);
    assert_eq!(answer.status, 502);
    assert!(
        answer.body.contains("no listener on port 8001"),
        "{answer:?}"
    );

    // A later box of the same name is a different box.
    web.delete().await.unwrap();
    assert_eq!(get(&server, &shared_path, &[]).status, 401);
    let again = a_box(&client, "a b~c").await;
    assert_eq!(get(&server, &shared_path, &[]).status, 401);
    let fresh = path(&again, 8000, None).await;
    assert_eq!(get(&server, &fresh, &[]).status, 200, "control");
    again.pause().await.unwrap();
    assert_eq!(get(&server, &fresh, &[]).status, 409, "the box is paused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_the_ports_of_its_boxes_and_no_box_sees_it() {
    let server = Setup::new().with_tokens().start();
    let client = crate::rpc::connect(&server.rpc(), Some(ANN)).await;
    let web = a_box(&client, "web").await;
    let plain = "/boxes/web/port/8000/";
    let (name, ann) = bearer(ANN);
    let (_, bob) = bearer(BOB);
    let headers = [(name, ann.as_str()), ("X-Mine", "1"), ("X-Api-Key", ANN)];
    let answer = get(&server, plain, &headers);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["headers"]["x-mine"], "1", "control");
    assert!(!answer.body.contains(ANN), "{answer:?}");
    assert_eq!(get(&server, plain, &[]).status, 401);
    assert_eq!(get(&server, plain, &[(name, &bob)]).status, 404);
    let absent = get(&server, "/boxes/absent/port/8000/", &[(name, &ann)]);
    assert_eq!(absent.status, 404);
    for port in ["0", "65536", "x", "-1"] {
        let path = format!("/boxes/web/port/{port}/");
        assert_eq!(get(&server, &path, &[(name, &ann)]).status, 400, "{port}");
    }
    // A box does not see the token in a cookie, in a query or in Basic authentication either.
    let basic = format!("Basic {}", STANDARD.encode(format!("ann:{ANN}")));
    let cookies = format!("theirs=1; token={ANN}");
    let forms = [
        (name, ann.as_str()),
        ("Cookie", &cookies),
        ("X-Basic", &basic),
    ];
    let answer = get(&server, &format!("{plain}?a=1&token={ANN}&b=2"), &forms);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["path"], "/?a=1&b=2");
    assert_eq!(answer.json()["headers"]["cookie"], "theirs=1", "control");
    assert_eq!(answer.json()["headers"]["x-basic"], Value::Null);
    let in_path = get(&server, &format!("{plain}{ANN}"), &[(name, &ann)]);
    assert_eq!(in_path.status, 400, "{in_path:?}");
    // The box receives the credentials of its own application. It never receives the server's
    // token.
    let shared_path = path(&web, 8000, None).await;
    let answer = get(
        &server,
        &shared_path,
        &[(name, "Basic dXNlcjpwYXNz"), ("X-Api-Key", ANN)],
    );
    assert_eq!(
        answer.json()["headers"]["authorization"],
        "Basic dXNlcjpwYXNz"
    );
    assert!(!answer.body.contains(ANN), "{answer:?}");
    assert_eq!(answer.json()["headers"]["host"], "localhost:8000");
    // A caller gets no URL for another owner's box.
    let other_caller = crate::rpc::connect(&server.rpc(), Some(BOB)).await;
    assert!(other_caller.open("web").await.unwrap_err().is_not_found());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_box_has_no_origin_and_no_cookies_of_the_host() {
    let server = Setup::new().start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let shared_path = path(&web, 8000, None).await;
    let page = [("Origin", "null"), ("Sec-Fetch-Site", "cross-site")];
    let answer = get(&server, &shared_path, &page);
    assert_eq!(answer.status, 200, "{answer:?}");
    let policy = answer.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("sandbox ") && !policy.contains("allow-same-origin"),
        "{policy}"
    );
    assert_eq!(
        answer.header("set-cookie"),
        None,
        "a cookie for the whole host"
    );
    assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
    // Without the signed URL, a request of a browser page is refused.
    let plain = "/boxes/web/port/8000/";
    assert_eq!(get(&server, plain, &page).status, 403);
    assert_eq!(get(&server, plain, &[]).status, 200, "control");
    let elsewhere = [("Host", "evil.example")];
    assert_eq!(
        get(&server, &shared_path, &elsewhere).status,
        421,
        "nor under another host name"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_reaches_a_box_and_ends_with_the_server() {
    let mut server = Setup::new().start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let shared_path = path(&web, 8000, None).await;
    let mut socket: Client = server.client();
    let answer = socket.get(
        &shared_path,
        &[
            ("Connection", "keep-alive, Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("Origin", "http://127.0.0.1"),
        ],
    );
    assert_eq!(answer.status, 101, "{answer:?}");
    let accept = answer.header("sec-websocket-accept");
    assert_eq!(accept, Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    for message in [b"first".to_vec(), vec![7; 100_000]] {
        socket.stream.get_mut().write_all(&message).unwrap();
        let mut echoed = vec![0; message.len()];
        socket.stream.read_exact(&mut echoed).unwrap();
        assert!(echoed == message);
    }
    let since = Instant::now();
    server.signal(rustix::process::Signal::TERM);
    assert!(socket.rest().is_empty());
    assert!(server.ended().0.success());
    assert!(since.elapsed() < LONG);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_http_answer_of_a_box_is_replaced_by_an_error() {
    let server = Setup::new().start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let handle = client.create(SpecDraft::new("hostile")).await.unwrap();
    listens(&handle, include_str!("hostile.py")).await;
    let shared_path = path(&handle, 8000, None).await;
    let request = |what: &str| get(&server, &format!("{shared_path}{what}"), &[]);
    for what in ["nothing", "garbage", "switch", "heads", "many", "lengths"] {
        let answer = request(what);
        assert_eq!(answer.status, 502, "{what}: {answer:?}");
        assert!(
            answer.body.contains("does not answer in HTTP"),
            "{answer:?}"
        );
    }
    // Bytes after an answer are not an answer.
    let mut one = server.client();
    assert_eq!(one.get(&format!("{shared_path}two"), &[]).body, "one");
    assert_eq!(one.get("/healthz", &[]).status, 200);
    assert_eq!(request("early").body, "well");
    // A truncated body is truncated for the client, too.
    let mut cut = server.client();
    cut.write(&format!(
        "GET {shared_path}short HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ));
    let rest = String::from_utf8(cut.rest()).unwrap();
    assert!(
        rest.contains("content-length: 100") && rest.ends_with("few"),
        "{rest}"
    );
    assert_eq!(request("well").body, "well", "control");
    for method in ["HEAD", "OPTIONS", "DELETE", "PATCH"] {
        let answer = server
            .client()
            .request(method, &format!("{shared_path}well"), &[]);
        assert_eq!(answer.status, 200, "{method}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_streams_through_in_little_memory_and_is_cut_at_the_limit() {
    // More than the default: the memory does not depend on the limit.
    const MOST: usize = 320 * 1024 * 1024;
    let server = Setup::new().env("BOXD_SERVER_MAX_BODY_MB", "320").start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let shared_path = path(&web, 8000, None).await;
    let piece = vec![b'x'; 1 << 20];
    let mut sender = server.client();
    sender.write(&format!(
        "POST {shared_path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        piece.len() * 16
    ));
    for _ in 0..16 {
        sender.stream.get_mut().write_all(&piece).unwrap();
    }
    let answer = sender.answer(false);
    assert_eq!((answer.status, answer.body), (200, (16 << 20).to_string()));

    // Without a length, which the server could refuse before.
    let before = resident(&server);
    let mut sender = server.client();
    sender.write(&format!(
        "POST {shared_path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    ));
    let mut sent = 0;
    let mut most = 0;
    let mut write = |bytes: &[u8]| sender.stream.get_mut().write_all(bytes).is_ok();
    while sent < MOST + (16 << 20) && write(b"100000\r\n") && write(&piece) && write(b"\r\n") {
        sent += piece.len();
        if sent % (32 << 20) == 0 {
            most = most.max(resident(&server));
        }
    }
    assert!(
        (MOST - piece.len()..MOST + (16 << 20)).contains(&sent),
        "{sent} bytes were accepted"
    );
    let grown = most.saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more than before");
    let rest = String::from_utf8_lossy(&sender.rest()).into_owned();
    assert!(!rest.contains(" 200 "), "{rest}");
    assert_eq!(
        get(&server, &shared_path, &[]).status,
        200,
        "other clients are served"
    );
}

/// The resident memory of the server in bytes.
fn resident(server: &RunningServer) -> usize {
    let page = server.get("/metrics").body;
    let name = "process_resident_memory_bytes ";
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().parse().unwrap()
}
