//! Shutdown: open connections are closed in order, within a bound.

use std::io::{Read as _, Write as _};
use std::time::Instant;

use box_test_wait::LONG;
use box_test_wait::blocking::eventually;
use rustix::process::Signal;

use crate::support::{Client, RunningServer, Setup};

const PING: &str = r#"{"jsonrpc":"2.0","method":"$/ping"}"#;

/// The close status of a websocket, and the texts before it.
fn closed_with(client: &mut Client) -> (u16, Vec<String>) {
    let mut texts = Vec::new();
    loop {
        let mut head = [0; 2];
        client.stream.read_exact(&mut head).unwrap();
        let mut length = usize::from(head[1]);
        if length == 126 {
            let mut long = [0; 2];
            client.stream.read_exact(&mut long).unwrap();
            length = usize::from(u16::from_be_bytes(long));
        }
        let mut payload = vec![0; length];
        client.stream.read_exact(&mut payload).unwrap();
        match head[0] {
            0x88 => return (u16::from_be_bytes([payload[0], payload[1]]), texts),
            0x81 => texts.push(String::from_utf8(payload).unwrap()),
            other => panic!("frame {other:#x}"),
        }
    }
}

/// A websocket that has sent a short message, so that the server knows its dialect.
fn websocket(server: &RunningServer, text: &str) -> Client {
    let mut client = server.client();
    assert_eq!(client.upgrade(&[]).status, 101);
    let mask = [1, 2, 3, 4];
    let length = u8::try_from(text.len()).unwrap();
    assert!(length < 126);
    let mut frame = vec![0x81, 0x80 | length];
    frame.extend(mask);
    let masked = text.bytes().zip(mask.iter().cycle());
    frame.extend(masked.map(|(byte, mask)| byte ^ mask));
    client.stream.get_mut().write_all(&frame).unwrap();
    client
}

#[test]
fn a_websocket_close_names_a_restart() {
    for (keep, expected) in [("false", 1001), ("true", 1012)] {
        let mut server = Setup::new().env("BOXD_SERVER_KEEP_BOXES", keep).start();
        let mut sockets: Vec<Client> = (0..8).map(|_| websocket(&server, PING)).collect();
        let mut idle = server.client();
        assert_eq!(idle.get("/healthz", &[]).status, 200);
        // All of them are RPC connections by now.
        server.wait_for("boxd_http_websockets 8");
        server.signal(Signal::TERM);
        for socket in &mut sockets {
            let (status, texts) = closed_with(socket);
            assert_eq!(status, expected);
            let bye = texts.iter().find(|text| text.contains("bye"));
            let restart = bye.map(|bye| bye.contains("true"));
            assert_eq!(restart, Some(keep == "true"), "{texts:?}");
        }
        assert!(idle.rest().is_empty());
        let (status, log) = server.ended();
        assert!(status.success(), "{log}");
        assert!(!log.contains("connections that did not finish"), "{log}");
    }
}

#[test]
fn draining_answers_started_requests_and_no_new_ones() {
    let mut server = Setup::new().start();
    let mut started = server.client();
    started.write("GET /readyz HTTP/1.1\r\nHost: localhost\r\n");
    started.wait_until_read();
    let address = server.http().to_owned();
    server.signal(Signal::TERM);
    eventually("the server refuses connections", || {
        std::net::TcpStream::connect(&address).is_err()
    });
    started.write("\r\n");
    let answer = started.answer(false);
    assert_eq!(answer.status, 503);
    let body = answer.json();
    assert_eq!(
        (&body["ready"], &body["error"]),
        (&false.into(), &"draining".into())
    );
    assert!(started.rest().is_empty());
    assert!(server.ended().0.success());
}

#[test]
fn open_calls_are_cancelled_at_the_drain_limit() {
    let mut server = Setup::new().env("BOXD_SERVER_DRAIN_SEC", "1").start();
    let exec = r#"{"jsonrpc":"2.0","id":1,"method":"box.exec","params":{"spec":{"box_id":"b","cmd":"sleep 1000"}}}"#;
    let mut busy = websocket(&server, exec);
    let mut stalled = server.client();
    stalled.write("GET /healthz HTTP/1.1\r\n");
    stalled.wait_until_read();
    server.wait_for("boxd_boxes{state=\"running\"} 1");
    let started = Instant::now();
    server.signal(Signal::TERM);
    let (status, texts) = closed_with(&mut busy);
    assert_eq!(status, 1001, "{texts:?}");
    let (status, log) = server.ended();
    assert!(status.success(), "{log}");
    assert!(started.elapsed() < LONG / 2, "{log}");
    assert!(
        log.contains("connections that did not finish left=1"),
        "{log}"
    );
    stalled.rest();
}
