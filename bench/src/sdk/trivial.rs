//! A server that answers exactly the calls of the measured clients, with answers that it has written beforehand.
//!
//! It does the least work that the SDKs accept: it finds the end of a request, and writes the answer of the first route
//! that the request begins with.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use memchr::memmem;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tungstenite::handshake::derive_accept_key;

use super::STREAMED;
use crate::process;

/// The begin of requests for LangSmith's websocket.
const WEBSOCKET: &str = "GET /langsmith/execute/ws ";

/// The line that `bench/sdk/langsmith.py` repeats, and the bytes of each message.
const LINE: &[u8] = b"a line of text, as programs write it: 0123456789\n";
const PIECE: usize = 32 << 10;

/// Listens, announces the address, and serves until the process ends.
pub(crate) fn serve() -> Result<()> {
    process::end_with_parent();
    process::runtime()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let answers = Arc::new(Answers::new(address)?);
        process::announce(format!("http://{address}"))?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let answers = Arc::clone(&answers);
            tokio::spawn(async move {
                if let Err(error) = Connection::new(stream).serve(&answers).await {
                    eprintln!("trivial server: {error:#}");
                }
            });
        }
    })
}

/// All answers, as bytes.
struct Answers {
    /// How a request begins, and its answer.
    routes: Vec<(&'static str, Vec<u8>)>,
    /// The messages of LangSmith's `true`.
    ran: Vec<u8>,
    /// The messages of LangSmith's streamed output.
    streamed: Vec<u8>,
}

impl Answers {
    fn new(address: SocketAddr) -> Result<Self> {
        let time = "2026-01-01T00:00:00Z";
        let json = |status, body: serde_json::Value| {
            response(status, "application/json", body.to_string().as_bytes())
        };
        let empty = || b"HTTP/1.1 204 No Content\r\n\r\n".to_vec();
        let sandbox = json!({
            "id": "s", "status": {"state": "Running"}, "entrypoint": ["tail", "-f", "/dev/null"],
            "createdAt": time, "expiresAt": time,
        });
        let events = format!(
            "{}\n\n{}\n\n{}\n\n",
            json!({"type": "init", "timestamp": 1, "text": "c"}),
            json!({"type": "stdout", "timestamp": 1, "text": "hello"}),
            json!({"type": "execution_complete", "timestamp": 1, "execution_time": 0}),
        );
        let langsmith_box = json!({
            "id": "s", "name": "s", "status": "ready", "created_at": time, "updated_at": time,
            "dataplane_url": format!("http://{address}/langsmith"),
        });
        let ran = json!({
            "success": true, "message": "", "hint": null,
            "data": {"session_id": "s", "command": "true", "status": "completed", "output": "", "exit_code": 0},
        });
        let e2b_box = json!({
            "templateID": "base", "sandboxID": "s", "clientID": "c", "envdVersion": "0.6.4",
            "envdAccessToken": "t", "trafficAccessToken": "t",
        });
        let end =
            json!({"event": {"end": {"exitCode": 0, "exited": true, "status": "exit status 0"}}});
        let mut process = envelope(0, &json!({"event": {"start": {"pid": 1}}}))?;
        process.extend(envelope(0, &end)?);
        process.extend(envelope(2, &json!({}))?);
        let routes = vec![
            ("POST /v1/sandboxes ", json("202 Accepted", sandbox)),
            (
                "GET /v1/sandboxes/s/endpoints/",
                json("200 OK", json!({"endpoint": format!("{address}/execd")})),
            ),
            ("GET /execd/ping ", response("200 OK", "text/plain", b"")),
            (
                "POST /execd/command ",
                response("200 OK", "text/event-stream", events.as_bytes()),
            ),
            ("POST /v1/metrics/events ", empty()),
            ("DELETE /v1/sandboxes/s ", empty()),
            (
                "POST /v2/sandboxes/boxes ",
                json("201 Created", langsmith_box),
            ),
            ("POST /v1/shell/exec ", json("200 OK", ran)),
            ("POST /e2b/api/v2/sandboxes ", json("201 Created", e2b_box)),
            (
                "POST /e2b/envd/process.Process/Start ",
                response("200 OK", "application/connect+json", &process),
            ),
            ("DELETE /e2b/api/sandboxes/s ", empty()),
        ];
        Ok(Self {
            routes,
            ran: messages(&[])?,
            streamed: messages(&LINE.repeat(STREAMED / LINE.len() + 1)[..STREAMED])?,
        })
    }
}

fn response(status: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Writes a message of a stream of E2B.
fn envelope(flags: u8, message: &serde_json::Value) -> Result<Vec<u8>> {
    let message = message.to_string();
    let length = u32::try_from(message.len())?.to_be_bytes();
    Ok([&[flags], &length[..], message.as_bytes()].concat())
}

/// Writes all frames of a command of LangSmith: its start, its output, its end, and the close of the connection.
fn messages(output: &[u8]) -> Result<Vec<u8>> {
    let mut frames = text_frame(&json!({"type": "started", "command_id": "c", "pid": 1}))?;
    for (number, piece) in output.chunks(PIECE).enumerate() {
        let data = std::str::from_utf8(piece)?;
        let message = json!({"type": "stdout", "data": data, "offset": number * PIECE});
        frames.extend(text_frame(&message)?);
    }
    frames.extend(text_frame(&json!({"type": "exit", "exit_code": 0}))?);
    // Close with status 1000.
    frames.extend([0x88, 2, 0x03, 0xe8]);
    Ok(frames)
}

fn text_frame(message: &serde_json::Value) -> Result<Vec<u8>> {
    let message = message.to_string();
    let mut frame = vec![0x81];
    match message.len() {
        short @ ..126 => frame.push(u8::try_from(short)?),
        long => {
            frame.push(127);
            frame.extend(u64::try_from(long)?.to_be_bytes());
        }
    }
    frame.extend(message.as_bytes());
    Ok(frame)
}

struct Connection {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            unread: Vec::new(),
        }
    }

