//! Clients that stall, send too much, or are too many.

use std::io::{BufRead as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use box_client::SpecDraft;

use crate::server::{ANN, Client, LONG, Setup, bearer};

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
                "POST /boxes/none/port/80/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
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
        // A caller that is let in keeps the place, whatever the answer is.
        assert_eq!(client.get("/boxes/none/port/80/", &[]).status, 404);
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

/// Connections that say nothing, or not who they are, in four times the number there may be.
fn crowd(address: &str, most: usize) -> Vec<TcpStream> {
    let said = ["", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", "{"];
    let one = |number: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        // One that has lost its place already may be closed.
        let _ = stream.write_all(said[number % 3].as_bytes());
        stream
    };
    (0..4 * most).map(one).collect()
}

/// Calls an action that needs nothing, and checks that it is answered.
fn call(client: &mut Client, method: &str, params: &str) {
    client.write(&format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{method}\",\"params\":{params}}}\n"
    ));
    let mut line = String::new();
    client.stream.read_line(&mut line).unwrap();
    assert!(line.contains("\"result\""), "{method}: {line}");
}

/// A connection of the RPC that has shown a token.
fn hello(address: &str) -> Client {
    let mut client = Client::to(address);
    call(&mut client, "hello", &format!("{{\"token\":\"{ANN}\"}}"));
    client
}

#[test]
fn a_crowd_without_a_token_keeps_out_no_caller_with_one() {
    const MOST: usize = 24;
    let served = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .env("BOXD_SERVER_MAX_CONNECTIONS", &MOST.to_string())
        .start();
    let (name, token) = bearer(ANN);
    let bearer = [(name, token.as_str())];
    let mut early = served.client();
    assert_eq!(early.get("/boxes/none/port/80/", &bearer).status, 404);
    let tcp = served.address("tcp://").strip_prefix("tcp://").unwrap();
    let mut before = hello(tcp);
    for _ in 0..3 {
        let crowds = (crowd(served.http(), MOST), crowd(tcp, MOST));
        // Those who were there before stay, and new ones come in at once.
        assert_eq!(early.get("/boxes/none/port/80/", &bearer).status, 404);
        call(&mut before, "box.list", "{}");
        for _ in 0..5 {
            assert_eq!(
                served.client().get("/boxes/none/port/80/", &bearer).status,
                404
            );
            call(&mut hello(tcp), "box.list", "{}");
        }
        drop(crowds);
    }
}

#[test]
fn every_connection_is_kept_alive_by_the_system_whatever_it_has_said() {
    let served = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .start();
    let tcp = served.address("tcp://").strip_prefix("tcp://").unwrap();
    for address in [served.http(), tcp] {
        let silent = TcpStream::connect(address).unwrap();
        let port = |address: std::net::SocketAddr| format!(":{:04X}", address.port());
        let (ours, its) = (silent.local_addr().unwrap(), silent.peer_addr().unwrap());
        let (ours, its) = (port(ours), port(its));
        let since = Instant::now();
        loop {
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let lines = table
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>());
            let mut ends = lines.filter(|line| line[1].ends_with(&its) && line[2].ends_with(&ours));
            // The timer of the server's end: 2 is the one that asks a silent peer.
            if ends.any(|line| line[5].starts_with("02:")) {
                break;
            }
            assert!(since.elapsed() < LONG, "no keepalive at {address}: {table}");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(silent);
    }
}

#[test]
fn a_body_beyond_the_limit_is_refused_before_it_is_sent() {
    let served = Setup::new().start();
    let mut client = served.client();
    let most = 256 * 1024 * 1024_u64;
    let length = (most + 1).to_string();
    let answer = client.ask(
        "POST",
        "/boxes/none/port/80/",
        &[("Content-Length", &length)],
    );
    assert_eq!(answer.status, 413);
    assert_eq!(answer.json()["code"], "PAYLOAD_TOO_LARGE");
    assert!(answer.body.contains("http_body_bytes") && answer.body.contains(&most.to_string()));
    // What a client asks first about is not sent for.
    let (most, mut client) = (most.to_string(), served.client());
    let asked = [("Content-Length", &*most), ("Expect", "100-continue")];
    assert_eq!(
        client.ask("POST", "/boxes/none/port/80/", &asked).status,
        404
    );
}

#[test]
fn a_body_without_an_end_is_answered_and_cut_off() {
    let served = Setup::new().start();
    let mut client = served.client();
    client.write(
        "POST /boxes/none/port/80/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
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
    assert_eq!(client.answer(false).status, 404);
    sender.join().unwrap();
    assert_eq!(served.get("/healthz").status, 200);
}

#[test]
fn a_small_body_that_nobody_wants_leaves_the_connection_usable() {
    let served = Setup::new().start();
    let mut client = served.client();
    for _ in 0..3 {
        client.write(
            "POST /boxes/none/port/80/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        );
        assert_eq!(client.answer(false).status, 404);
    }
    assert_eq!(client.get("/healthz", &[]).status, 200);
}
