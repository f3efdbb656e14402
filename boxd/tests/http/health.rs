//! Health, readiness, version and metrics.

use std::os::unix::fs::PermissionsExt as _;

use crate::support::{ANN, Setup, bearer};

#[test]
fn health_is_public_and_read_only() {
    let server = Setup::new().with_tokens().start();
    let mut client = server.client();
    for (path, member) in [
        ("/healthz", "live"),
        ("/health", "status"),
        ("/readyz", "ready"),
        ("/version", "version"),
        ("/openapi.json", "openapi"),
    ] {
        let answer = client.get(path, &[]);
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.json().get(member).is_some(), "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(client.request("HEAD", path, &[]).status, 200);
        let posted = client.request("POST", path, &[("Content-Length", "0")]);
        assert_eq!(posted.status, 405);
        assert_eq!(posted.header("allow"), Some("GET,HEAD"));
    }
    let ready = client.get("/readyz", &[]).json();
    assert_eq!(
        (&ready["ready"], &ready["backend"]["name"]),
        (&true.into(), &"native".into())
    );
    assert_eq!(client.get("/healthz", &[]).json()["live"], true);
}

#[test]
fn the_ready_line_names_the_bound_port() {
    let (one, other) = (Setup::new().start(), Setup::new().start());
    assert_ne!(one.http(), other.http());
    for server in [&one, &other] {
        assert!(server.address("http://").starts_with("http://127.0.0.1:"));
        assert!(!server.http().ends_with(":0"));
        assert_eq!(server.get("/healthz").status, 200);
    }
    let taken = Setup::at(one.http()).fails();
    assert!(taken.1.contains("server.http: 127.0.0.1:"), "{taken:?}");
}

#[test]
fn a_remote_listener_requires_tokens() {
    for http in ["0.0.0.0:0", "[::]:0"] {
        let (status, message) = Setup::at(http).fails();
        assert_eq!(status.code(), Some(125));
        for text in ["not a loopback address", "--token-file", "BOXD_TOKENS"] {
            assert!(message.contains(text), "{message}");
        }
    }
    let server = Setup::new().start();
    server.wait_for_log("no token");
    let (status, message) = Setup::at("nonsense").fails();
    assert_eq!(status.code(), Some(125));
    assert!(
        message.contains("server.http: \"nonsense\" is not HOST:PORT"),
        "{message}"
    );
}

/// The value of a metric.
fn metric(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {page}"));
    line.trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_boxes_connections_and_requests() {
    let server = Setup::new().start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let spec = box_client::SpecDraft::new("counted");
    client.create(spec).await.unwrap();
    let ready = server.get("/readyz").json();
    assert_eq!(ready["resources"]["sessions"], 1, "{ready}");
    server.get("/healthz");
    server.get("/healthz");
    server.get("/nowhere");
    let page = server.get("/metrics");
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/plain; version=0.0.4")
    );
    let value = |name: &str| metric(&page.body, name);
    for (name, expected) in [
        (r#"boxd_boxes{state="running"}"#, 1.0),
        (r#"boxd_boxes{state="failed"}"#, 0.0),
        ("boxd_boxes_used ", 1.0),
        ("boxd_boxes_limit ", 64.0),
        (r#"boxd_connections{listener="unix"}"#, 0.0),
        ("boxd_connections_limit ", 1024.0),
        ("boxd_http_websockets ", 1.0),
        (
            r#"boxd_http_requests_total{route="healthz",status="200"}"#,
            2.0,
        ),
        (
            r#"boxd_http_requests_total{route="none",status="404"}"#,
            1.0,
        ),
        (r#"boxd_http_requests_total{route="rpc",status="101"}"#, 1.0),
    ] {
        assert!(
            (value(name) - expected).abs() < 0.5,
            "{name}: {}",
            page.body
        );
    }
    // The websocket and this request.
    assert!(value(r#"boxd_connections{listener="http"}"#) >= 2.0);
    assert!(value("process_resident_memory_bytes ") > 1e6);
    assert!(value("process_open_fds ") > 5.0);
    assert!(value("boxd_uptime_seconds ") > 0.0);
    for line in page.body.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
        let family = name.split('{').next().unwrap();
        assert!(page.body.contains(&format!("# TYPE {family} ")), "{line}");
    }
}

#[test]
fn metrics_need_a_token_on_a_remote_listener() {
    let server = Setup::at("0.0.0.0:0").with_tokens().start();
    let port = server.http().rsplit_once(':').unwrap().1;
    let mut client = crate::support::Client::to(&format!("127.0.0.1:{port}"));
    assert_eq!(client.get("/metrics", &[]).status, 401);
    let (name, value) = bearer(ANN);
    assert_eq!(client.get("/metrics", &[(name, &value)]).status, 200);
    assert_eq!(client.get("/metrics", &[("X-Api-Key", ANN)]).status, 401);
    assert_eq!(client.get("/healthz", &[]).status, 200);
    let at_home = Setup::new().with_tokens().start();
    assert_eq!(at_home.get("/metrics").status, 200);
}

#[test]
fn the_unix_socket_is_private_to_its_user() {
    let server = Setup::new().start();
    let path = server.address("unix:").strip_prefix("unix:").unwrap();
    let mode = std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
