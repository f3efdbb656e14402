//! Clients that stall, send too much, or are too many.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use box_client::SpecDraft;

use crate::server::{Client, LONG, Setup};

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_stalled_clients_do_not_keep_a_healthy_one_waiting() {
    let served = Setup::new().start();
    let client = crate::rpc::connect(&served.rpc(), None).await;
    let work = client.create(SpecDraft::new("work")).await.unwrap();
    let mut healthy = served.client();
    let stalled: Vec<TcpStream> = (0..1000)
        .map(|number| {
            let mut stream = TcpStream::connect(served.http()).unwrap();
            // Nothing at all, half a line, half a head, or a body that does not come.
            let said = [
                "",
                "GET /hea",
                "GET /healthz HTTP/1.1\r\nHost: local",
                "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
            ];
            stream.write_all(said[number % 4].as_bytes()).unwrap();
            stream
        })
        .collect();
    let since = Instant::now();
    for _ in 0..20 {
        assert_eq!(healthy.get("/healthz", &[]).status, 200);
        assert_eq!(served.get("/readyz").status, 200);
        let ran = work.run("echo well").await.unwrap();
        assert_eq!(ran.stdout_text().trim(), "well");
    }
    assert!(since.elapsed() < LONG);
    assert_eq!(stalled.len(), 1000);
    let page = served.get("/metrics").body;
    let open = page
        .lines()
        .find_map(|line| line.strip_prefix("boxd_connections{listener=\"http\"} "));
    assert!(open.unwrap().parse::<u32>().unwrap() > 700, "{page}");
}

#[test]
fn beyond_the_most_connections_a_new_one_is_closed_at_once_and_counted() {
    let served = Setup::new().env("BOXD_SERVER_MAX_CONNECTIONS", "4").start();
    let mut held: Vec<Client> = (0..4).map(|_| served.client()).collect();
    for client in &mut held {
        assert_eq!(client.get("/healthz", &[]).status, 200);
    }
    assert!(served.client().rest().is_empty());
    held.pop();
    // The place is free once the server has noticed.
    let since = Instant::now();
    let page = loop {
        let mut client = served.client();
        client.write("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let said = client.rest();
        if !said.is_empty() {
            break String::from_utf8(said).unwrap();
        }
        assert!(since.elapsed() < LONG, "no place");
        std::thread::sleep(Duration::from_millis(10));
    };
    let name = "boxd_connections_refused_total{listener=\"http\",reason=\"full\"} ";
    let refused = page.lines().find_map(|line| line.strip_prefix(name));
    assert!(refused.unwrap().parse::<u32>().unwrap() >= 1, "{page}");
}

#[test]
fn a_body_beyond_the_limit_is_refused_before_it_is_sent() {
    let served = Setup::new().start();
    let mut client = served.client();
    let most = 256 * 1024 * 1024_u64;
    let length = (most + 1).to_string();
    let answer = client.ask("POST", "/v1/sandboxes", &[("Content-Length", &length)]);
    assert_eq!(answer.status, 413);
    assert_eq!(answer.json()["code"], "PAYLOAD_TOO_LARGE");
    assert!(answer.body.contains("http_body_bytes") && answer.body.contains(&most.to_string()));
    // What a client asks first about is not sent for.
    let (most, mut client) = (most.to_string(), served.client());
    let asked = [("Content-Length", &*most), ("Expect", "100-continue")];
    assert_eq!(client.ask("POST", "/v1/sandboxes", &asked).status, 501);
}

#[test]
fn a_body_without_an_end_is_answered_and_cut_off() {
    let served = Setup::new().start();
    let mut client = served.client();
    client.write(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    let mut sending = client.stream.get_ref().try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
        let mut sent = 0_u64;
        while sending.write_all(chunk.as_bytes()).is_ok() {
            sent += 0x10000;
            assert!(sent < 1 << 30, "all of it is read");
        }
    });
    assert_eq!(client.answer(false).status, 501);
    sender.join().unwrap();
    assert_eq!(served.get("/healthz").status, 200);
}

#[test]
fn a_small_body_that_nobody_wants_leaves_the_connection_usable() {
    let served = Setup::new().start();
    let mut client = served.client();
    for _ in 0..3 {
        client
            .write("POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}");
        assert_eq!(client.answer(false).status, 501);
    }
    assert_eq!(client.get("/healthz", &[]).status, 200);
}
