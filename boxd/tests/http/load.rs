//! Clients that stall, send too much, or are too many.

use std::io::{BufRead as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use box_client::SpecDraft;
use box_test_wait::LONG;
use box_test_wait::blocking::eventually;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::support::{ANN, Client, Setup, bearer};

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_stalled_clients_do_not_keep_a_healthy_one_waiting() {
    let server = Setup::new().start();
    let client = crate::rpc::connect(&server.rpc(), None).await;
    let work = client.create(SpecDraft::new("work")).await.unwrap();
    let mut healthy = server.client();
    let stalled: Vec<TcpStream> = (0..1000)
        .map(|number| {
            let mut stream = TcpStream::connect(server.http()).unwrap();
            // No bytes, half a line, half a head, or a body that never comes.
            let text = [
                "",
                "GET /hea",
                "GET /healthz HTTP/1.1\r\nHost: local",
                "POST /boxes/none/port/80/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
            ];
            stream.write_all(text[number % 4].as_bytes()).unwrap();
            stream
        })
        .collect();
    let since = Instant::now();
    for _ in 0..20 {
        assert_eq!(healthy.get("/healthz", &[]).status, 200);
        assert_eq!(server.get("/readyz").status, 200);
        let ran = work.run("echo well").await.unwrap();
        assert_eq!(ran.stdout_text().trim(), "well");
    }
    assert!(since.elapsed() < LONG);
    assert_eq!(stalled.len(), 1000);
    let page = server.get("/metrics").body;
    let open = page
        .lines()
        .find_map(|line| line.strip_prefix("boxd_connections{listener=\"http\"} "));
    assert!(open.unwrap().parse::<u32>().unwrap() > 700, "{page}");
}

#[test]
fn a_connection_over_the_limit_is_closed_and_counted() {
    let server = Setup::new().env("BOXD_SERVER_MAX_CONNECTIONS", "4").start();
    let mut held: Vec<Client> = (0..4).map(|_| server.client()).collect();
    for client in &mut held {
        // An authenticated caller keeps its connection, with any answer.
        assert_eq!(client.get("/boxes/none/port/80/", &[]).status, 404);
    }
    assert!(server.client().rest().is_empty());
    held.pop();
    // The slot is free once the server has noticed.
    let mut page = String::new();
    eventually("a connection is free", || {
        let mut client = server.client();
        client.write("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        page = String::from_utf8(client.rest()).unwrap();
        !page.is_empty()
    });
    let name = "boxd_connections_refused_total{listener=\"http\",reason=\"full\"} ";
    let refused = page.lines().find_map(|line| line.strip_prefix(name));
    assert!(refused.unwrap().parse::<u32>().unwrap() >= 1, "{page}");
}

/// Opens four times the allowed number of connections that send nothing or no credentials.
fn open_unauthenticated(address: &str, most: usize) -> Vec<TcpStream> {
    let text = ["", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", "{"];
    let one = |number: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        // A connection that has lost its slot may be closed.
        let _ = stream.write_all(text[number % 3].as_bytes());
        stream
    };
    (0..4 * most).map(one).collect()
}

/// Calls an action, and checks that the server answers.
fn call(client: &mut Client, method: &str, params: &str) {
    client.write(&format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{method}\",\"params\":{params}}}\n"
    ));
    let mut line = String::new();
    client.stream.read_line(&mut line).unwrap();
    assert!(line.contains("\"result\""), "{method}: {line}");
}

/// An RPC connection that has authenticated.
fn hello(address: &str) -> Client {
    let mut client = Client::to(address);
    call(&mut client, "hello", &format!("{{\"token\":\"{ANN}\"}}"));
    client
}

#[test]
fn many_unauthenticated_connections_keep_out_no_caller_with_a_token() {
    const MOST: usize = 24;
    let server = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .env("BOXD_SERVER_MAX_CONNECTIONS", &MOST.to_string())
        .start();
    let (name, token) = bearer(ANN);
    let bearer = [(name, token.as_str())];
    let mut early = server.client();
    assert_eq!(early.get("/boxes/none/port/80/", &bearer).status, 404);
    let tcp = server.address("tcp://").strip_prefix("tcp://").unwrap();
    let mut before = hello(tcp);
    for _ in 0..3 {
        let crowds = (
            open_unauthenticated(server.http(), MOST),
            open_unauthenticated(tcp, MOST),
        );
        // Existing connections stay, and new ones are accepted at once.
        assert_eq!(early.get("/boxes/none/port/80/", &bearer).status, 404);
        call(&mut before, "box.list", "{}");
        for _ in 0..5 {
            assert_eq!(
                server.client().get("/boxes/none/port/80/", &bearer).status,
                404
            );
            call(&mut hello(tcp), "box.list", "{}");
        }
        drop(crowds);
    }
}

#[test]
fn every_connection_has_a_keepalive_timer() {
    let server = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .start();
    let tcp = server.address("tcp://").strip_prefix("tcp://").unwrap();
    for address in [server.http(), tcp] {
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
            // The timer of the server's end of the connection: 2 is the keepalive timer.
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
    let server = Setup::new().start();
    let mut client = server.client();
    let most = 256 * 1024 * 1024_u64;
    let length = (most + 1).to_string();
    let answer = client.request(
        "POST",
        "/boxes/none/port/80/",
        &[("Content-Length", &length)],
    );
    assert_eq!(answer.status, 413);
    assert_eq!(answer.json()["code"], "PAYLOAD_TOO_LARGE");
    assert!(answer.body.contains("server.max_body_mb") && answer.body.contains(&most.to_string()));
    // The server does not ask for a body that it would refuse.
    let (most, mut client) = (most.to_string(), server.client());
    let request = [("Content-Length", &*most), ("Expect", "100-continue")];
    assert_eq!(
        client
            .request("POST", "/boxes/none/port/80/", &request)
            .status,
        404
    );
}

#[test]
fn the_operator_sets_the_limit_of_bodies() {
    let server = Setup::new().env("BOXD_SERVER_MAX_BODY_MB", "1").start();
    let status = |length: &str| {
        let request = [("Content-Length", length), ("Expect", "100-continue")];
        let mut client = server.client();
        client.request("POST", "/boxes/none/port/80/", &request)
    };
    assert_eq!(status("1048576").status, 404);
    let refused = status("1048577");
    assert_eq!(refused.status, 413);
    assert!(refused.body.contains("server.max_body_mb, 1048576 bytes;"));
    let none = Setup::new().env("BOXD_SERVER_MAX_BODY_MB", "0").fails();
    assert!(none.1.contains("server.max_body_mb"), "{}", none.1);
}

#[test]
fn an_endless_body_is_answered_and_closed() {
    let server = Setup::new().start();
    let mut client = server.client();
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
    assert_eq!(server.get("/healthz").status, 200);
}

#[test]
fn a_small_unread_body_leaves_the_connection_usable() {
    let server = Setup::new().start();
    let mut client = server.client();
    for _ in 0..3 {
        client.write(
            "POST /boxes/none/port/80/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        );
        assert_eq!(client.answer(false).status, 404);
    }
    assert_eq!(client.get("/healthz", &[]).status, 200);
}

#[test]
fn a_server_without_descriptors_logs_it_once_and_recovers() {
    let server = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .start();
    let tcp = server.address("tcp://").strip_prefix("tcp://").unwrap();
    // The server has set up everything that it sets up with the first connection.
    call(&mut hello(tcp), "box.list", "{}");
    let files = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let open = u64::try_from(std::fs::read_dir(files).unwrap().count()).unwrap();
    let few = Rlimit {
        current: Some(open + 16),
        maximum: Some(open + 16),
    };
    prlimit(Some(server.pid()), Resource::Nofile, few).unwrap();
    // Authenticated callers keep their connections.
    let waits = "accepting connections failed; retrying";
    let hello = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"hello\",\"params\":{{\"token\":\"{ANN}\"}}}}\n"
    );
    // An abandoned connection may be closed already.
    let say = |client: &mut Client| drop(client.stream.get_mut().write_all(hello.as_bytes()));
    let mut held = Vec::new();
    while !server.log().contains(waits) {
        let mut client = Client::to(tcp);
        say(&mut client);
        let stream = client.stream.get_ref().try_clone().unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.peek(&mut [0]).is_err() && !server.log().contains(waits) {
            std::thread::sleep(Duration::from_millis(5));
        }
        stream.set_nonblocking(false).unwrap();
        held.push(client);
        assert!(held.len() < 64, "the limit of descriptors allows all");
    }
    assert!(held.len() > 4, "{} connections are served", held.len());
    // Further connections are tried meanwhile, and no other line is logged: one per attempt would
    // be fifty by now.
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(2) {
        say(&mut Client::to(tcp));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.log().matches(waits).count(), 1, "{}", server.log());
    held.drain(..4);
    // The server accepts the waiting connections first, which may use the free slots for a moment.
    let since = Instant::now();
    let list = "{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"box.list\",\"params\":{}}\n";
    loop {
        let mut client = Client::to(tcp);
        say(&mut client);
        let _ = client.stream.get_mut().write_all(list.as_bytes());
        let (mut hello, mut listed) = (String::new(), String::new());
        let _ = client.stream.read_line(&mut hello);
        let _ = client.stream.read_line(&mut listed);
        if hello.contains("\"result\"") && listed.contains("\"result\"") {
            break;
        }
        assert!(
            since.elapsed() < LONG,
            "no caller is served: {}",
            server.log()
        );
    }
    server.wait_for_log("accepting connections again");
    let log = server.log();
    let text = log.lines().find(|line| line.contains(waits)).unwrap();
    let reason = "the process has no file descriptor left (EMFILE); raise its limit";
    assert!(text.contains(reason), "{text}");
    assert!(!log.contains("uncategorized"), "{log}");
}

/// The resident memory of a process in mebibytes.
fn resident(pid: rustix::process::Pid) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<usize>().unwrap() / 1024
}

#[test]
fn unread_answers_are_bounded_and_their_memory_is_released() {
    const CALLS: usize = 44;
    let server = Setup::new()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .env("BOXD_POLICY_OUTPUT_LIMIT_CHARS", "0")
        .start();
    let tcp = server.address("tcp://").strip_prefix("tcp://").unwrap();
    let exec = |id: usize, name: &str, cmd: &str| {
        let params = serde_json::json!({"spec": {"box_id": name, "cmd": cmd}});
        let call =
            serde_json::json!({"jsonrpc": "2.0", "id": id, "method": "box.exec", "params": params});
        format!("{call}\n")
    };
    let mut reads = Client::to(tcp);
    let mut request = |name: &str, cmd: &str| {
        reads.write(&exec(1, name, cmd));
        let mut line = String::new();
        reads.stream.read_line(&mut line).unwrap();
        line
    };
    let boxes = ["a", "b"];
    for name in boxes {
        request(name, "head -c 1000000 /dev/zero | tr '\\0' x > big");
    }
    let before = resident(server.pid());
    let mut silent = boxes.map(|name| {
        let mut client = Client::to(tcp);
        for id in 0..CALLS {
            client.write(&exec(id, name, "cat big; echo >> count"));
        }
        client
    });
    for name in boxes {
        let all = format!("\"{CALLS}\\n\"");
        eventually(&format!("all calls of {name} have run"), || {
            request(name, "wc -l < count").contains(&all)
        });
    }
    let held = resident(server.pid());
    assert!(held > before + 30, "{before} MiB, and {held} with answers");
    // A connection can hold its limit, in addition to the bytes in the socket, and no more.
    for client in &mut silent {
        let (mut answered, mut refused) = (0, 0);
        for _ in 0..CALLS {
            let mut line = String::new();
            client.stream.read_line(&mut line).unwrap();
            if line.contains("\"overloaded\"") {
                refused += 1;
            } else {
                assert!(line.len() > 1_000_000, "{}", &line[..line.len().min(300)]);
                answered += 1;
            }
        }
        assert!(answered >= 30 && refused > 0, "{answered} and {refused}");
    }
    drop(silent);
    let since = Instant::now();
    while resident(server.pid()) > before + 16 {
        let now = resident(server.pid());
        assert!(
            since.elapsed() < LONG,
            "{before} MiB before, {held}, {now} after"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}
