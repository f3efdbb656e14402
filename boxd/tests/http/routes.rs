//! Served and unserved paths.

use crate::support::{ANN, Setup};

#[test]
fn an_unknown_path_names_the_closest_route() {
    let server = Setup::new().start();
    let mut client = server.client();
    for (path, named) in [
        ("/rpc/w", "/rpc/ws"),
        ("/helthz", "/healthz"),
        ("/boxes/b/ports/80", "/boxes/{box}/port/{port}"),
        ("/favicon.ico", "docs/wire.md"),
    ] {
        let answer = client.get(path, &[]);
        assert_eq!(answer.status, 404, "{path}");
        let body = answer.json();
        assert!(body["message"].as_str().unwrap().contains(named), "{body}");
        assert_eq!(body["code"], "NOT_FOUND");
    }
    for path in [
        "/",
        "/healthzz",
        "/healthz/x",
        "/HEALTHZ",
        "//healthz",
        "/%68ealthz",
        "/rpc/ws/x",
        "/v1",
        "/v1/metrics",
        "/v1/sessions/a/ws",
        "/boxes/b",
        "/boxes//port/80",
        "/boxes/b/port",
        "/boxes/b/port/80/../../../../metrics",
        "/rpc/../metrics",
    ] {
        assert_eq!(client.get(path, &[]).status, 404, "{path}");
    }
    // A slash at the end changes nothing.
    for path in ["/healthz/", "/metrics/"] {
        assert_eq!(client.get(path, &[]).status, 200, "{path}");
    }
    for path in ["/rpc/ws/", "/v1/sessions/a/managed-process/p/ws/"] {
        assert_eq!(client.get(path, &[]).status, 426, "{path}");
    }
}

#[test]
fn every_answer_has_a_request_id() {
    let server = Setup::new().with_tokens().start();
    let mut client = server.client();
    let own = [("X-Request-ID", "mine-1")];
    for (path, status) in [
        ("/healthz", 200),
        ("/nowhere", 404),
        ("/boxes/b/port/80/", 401),
        ("/v1/sessions/s/managed-process/ws", 401),
    ] {
        let answer = client.get(path, &own);
        assert_eq!(answer.status, status, "{path}");
        assert_eq!(answer.header("x-request-id"), Some("mine-1"), "{path}");
        let other = client.get(path, &[]).header("x-request-id").map(str::len);
        assert_eq!(other, Some(32), "{path}");
    }
    let (name, token) = crate::support::bearer(ANN);
    let socket = client.upgrade(&[(name, &token)]);
    assert_eq!(socket.status, 101);
    assert!(socket.header("x-request-id").is_some());
}

#[test]
fn rpc_without_an_upgrade_is_refused() {
    let server = Setup::new().start();
    let mut client = server.client();
    for method in ["GET", "POST"] {
        let answer = client.request(method, "/rpc/ws", &[("Content-Length", "0")]);
        assert_eq!(answer.status, 426);
        assert_eq!(answer.header("upgrade"), Some("websocket"));
    }
    let half = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    assert_eq!(client.get("/rpc/ws", &half).status, 426);
    let bad = [
        ("Connection", "keep-alive, Upgrade"),
        ("Upgrade", "WebSocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "short"),
    ];
    assert_eq!(client.get("/rpc/ws", &bad).status, 400);
    let answer = client.upgrade(&[]);
    assert_eq!(answer.status, 101);
    // The key of the specification, and its answer.
    let key = answer.header("sec-websocket-accept");
    assert_eq!(key, Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_request_to_the_tcp_port_is_dropped() {
    let listen = ["--listen", "tcp://127.0.0.1:0", "--listen"];
    let token = format!("Bearer {ANN}");
    for (setup, open) in [(Setup::new().with_tokens(), false), (Setup::new(), true)] {
        let socket = setup.unix();
        let server = setup.args(&listen).args(&[&socket]).start();
        let address = server.address("tcp://").strip_prefix("tcp://").unwrap();
        // A browser page can send this: a body with lines that are messages.
        let spec = r#"{"spec":{"box_id":"from-a-page"}}"#;
        let call = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"box.create","params":{spec}}}"#);
        let frame = format!(r#"{{"seq_id":1,"action":"box.create","data":{spec}}}"#);
        for request in [
            "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(),
            format!("GET /rpc/ws HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n"),
            format!("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n\n{call}\n"),
            format!("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n\n{frame}\n"),
            format!("POST /{} HTTP/1.1\r\n\r\n\n{call}\n", "x".repeat(100_000)),
        ] {
            let mut client = crate::support::Client::to(address);
            client.write(&request);
            let text = client.rest();
            assert!(text.is_empty(), "{}", String::from_utf8_lossy(&text));
        }
        let here = crate::rpc::connect(&socket, None).await;
        assert_eq!(crate::rpc::seen(&here).await, [""; 0]);
        // The server executes the same line where it is the first.
        if open {
            let mut client = crate::support::Client::to(address);
            client.write(&format!("{call}\n"));
            let mut line = String::new();
            std::io::BufRead::read_line(&mut client.stream, &mut line).unwrap();
            assert_eq!(
                crate::rpc::seen(&here).await,
                ["from-a-page@loopback"],
                "{line}"
            );
        }
    }
}
