//! Web pages of origins that the operator allows: websockets with a token as a sub-protocol, and `/rpc`.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::support::{ANN, BOB, Setup, bearer};

const APP: &str = "https://app.example";

/// A server that allows the pages of one origin.
fn setup() -> Setup {
    Setup::new()
        .with_tokens()
        .env("BOXD_SERVER_ALLOWED_ORIGINS", APP)
}

/// The sub-protocols that a page offers with a token.
fn offered(token: &str) -> String {
    format!("box, box.token.{}", URL_SAFE_NO_PAD.encode(token))
}

#[test]
fn a_page_of_an_allowed_origin_opens_a_websocket_with_its_token() {
    let server = setup().start();
    let right = offered(ANN);
    let protocol = ("Sec-WebSocket-Protocol", right.as_str());
    // Browsers add the last one.
    let page = [("Origin", APP), protocol, ("Sec-Fetch-Site", "cross-site")];
    let opened = server.client().upgrade(&page);
    assert_eq!(opened.status, 101);
    assert_eq!(opened.header("sec-websocket-protocol"), Some("box"));
    assert!(!format!("{opened:?}").contains(&URL_SAFE_NO_PAD.encode(ANN)));
    let wrong = offered(&ANN[1..]);
    let wrong = ("Sec-WebSocket-Protocol", wrong.as_str());
    for (headers, status) in [
        (vec![("Origin", "https://evil.example"), protocol], 403),
        (vec![("Origin", "https://app.example:8443"), protocol], 403),
        (vec![("Origin", "null"), protocol], 403),
        (vec![("Origin", APP), ("Origin", APP), protocol], 403),
        (vec![("Sec-Fetch-Site", "cross-site"), protocol], 403),
        (vec![("Origin", APP), wrong], 401),
        (
            vec![("Origin", APP), ("Sec-WebSocket-Protocol", "box")],
            401,
        ),
        (vec![("Origin", APP)], 401),
    ] {
        let refused = server.client().upgrade(&headers);
        assert_eq!(refused.status, status, "{headers:?}");
        assert!(!refused.body.contains(ANN), "{}", refused.body);
        assert!(!refused.body.contains(&right), "{}", refused.body);
    }
    // The control: without a list, the same request is refused.
    let closed = Setup::new().with_tokens().start();
    assert_eq!(closed.client().upgrade(&page).status, 403);
}

#[test]
fn other_routes_refuse_pages_of_an_allowed_origin() {
    let server = setup().start();
    let (name, value) = bearer(ANN);
    for path in ["/healthz", "/metrics", "/mcp", "/boxes/b/port/80/"] {
        let answer = server
            .client()
            .get(path, &[("Origin", APP), (name, &value)]);
        assert_eq!(answer.status, 403, "{path}");
        assert_eq!(answer.header("access-control-allow-origin"), None);
    }
}

#[test]
fn a_page_of_an_allowed_origin_calls_rpc_after_a_preflight() {
    let server = setup().start();
    let asks = |origin| {
        let method = ("Access-Control-Request-Method", "POST");
        let wanted = ("Access-Control-Request-Headers", "authorization");
        let headers = [("Origin", origin), method, wanted];
        server.client().request("OPTIONS", "/rpc", &headers)
    };
    let allowed = asks(APP);
    assert_eq!(allowed.status, 204);
    assert_eq!(allowed.header("access-control-allow-origin"), Some(APP));
    assert_eq!(allowed.header("access-control-allow-methods"), Some("POST"));
    let headers = allowed.header("access-control-allow-headers").unwrap();
    assert!(headers.contains("authorization"), "{headers}");
    assert_eq!(allowed.header("access-control-allow-credentials"), None);
    let refused = asks("https://evil.example");
    assert_eq!(refused.status, 403);
    assert_eq!(refused.header("access-control-allow-origin"), None);

    let (name, value) = bearer(ANN);
    let call = |token: Option<&str>| {
        let mut headers = vec![("Origin", APP), ("Content-Length", "0")];
        headers.extend(token.map(|value| (name, value)));
        server.client().request("POST", "/rpc", &headers)
    };
    // An empty body: the page may read the error, which needs the token.
    let (without, with) = (call(None), call(Some(&value)));
    assert_eq!((without.status, with.status), (401, 400));
    for answer in [without, with] {
        assert_eq!(answer.header("access-control-allow-origin"), Some(APP));
        assert_eq!(answer.header("vary"), Some("origin"));
    }
}

#[test]
fn a_token_in_a_sub_protocol_is_not_logged() {
    let mut server = setup().env("BOXD_LOG_LEVEL", "trace").start();
    let encoded = [ANN, BOB, "wr0ng-guess"].map(|token| URL_SAFE_NO_PAD.encode(token));
    for (token, origin) in [
        (ANN, APP),
        (BOB, "https://evil.example"),
        ("wr0ng-guess", APP),
    ] {
        let protocol = offered(token);
        let headers = [("Origin", origin), ("Sec-WebSocket-Protocol", &*protocol)];
        server.client().upgrade(&headers);
    }
    server.signal(rustix::process::Signal::TERM);
    let (status, log) = server.ended();
    assert!(status.success());
    assert!(
        log.contains("wrong_token") && log.contains("browser"),
        "{log}"
    );
    let plain = [ANN, BOB, "wr0ng-guess"].map(str::to_owned);
    for secret in encoded.iter().chain(&plain) {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
}

#[test]
fn a_server_does_not_start_with_a_wrong_origin_or_without_tokens() {
    let wrong = Setup::new()
        .with_tokens()
        .env("BOXD_SERVER_ALLOWED_ORIGINS", "https://app.example/");
    let (status, said) = wrong.fails();
    assert!(!status.success());
    assert!(
        said.contains("server.allowed_origins") && said.contains("scheme://"),
        "{said}"
    );
    let open = Setup::new().env("BOXD_SERVER_ALLOWED_ORIGINS", APP);
    let (status, said) = open.fails();
    assert!(
        !status.success() && said.contains("requires tokens"),
        "{said}"
    );
}

#[test]
fn a_websocket_listener_accepts_pages_of_an_allowed_origin() {
    let server = setup().args(&["--listen", "ws://127.0.0.1:0/"]).start();
    let address = server.address("ws://").strip_prefix("ws://").unwrap();
    let mut client = crate::support::Client::to(address.trim_end_matches('/'));
    let mut upgrade = |origin| {
        let headers = [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("Origin", origin),
        ];
        client.get("/", &headers).status
    };
    assert_eq!(upgrade(APP), 101);
    let mut client = crate::support::Client::to(address.trim_end_matches('/'));
    let evil = [("Origin", "https://evil.example")];
    assert_ne!(client.get("/", &evil).status, 101);
}
