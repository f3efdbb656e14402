//! The events of a command: its start, its output and its end.

use axum::body::Bytes;
use axum::http::header::USER_AGENT;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::actions::{CommandChunk, ReadWhy, StreamName};
use box_protocol::{CommandInfo, Exit, ExitWhy};
use serde_json::{Value, json};

use super::body::{Broken, breakable};
use super::connect;
use super::error::{EnvdError, gone};
use crate::http::stream::{Step, StreamedCall};

/// A call that reads a command, and whether the command has a terminal.
type Reading = (StreamedCall<CommandChunk, Ended>, bool);

/// A command when its reader stopped.
pub(super) struct Ended {
    pub(super) info: CommandInfo,
    pub(super) why: Option<ReadWhy>,
}

/// Answers with the events of a command.
pub(super) fn answer(begun: Result<Reading, EnvdError>, parts: &Parts) -> Response {
    let (call, is_pty) = match begun {
        Ok(begun) => begun,
        Err(error) => return connect::failed(error),
    };
    let mut events = Events::new(is_pty, knows_breaks(&parts.headers));
    let keepalive = connect::keepalive(&parts.headers);
    connect::stream(breakable(call, keepalive, move |step| events.frame(step)))
}

/// Returns whether a client knows a body that breaks off. Python SDKs with this name, which are old, show the error of
/// their HTTP library.
fn knows_breaks(headers: &HeaderMap) -> bool {
    let agent = headers.get(USER_AGENT).map(HeaderValue::as_bytes);
    !agent.is_some_and(|agent| agent.starts_with(b"e2b-python-sdk/"))
}

/// Writes the events of a command.
struct Events {
    is_pty: bool,
    /// Whether the body breaks off if the box ends.
    breaks: bool,
    /// The bytes that the log of the command dropped.
    lost: u64,
    /// The begin of a character whose rest has not arrived, of each stream.
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Events {
    fn new(is_pty: bool, breaks: bool) -> Self {
        Self {
            is_pty,
            breaks,
            lost: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
        }
    }

    fn frame(&mut self, step: Step<CommandChunk, Ended>) -> Result<Bytes, Broken> {
        Ok(match step {
            Step::Chunk(CommandChunk::Started(info)) => {
                let pid = info.pid.unwrap_or_default();
                connect::message(
                    json!({"event": {"start": {"pid": pid}}})
                        .to_string()
                        .as_bytes(),
                )
            }
            Step::Chunk(CommandChunk::Bytes(piece)) => self.whole(piece.stream, &piece.data),
            Step::Chunk(CommandChunk::Text(piece)) => {
                self.whole(piece.stream, piece.data.as_bytes())
            }
            Step::Chunk(CommandChunk::Gap(gap)) => {
                self.lost += gap.bytes;
                Bytes::new()
            }
            Step::Chunk(CommandChunk::Display(_)) => Bytes::new(),
            Step::Idle => {
                let rest = self.rest();
                if rest.is_empty() {
                    connect::message(br#"{"event":{"keepalive":{}}}"#)
                } else {
                    rest.into()
                }
            }
            Step::End(ended) => {
                let end = ended.map_err(EnvdError::from);
                let end = end.and_then(|ended| self.end(&ended));
                let mut bytes = self.rest();
                match end {
                    Ok(end) => bytes.extend(end),
                    Err(error) if error.is_gone() && self.breaks => {
                        return Err(Broken(bytes.into()));
                    }
                    Err(error) => bytes.extend(connect::end(Some(&cut_off(error)))),
                }
                bytes.into()
            }
        })
    }

    /// Writes output up to its last whole character. Clients of old versions decode each message by itself.
    fn whole(&mut self, stream: StreamName, data: &[u8]) -> Bytes {
        let held = match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        };
        let cut = data.len() - incomplete(data);
        if held.is_empty() && cut == data.len() {
            return self.data(stream, data);
        }
        let mut all = std::mem::take(held);
        all.extend_from_slice(data);
        let cut = all.len() - incomplete(&all);
        *held = all.split_off(cut);
        if all.is_empty() {
            return Bytes::new();
        }
        self.data(stream, &all)
    }

    /// Writes the bytes that are not whole characters.
    fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for stream in [StreamName::Stdout, StreamName::Stderr] {
            let held = std::mem::take(match stream {
                StreamName::Stdout => &mut self.stdout,
                StreamName::Stderr => &mut self.stderr,
            });
            if !held.is_empty() {
                bytes.extend(self.data(stream, &held));
            }
        }
        bytes
    }

