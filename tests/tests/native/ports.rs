//! Ports inside a box, reached through its agent.

use std::time::Duration;

use box_protocol::actions::{PortChunk, PortOpen, PortOpenResult, PortSend};
use box_protocol::{BoxError, Code, ConnId};
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// An open connection to a port of box `p`.
struct PortConnection {
    id: ConnId,
    chunks: mpsc::Receiver<PortChunk>,
    running: JoinHandle<Result<PortOpenResult, BoxError>>,
}

impl PortConnection {
    async fn open(machine: &Machine, port: u16) -> Result<Self, BoxError> {
        let (sender, mut chunks) = mpsc::channel(4);
        let runtime = machine.runtime.clone();
        let running = tokio::spawn(async move {
            let params = serde_json::from_value(json!({"box_id": "p", "port": port})).unwrap();
            let caller = Caller::Local;
            let opening = runtime.forward_streamed::<PortOpen>(&caller, &params, sender);
            opening.await
        });
        match chunks.recv().await {
            Some(PortChunk::ConnId(id)) => Ok(Self {
                id,
                chunks,
                running,
            }),
            Some(other) => panic!("{other:?}"),
            None => Err(running.await.unwrap().unwrap_err()),
        }
    }

    async fn send(&self, machine: &Machine, data: &[u8], close: bool) -> Result<(), BoxError> {
        send(machine, &self.id, data, close).await
    }

    /// All bytes up to the end.
    async fn rest(mut self) -> (Vec<u8>, PortOpenResult) {
        let mut all = Vec::new();
        while let Some(chunk) = self.chunks.recv().await {
            match chunk {
                PortChunk::Data(data) => all.extend_from_slice(&data),
                PortChunk::ConnId(_) => panic!("named twice"),
            }
        }
        (all, self.running.await.unwrap().unwrap())
    }
}

async fn send(machine: &Machine, id: &ConnId, data: &[u8], close: bool) -> Result<(), BoxError> {
    let mut params: box_protocol::actions::PortSendParams =
        serde_json::from_value(json!({"box_id": "p", "conn_id": id, "close": close})).unwrap();
    params.data = Some(data.to_vec().into());
    let caller = Caller::Local;
    let sent = machine.runtime.forward::<PortSend>(&caller, &params);
    sent.await.map(drop)
}

