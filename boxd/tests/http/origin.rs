//! Requests of browser pages, and host names of other servers.

use crate::support::{ANN, Setup, bearer};

#[test]
fn a_page_is_refused_over_http_and_as_a_websocket() {
    let served = Setup::new().start();
    for origin in ["https://evil.example", "http://127.0.0.1", "null"] {
        let mut client = served.client();
        for path in ["/healthz", "/metrics", "/boxes/b/port/80/", "/nowhere"] {
            let answer = client.get(path, &[("Origin", origin)]);
            assert_eq!(answer.status, 403, "{path} {origin}");
        }
        assert_eq!(client.upgrade(&[("Origin", origin)]).status, 403);
    }
    let mut client = served.client();
    let cross = [("Sec-Fetch-Site", "cross-site")];
    assert_eq!(client.get("/healthz", &cross).status, 403);
    assert_eq!(client.get("/healthz", &[]).status, 200);
    assert_eq!(client.upgrade(&[]).status, 101);
}

#[test]
fn a_token_does_not_let_a_page_in() {
    let served = Setup::new().with_tokens().start();
    let (name, value) = bearer(ANN);
    let page = [(name, &*value), ("Origin", "https://evil.example")];
    assert_eq!(served.client().upgrade(&page).status, 403);
    assert_eq!(served.client().get("/boxes/b/port/80/", &page).status, 403);
}

#[test]
fn a_name_that_is_not_allowed_is_refused() {
    let served = Setup::new()
        .env("BOXD_SERVER_ALLOWED_HOSTS", "box.example")
        .start();
    let mut client = served.client();
    for host in [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "box.example.evil",
    ] {
        let answer = client.get("/healthz", &[("Host", host)]);
        assert_eq!(answer.status, 421, "{host}");
        assert!(answer.body.contains("server.allowed_hosts"));
        assert_eq!(client.upgrade(&[("Host", host)]).status, 421, "{host}");
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]", "box.example:443"] {
        let answer = client.get("/healthz", &[("Host", host)]);
        assert_eq!(answer.status, 200, "{host}");
    }
    client.write("GET /healthz HTTP/1.1\r\n\r\n");
    assert_eq!(client.answer(false).status, 400);
}
