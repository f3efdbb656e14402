//! Requests of browser pages, and host names of other servers.

use crate::support::{ANN, Setup, bearer};

#[test]
fn a_page_is_refused_over_http_and_as_a_websocket() {
    let server = Setup::new().start();
    for origin in ["https://evil.example", "http://127.0.0.1", "null"] {
        let mut client = server.client();
        for path in ["/healthz", "/metrics", "/boxes/b/port/80/", "/nowhere"] {
            let answer = client.get(path, &[("Origin", origin)]);
            assert_eq!(answer.status, 403, "{path} {origin}");
        }
        assert_eq!(client.upgrade(&[("Origin", origin)]).status, 403);
    }
    let mut client = server.client();
    let cross = [("Sec-Fetch-Site", "cross-site")];
    assert_eq!(client.get("/healthz", &cross).status, 403);
    assert_eq!(client.get("/healthz", &[]).status, 200);
    assert_eq!(client.upgrade(&[]).status, 101);
}

#[test]
fn a_token_does_not_admit_a_browser_page() {
    let server = Setup::new().with_tokens().start();
    let (name, value) = bearer(ANN);
    let page = [(name, &*value), ("Origin", "https://evil.example")];
    assert_eq!(server.client().upgrade(&page).status, 403);
    assert_eq!(server.client().get("/boxes/b/port/80/", &page).status, 403);
}

#[test]
fn an_unknown_host_name_is_refused() {
    let server = Setup::new()
        .env("BOXD_SERVER_ALLOWED_HOSTS", "box.example")
        .start();
    let mut client = server.client();
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
