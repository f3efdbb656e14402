//! Ports of real boxes over HTTP: by signed URL and by token.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use box_client::{BoxClient, BoxHandle, SpecDraft};

use crate::support::{ANN, Answer, BOB, Client, LONG, RunningServer, Setup, bearer};

/// The application in the box: it reports its request, counts the received bytes, and echoes on a
/// websocket.
const APP: &str = include_str!("app.py");

fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

/// A box with an application on port 8000.
async fn a_box(client: &BoxClient, id: &str) -> BoxHandle {
    let made = client.create(SpecDraft::new(id)).await.unwrap();
    listens(&made, APP).await;
    made
}

async fn listens(made: &BoxHandle, program: &'static str) {
    made.files().write("/tmp/app.py", program).await.unwrap();
    let app = made.program(["python3", "/tmp/app.py"]).detached();
    app.start().await.unwrap();
    let since = Instant::now();
    while made.connect_port(port(8000)).await.is_err() {
        assert!(since.elapsed() < LONG, "no server listens");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The path of a signed URL.
async fn path(made: &BoxHandle, number: u16, lasting: Option<Duration>) -> String {
    let shared = made.share_port(port(number), lasting).await.unwrap();
    assert_eq!(shared.expires_at.is_some(), lasting.is_some());
    let (_, path) = shared.url.split_once("/boxes/").unwrap();
    format!("/boxes/{path}")
}

fn get(served: &RunningServer, path: &str, headers: &[(&str, &str)]) -> Answer {
    served.client().get(path, headers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_url_opens_one_port_of_one_box_and_nothing_else() {
    let served = Setup::new().with_tokens().start();
    let client = crate::rpc::connect(&served.rpc(), Some(ANN)).await;
    let web = a_box(&client, "a b~c").await;
    let other = a_box(&client, "other").await;
    let ours = path(&web, 8000, None).await;
    let unique = |path: &str| {
        path["/boxes/".len()..]
            .split('~')
            .next()
            .unwrap()
            .to_owned()
    };
    let (id, others) = (unique(&ours), unique(&path(&other, 8000, None).await));
    let answer = get(&served, &format!("{ours}x/y%2Fz?q=1"), &[]);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["path"], "/x/y%2Fz?q=1");
    // Also without its last slash.
    assert_eq!(get(&served, ours.trim_end_matches('/'), &[]).status, 200);

    let cap = ours.split('~').nth(1).unwrap().split('/').next().unwrap();
    for place in [0, 10, 14, 20, 43] {
        let mut wrong = cap.to_owned();
        let other = if &wrong[place..=place] == "x" {
            "y"
        } else {
            "x"
        };
        wrong.replace_range(place..=place, other);
        let answer = get(&served, &ours.replace(cap, &wrong), &[]);
        assert_eq!(answer.status, 401, "{place}: {answer:?}");
        assert!(answer.body.contains("address"), "{answer:?}");
    }
    for elsewhere in [
        ours.replace("/port/8000/", "/port/8001/"),
        ours.replace(&id, &others),
        ours.replace(&id, "absent"),
        format!("/boxes/other~{cap}/port/8000/"),
    ] {
        assert_eq!(get(&served, &elsewhere, &[]).status, 401, "{elsewhere}");
    }

    let short = path(&web, 8000, Some(Duration::from_millis(1))).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(get(&served, &short, &[]).status, 401, "the URL has expired");
    let absent = path(&web, 8001, None).await;
    let answer = get(&served, &absent, &[]);
    assert_eq!(answer.status, 502);
    assert!(
        answer.body.contains("no listener on port 8001"),
        "{answer:?}"
    );

    // A later box of the same name is a different box.
    web.delete().await.unwrap();
    assert_eq!(get(&served, &ours, &[]).status, 401);
    let again = a_box(&client, "a b~c").await;
    assert_eq!(get(&served, &ours, &[]).status, 401);
    let fresh = path(&again, 8000, None).await;
    assert_eq!(get(&served, &fresh, &[]).status, 200, "control");
    again.pause().await.unwrap();
    assert_eq!(get(&served, &fresh, &[]).status, 409, "the box is paused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_the_ports_of_its_boxes_and_no_box_sees_it() {
    let served = Setup::new().with_tokens().start();
    let client = crate::rpc::connect(&served.rpc(), Some(ANN)).await;
    let web = a_box(&client, "web").await;
    let plain = "/boxes/web/port/8000/";
    let (name, ann) = bearer(ANN);
    let (_, bob) = bearer(BOB);
    let headers = [(name, ann.as_str()), ("X-Mine", "1"), ("X-Api-Key", ANN)];
    let answer = get(&served, plain, &headers);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["headers"]["x-mine"], "1", "control");
    assert!(!answer.body.contains(ANN), "{answer:?}");
    assert_eq!(get(&served, plain, &[]).status, 401);
    assert_eq!(get(&served, plain, &[(name, &bob)]).status, 404);
    let absent = get(&served, "/boxes/absent/port/8000/", &[(name, &ann)]);
    assert_eq!(absent.status, 404);
    for port in ["0", "65536", "x", "-1"] {
        let path = format!("/boxes/web/port/{port}/");
        assert_eq!(get(&served, &path, &[(name, &ann)]).status, 400, "{port}");
    }
    // A box does not see the token in a cookie, in a query or in Basic authentication either.
    let basic = format!("Basic {}", STANDARD.encode(format!("ann:{ANN}")));
    let cookies = format!("theirs=1; token={ANN}");
    let forms = [
        (name, ann.as_str()),
        ("Cookie", &cookies),
        ("X-Basic", &basic),
    ];
    let answer = get(&served, &format!("{plain}?a=1&token={ANN}&b=2"), &forms);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["path"], "/?a=1&b=2");
    assert_eq!(answer.json()["headers"]["cookie"], "theirs=1", "control");
    assert_eq!(answer.json()["headers"]["x-basic"], Value::Null);
    let in_path = get(&served, &format!("{plain}{ANN}"), &[(name, &ann)]);
    assert_eq!(in_path.status, 400, "{in_path:?}");
    // The box receives the credentials of its own application. It never receives the server's
    // token.
    let ours = path(&web, 8000, None).await;
    let answer = get(
        &served,
        &ours,
        &[(name, "Basic dXNlcjpwYXNz"), ("X-Api-Key", ANN)],
    );
    assert_eq!(
        answer.json()["headers"]["authorization"],
        "Basic dXNlcjpwYXNz"
    );
    assert!(!answer.body.contains(ANN), "{answer:?}");
    assert_eq!(answer.json()["headers"]["host"], "localhost:8000");
    // A caller gets no URL for another owner's box.
    let stranger = crate::rpc::connect(&served.rpc(), Some(BOB)).await;
    assert!(stranger.open("web").await.unwrap_err().is_not_found());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_box_has_no_origin_and_no_cookies_of_the_host() {
    let served = Setup::new().start();
    let client = crate::rpc::connect(&served.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let ours = path(&web, 8000, None).await;
    let page = [("Origin", "null"), ("Sec-Fetch-Site", "cross-site")];
    let answer = get(&served, &ours, &page);
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
    assert_eq!(get(&served, plain, &page).status, 403);
    assert_eq!(get(&served, plain, &[]).status, 200, "control");
    let elsewhere = [("Host", "evil.example")];
    assert_eq!(
        get(&served, &ours, &elsewhere).status,
        421,
        "nor under another host name"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_reaches_a_box_and_ends_with_the_server() {
    let mut served = Setup::new().start();
    let client = crate::rpc::connect(&served.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let ours = path(&web, 8000, None).await;
    let mut socket: Client = served.client();
    let answer = socket.get(
        &ours,
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
    for said in [b"first".to_vec(), vec![7; 100_000]] {
        socket.stream.get_mut().write_all(&said).unwrap();
        let mut echoed = vec![0; said.len()];
        socket.stream.read_exact(&mut echoed).unwrap();
        assert!(echoed == said);
    }
    let since = Instant::now();
    served.signal(rustix::process::Signal::TERM);
    assert!(socket.rest().is_empty());
    assert!(served.ended().0.success());
    assert!(since.elapsed() < LONG);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_http_answer_of_a_box_is_replaced_by_an_error() {
    let served = Setup::new().start();
    let client = crate::rpc::connect(&served.rpc(), None).await;
    let made = client.create(SpecDraft::new("hostile")).await.unwrap();
    listens(&made, include_str!("hostile.py")).await;
    let ours = path(&made, 8000, None).await;
    let asked = |what: &str| get(&served, &format!("{ours}{what}"), &[]);
    for what in ["nothing", "garbage", "switch", "heads", "many", "lengths"] {
        let answer = asked(what);
        assert_eq!(answer.status, 502, "{what}: {answer:?}");
        assert!(
            answer.body.contains("does not answer in HTTP"),
            "{answer:?}"
        );
    }
    // Bytes after an answer are not an answer.
    let mut one = served.client();
    assert_eq!(one.get(&format!("{ours}two"), &[]).body, "one");
    assert_eq!(one.get("/healthz", &[]).status, 200);
    assert_eq!(asked("early").body, "well");
    // A truncated body is truncated for the client, too.
    let mut cut = served.client();
    cut.write(&format!(
        "GET {ours}short HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ));
    let rest = String::from_utf8(cut.rest()).unwrap();
    assert!(
        rest.contains("content-length: 100") && rest.ends_with("few"),
        "{rest}"
    );
    assert_eq!(asked("well").body, "well", "control");
    for method in ["HEAD", "OPTIONS", "DELETE", "PATCH"] {
        let answer = served.client().ask(method, &format!("{ours}well"), &[]);
        assert_eq!(answer.status, 200, "{method}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_streams_through_in_little_memory_and_is_cut_at_the_limit() {
    const MOST: usize = 256 * 1024 * 1024;
    let served = Setup::new().start();
    let client = crate::rpc::connect(&served.rpc(), None).await;
    let web = a_box(&client, "web").await;
    let ours = path(&web, 8000, None).await;
    let piece = vec![b'x'; 1 << 20];
    let mut sender = served.client();
    sender.write(&format!(
        "POST {ours} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        piece.len() * 16
    ));
    for _ in 0..16 {
        sender.stream.get_mut().write_all(&piece).unwrap();
    }
    let answer = sender.answer(false);
    assert_eq!((answer.status, answer.body), (200, (16 << 20).to_string()));

    // Without a length, which the server could refuse before.
    let before = resident(&served);
    let mut sender = served.client();
    sender.write(&format!(
        "POST {ours} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    ));
    let mut sent = 0;
    let mut most = 0;
    let mut write = |bytes: &[u8]| sender.stream.get_mut().write_all(bytes).is_ok();
    while sent < MOST + (16 << 20) && write(b"100000\r\n") && write(&piece) && write(b"\r\n") {
        sent += piece.len();
        if sent % (32 << 20) == 0 {
            most = most.max(resident(&served));
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
        get(&served, &ours, &[]).status,
        200,
        "other clients are served"
    );
}

/// The resident memory of the server in bytes.
fn resident(served: &RunningServer) -> usize {
    let page = served.get("/metrics").body;
    let name = "process_resident_memory_bytes ";
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().parse().unwrap()
}