/// Opens a connection once a server listens.
async fn open(machine: &Machine, port: u16) -> PortConnection {
    let start = std::time::Instant::now();
    loop {
        match PortConnection::open(machine, port).await {
            Ok(conn) => return conn,
            Err(error) => {
                assert_eq!(error.code(), Code::Unavailable, "{error:?}");
                assert!(start.elapsed() < box_test_wait::LONG, "{error:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A server in box `p`.
async fn serve(machine: &Machine, python: &str) {
    let script = format!(
        "cat > /tmp/serve.py <<'EOF'\n{python}\nEOF\n\
        python3 /tmp/serve.py > /tmp/served 2>&1 & true"
    );
    printed(&machine.exec("p", &script).await);
}

/// Echoes its input, and then closes.
const ECHO: &str = "
import asyncio
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b'end')
    writer.close()
async def main():
    server = await asyncio.start_server(echo, HOST, 7000, backlog=100)
    await server.serve_forever()
asyncio.run(main())";

#[tokio::test]
async fn http_passes_through() {
    on_each_machine(async |machine| {
        let made = machine.exec("p", "mkdir /tmp/www && echo hello > /tmp/www/index.html");
        printed(&made.await);
        let error = PortConnection::open(machine, 8000).await.err().unwrap();
        assert_eq!(error.code(), Code::Unavailable);
        let server = "cd /tmp/www && python3 -m http.server 8000 > /dev/null 2>&1 & true";
        printed(&machine.exec("p", server).await);
        let conn = open(machine, 8000).await;
        let request = b"GET /index.html HTTP/1.0\r\n\r\n";
        conn.send(machine, request, false).await.unwrap();
        let (answer, counts) = conn.rest().await;
        let text = String::from_utf8(answer).unwrap();
        assert!(
            text.starts_with("HTTP/1.0 200") && text.ends_with("\r\n\r\nhello\n"),
            "{text}"
        );
        assert_eq!(
            (counts.sent, counts.received),
            (request.len() as u64, text.len() as u64)
        );
    })
    .await;
}

#[tokio::test]
async fn a_mebibyte_is_echoed_over_ipv4_and_ipv6() {
    on_each_machine(async |machine| {
        for host in ["'127.0.0.1'", "'::1'"] {
            serve(machine, &ECHO.replace("HOST", host)).await;
            let conn = open(machine, 7000).await;
            let bytes: Vec<u8> = (0..1_u32 << 20)
                .map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[1])
                .collect();
            let id = conn.id.clone();
            let sending = async {
                for piece in bytes.chunks(30_000) {
                    send(machine, &id, piece, false).await.unwrap();
                }
                send(machine, &id, b"", true).await.unwrap();
                // Closed for writing, open for reading.
                let late = send(machine, &id, b"more", false).await.unwrap_err();
                assert!(
                    matches!(late.code(), Code::Conflict | Code::NotFound),
                    "{late:?}"
                );
            };
            let ((), (mut back, counts)) = tokio::join!(sending, conn.rest());
            assert_eq!(
                back.split_off(back.len() - 3),
                b"end",
                "half closed, not closed"
            );
            assert!(back == bytes, "{} bytes", back.len());
            assert_eq!((counts.sent, counts.received), (1 << 20, (1 << 20) + 3));
            let gone = send(machine, &id, b"x", false).await.unwrap_err();
            assert_eq!(gone.code(), Code::NotFound);
            machine.exec("p", "pkill -f serve.py; sleep 0.1").await;
        }
        let params = serde_json::from_value(json!({"box_id": "p"})).unwrap();
        let figures = machine.runtime.stats(&Caller::Local, params, None).await;
        let figures = figures.unwrap();
        assert_eq!(figures.network_received_bytes, Some(2 << 20));
        assert_eq!(figures.network_sent_bytes, Some((2 << 20) + 6));
    })
    .await;
}

#[tokio::test]
async fn many_connections_are_apart_and_bounded() {
    on_each_machine(async |machine| {
        serve(machine, &ECHO.replace("HOST", "'127.0.0.1'")).await;
        open(machine, 7000).await.running.abort();
        let all = (0..50).map(|_| PortConnection::open(machine, 7000));
        let all: Vec<_> = futures::future::join_all(all).await;
        let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
        let mut others = Vec::new();
        let refused = loop {
            match PortConnection::open(machine, 7000).await {
                Ok(conn) => others.push(conn),
                Err(error) => break error,
            }
            assert!(others.len() < 50, "connections are limited");
        };
        assert_eq!(refused.code(), Code::Capacity, "{refused:?}");
        for other in others {
            other.running.abort();
        }
        let talks = all.into_iter().enumerate().map(async |(number, conn)| {
            let word = format!("number {number}");
            conn.send(machine, word.as_bytes(), true).await.unwrap();
            let (back, _) = conn.rest().await;
            assert_eq!(back, format!("{word}end").into_bytes());
        });
        futures::future::join_all(talks).await;
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_leaves_closes_its_connection_even_while_it_sends() {
    on_each_machine(async |machine| {
        // Accepts one connection, reads nothing for a while, and prints how the connection ended.
        let lazy = "
import socket, sys, time
listening = socket.create_server(('127.0.0.1', 7000))
taken, _ = listening.accept()
while True:
    try:
        if not taken.send(b'.'): break
    except OSError:
        break
    time.sleep(0.02)
open('/tmp/part', 'w').write('closed')
import os; os.rename('/tmp/part', '/tmp/closed')";
        serve(machine, lazy).await;
        let conn = open(machine, 7000).await;
        let flood = vec![7; 1 << 20];
        let id = conn.id.clone();
        let sending = async {
            loop {
                if let Err(error) = send(machine, &id, &flood, false).await {
                    return error;
                }
            }
        };
        let leaving = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            conn.running.abort();
            drop(conn.chunks);
        };
        let (ended, ()) = tokio::join!(sending, leaving);
        assert!(
            matches!(ended.code(), Code::Conflict | Code::NotFound),
            "{ended:?}"
        );
        let closed = "until [ -e /tmp/closed ]; do sleep 0.05; done; cat /tmp/closed";
        assert_eq!(printed(&machine.exec("p", closed).await), "closed");
    })
    .await;
}