    fn data(&self, stream: StreamName, data: &[u8]) -> Bytes {
        let name = match stream {
            _ if self.is_pty => "pty",
            StreamName::Stdout => "stdout",
            StreamName::Stderr => "stderr",
        };
        let mut text = String::with_capacity(data.len() / 3 * 4 + 48);
        text.extend([r#"{"event":{"data":{""#, name, r#"":""#]);
        STANDARD.encode_string(data, &mut text);
        text.push_str(r#""}}}"#);
        connect::message(text.as_bytes())
    }

    fn end(&self, ended: &Ended) -> Result<Bytes, EnvdError> {
        let deadline = || EnvdError::new("deadline_exceeded", "context deadline exceeded");
        let exit = match (&ended.info.exit, ended.why) {
            (_, Some(ReadWhy::Time)) => return Err(deadline()),
            (Some(exit), _) => exit,
            (None, _) => {
                let message = "the exit of the process was not observed";
                return Err(EnvdError::new("unavailable", message));
            }
        };
        match exit.why {
            ExitWhy::Timeout => return Err(deadline()),
            ExitWhy::BoxEnded | ExitWhy::Lost => return Err(gone()),
            _ if self.lost > 0 => {
                let message = format!("{} bytes of output were lost", self.lost);
                return Err(EnvdError::new("data_loss", message));
            }
            _ => {}
        }
        let event = json!({"event": {"end": end_event(exit)}});
        let mut bytes = connect::message(event.to_string().as_bytes()).to_vec();
        bytes.extend(connect::end(None));
        Ok(bytes.into())
    }
}

/// A box that ends during a call, for clients that do not know a broken body.
fn cut_off(error: EnvdError) -> EnvdError {
    if !error.is_gone() {
        return error;
    }
    let message = "the connection to the sandbox ended before the process";
    EnvdError::new("unavailable", message)
}

/// Returns the length of an incomplete UTF-8 character at the end.
fn incomplete(data: &[u8]) -> usize {
    let tail = data.iter().rev().take(3).enumerate();
    for (before, byte) in tail {
        let length = match byte {
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => 1,
        };
        return if length > before + 1 { before + 1 } else { 0 };
    }
    0
}

/// Describes an exit in the words of Go, which clients show.
fn end_event(exit: &Exit) -> Value {
    match exit.code {
        Some(0) => json!({"exitCode": 0, "exited": true, "status": "exit status 0"}),
        Some(code) => {
            let status = format!("exit status {code}");
            json!({"exitCode": code, "exited": true, "status": status, "error": status})
        }
        None => {
            let status = match exit.signal.unwrap_or(9) {
                1 => "signal: hangup".to_owned(),
                2 => "signal: interrupt".to_owned(),
                3 => "signal: quit".to_owned(),
                6 => "signal: aborted".to_owned(),
                9 => "signal: killed".to_owned(),
                11 => "signal: segmentation fault".to_owned(),
                13 => "signal: broken pipe".to_owned(),
                15 => "signal: terminated".to_owned(),
                other => format!("signal: signal {other}"),
            };
            json!({"exitCode": -1, "exited": false, "status": status, "error": status})
        }
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::BoxError;

    use super::*;

    #[test]
    fn an_exit_is_described_as_go_does() {
        assert_eq!(
            end_event(&Exit::returned(3)),
            json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"})
        );
        let killed = end_event(&Exit::by_signal(9, ExitWhy::Killed));
        assert_eq!(killed["exitCode"], -1);
        assert_eq!(killed["error"], "signal: killed");
        assert!(end_event(&Exit::returned(0)).get("error").is_none());
    }

    #[test]
    fn output_is_sent_as_bytes_and_characters_stay_whole() {
        let mut events = Events::new(false, true);
        let frame = events.whole(StreamName::Stderr, b"a\xff");
        assert_eq!(&frame[5..], br#"{"event":{"data":{"stderr":"Yf8="}}}"#);
        let text = "a\u{e9}\u{20ac}\u{1f600}z";
        for at in 0..=text.len() {
            let (head, tail) = text.as_bytes().split_at(at);
            let cut = head.len() - incomplete(head);
            assert!(
                std::str::from_utf8(&head[..cut]).is_ok() && cut + 3 >= at,
                "{at}"
            );
            let mut sent = events.whole(StreamName::Stdout, head).len();
            sent += events.whole(StreamName::Stdout, tail).len();
            assert!(sent > 0 && events.rest().is_empty(), "{at}");
        }
        assert!(events.whole(StreamName::Stdout, b"\xe2\x82").is_empty());
        assert!(!events.rest().is_empty(), "no byte is lost");
    }

    #[test]
    fn a_body_breaks_off_if_its_box_ends() {
        let frame_of = |agent: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(USER_AGENT, HeaderValue::from_static(agent));
            let mut events = Events::new(false, knows_breaks(&headers));
            assert!(events.whole(StreamName::Stdout, b"\xe2").is_empty());
            events.frame(Step::End(Err(BoxError::not_found("no"))))
        };
        for agent in ["e2b-js-sdk/2.51.0", "connectrpc/0.12.1"] {
            let Err(Broken(last)) = frame_of(agent) else {
                panic!("{agent} gets an end");
            };
            assert!(last.ends_with(br#"{"stdout":"4g=="}}}"#), "{last:?}");
        }
        let last = frame_of("e2b-python-sdk/2.20.0").unwrap();
        let last = String::from_utf8_lossy(&last);
        assert!(last.contains("unavailable"), "{last}");
    }
}