    async fn serve(mut self, answers: &Answers) -> Result<()> {
        while let Some(head) = self.request().await? {
            if head.starts_with(WEBSOCKET) {
                return self.websocket(&head, answers).await;
            }
            let route = answers.routes.iter();
            let mut route = route.filter(|(begin, _)| head.starts_with(begin));
            let unknown = || format!("no answer to {}", head.lines().next().unwrap_or_default());
            let (_, answer) = route.next().with_context(unknown)?;
            self.stream.write_all(answer).await?;
        }
        Ok(())
    }

    /// Reads a request, and returns its head; `None` at the end of the connection.
    async fn request(&mut self) -> Result<Option<String>> {
        let head = loop {
            if let Some(end) = memmem::find(&self.unread, b"\r\n\r\n") {
                break end + 4;
            }
            if !self.more().await? {
                return Ok(None);
            }
        };
        let text = String::from_utf8_lossy(&self.unread[..head]).into_owned();
        let end = if header(&text, "transfer-encoding").is_some() {
            // The last chunk of a small body.
            let last = b"\r\n0\r\n\r\n";
            loop {
                let found = memmem::find(&self.unread[head - 2..], last);
                if let Some(at) = found {
                    break head - 2 + at + last.len();
                }
                ensure!(self.more().await?, "a body without an end");
            }
        } else {
            let length: usize = header(&text, "content-length").unwrap_or("0").parse()?;
            while self.unread.len() < head + length {
                ensure!(self.more().await?, "a body without an end");
            }
            head + length
        };
        self.unread.drain(..end);
        Ok(Some(text))
    }

    /// Reads more; returns whether the connection is open.
    async fn more(&mut self) -> Result<bool> {
        Ok(self.stream.read_buf(&mut self.unread).await? > 0)
    }

    /// Reads one message, and writes all messages of its command.
    async fn websocket(mut self, head: &str, answers: &Answers) -> Result<()> {
        let key = header(head, "sec-websocket-key").context("no key")?;
        let accept = derive_accept_key(key.as_bytes());
        let switch = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: \
             {accept}\r\n\r\n"
        );
        self.stream.write_all(switch.as_bytes()).await?;
        let first = loop {
            if let Some(message) = unmasked(&self.unread) {
                break message;
            }
            ensure!(self.more().await?, "no message");
        };
        let is_true = memmem::find(&first, br#""command":"true""#).is_some()
            || memmem::find(&first, br#""command": "true""#).is_some();
        let frames = if is_true {
            &answers.ran
        } else {
            &answers.streamed
        };
        self.stream.write_all(frames).await?;
        // The client answers the close, and then waits until the server ends the connection.
        let _ = self.more().await;
        Ok(())
    }
}

/// Returns the first header with a name.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Returns the first message of a client, whose frames are masked and shorter than 64 KiB; `None` if it is not complete.
fn unmasked(bytes: &[u8]) -> Option<Vec<u8>> {
    let short = usize::from(bytes.get(1)? & 0x7f);
    let (length, head) = match short {
        126 => {
            let length = bytes.get(2..4)?.try_into().ok()?;
            (usize::from(u16::from_be_bytes(length)), 4)
        }
        _ => (short, 2),
    };
    let mask = bytes.get(head..head + 4)?;
    let payload = bytes.get(head + 4..head + 4 + length)?;
    let payload = payload.iter().zip(mask.iter().cycle());
    Some(payload.map(|(byte, mask)| byte ^ mask).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_when_it_is_complete() {
        for length in [3, 125, 126, 5000] {
            let text = vec![b'x'; length];
            let mask = [1, 2, 3, 4];
            let mut frame = vec![0x81];
            if let Ok(short @ ..126) = u8::try_from(length) {
                frame.push(0x80 | short);
            } else {
                frame.push(0xfe);
                frame.extend(u16::try_from(length).unwrap().to_be_bytes());
            }
            frame.extend(mask);
            let masked = text.iter().zip(mask.iter().cycle());
            frame.extend(masked.map(|(byte, mask)| byte ^ mask));
            assert_eq!(unmasked(&frame[..frame.len() - 1]), None);
            assert_eq!(unmasked(&frame), Some(text));
        }
    }

    #[test]
    fn the_streamed_output_is_whole() {
        let output = LINE.repeat(5000);
        let frames = messages(&output).unwrap();
        let ends = memmem::find_iter(&frames, b"0123456789\\n").count();
        // A line may be in two messages.
        assert!(5000 - ends <= output.len() / PIECE, "{ends}");
    }
}
