//! Entry points for the fuzzer: the bytes of a peer, whole and in pieces.
//!
//! Each function panics if a reader's result depends on how the bytes are split, or breaks another
//! rule that the function names.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use box_rpc::{Connection, ConnectionError, Limits};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tungstenite::handshake::{client::Response, derive_accept_key, machine::TryParse};

use crate::{
    connection_limit::ConnectionPermit,
    websocket::{
        self, Role, UpgradePolicy, UpgradeRejection, WebSocket, from_upgraded, is_host,
        read_response,
    },
};

/// Message limit of the connections: small, so that short inputs exceed it.
const MESSAGE_BYTES: usize = 600;

/// Token of the policy. A request without it must not be admitted.
const TOKEN: &str = "token-of-the-policy";

/// Host name of the policy. A request without it must not be admitted.
const HOST: &str = "box.example";

/// Key of a client's request; the answer must contain its hash.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// Reads websocket frames of a peer as both ends do.
///
/// The first two bytes choose the end and the size of the pieces.
///
/// # Panics
/// If the messages depend on how the bytes are split, exceed the limit, or do not survive being sent
/// again.
pub fn frames(bytes: &[u8]) {
    let Some((&[role, piece], bytes)) = bytes.split_first_chunk() else {
        return;
    };
    let (role, peer) = if role & 1 == 0 {
        (Role::Server, Role::Client)
    } else {
        (Role::Client, Role::Server)
    };
    let whole = run(events(upgraded(bytes, usize::MAX, role), Ready::Unused));
    let pieces = usize::from(piece % 64) + 1;
    let split = run(events(upgraded(bytes, pieces, role), Ready::Unused));
    assert_eq!(whole, split, "in pieces of {pieces}");
    let ready = run(events(upgraded(bytes, pieces, role), Ready::Used));
    assert_eq!(whole, ready, "with the messages that are ready");
    let messages: Vec<String> = whole.into_iter().filter_map(Event::message).collect();
    let again = run(async {
        let stream = Scripted::new(&[], usize::MAX);
        let written = Arc::clone(&stream.written);
        let (mut send, _receive) = Box::new(from_upgraded(stream, peer, &limits())).split();
        let mut messages: VecDeque<String> = messages.iter().cloned().collect();
        let outcome = send.send_all(&mut messages).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        let written = written.lock().unwrap_or_else(PoisonError::into_inner);
        upgraded(&written, usize::MAX, role)
    });
    let again: Vec<String> = run(events(again, Ready::Unused))
        .into_iter()
        .filter_map(Event::message)
        .collect();
    assert_eq!(messages, again, "sent again");
}

/// Reads an upgrade request as a server does, an answer as a client does, and a host name.
///
/// The first byte is the size of the pieces.
///
/// # Panics
/// If the result depends on how the bytes are split, if the policy admits a request without its token
/// or host, or if an answer is not valid HTTP.
pub fn upgrade(bytes: &[u8]) {
    let Some((piece, bytes)) = bytes.split_first() else {
        return;
    };
    let pieces = usize::from(*piece) + 1;
    let (answer, whole) = run(served(bytes, usize::MAX));
    let (split_answer, split) = run(served(bytes, pieces));
    assert_eq!((&split_answer, &split), (&answer, &whole));
    check_answer(&answer, &whole);
    if answer.starts_with("HTTP/1.1 101 ") {
        let text = String::from_utf8_lossy(bytes).to_ascii_lowercase();
        assert!(text.contains(TOKEN) && text.contains(HOST), "{text}");
    }
    answered(bytes, pieces);
    let text = String::from_utf8_lossy(bytes);
    let (ours, host) = text.split_once('\n').unwrap_or((&text, HOST));
    assert!(is_host(ours, ours));
    if is_host(ours, host) {
        let begins = host.to_ascii_lowercase();
        assert!(begins.starts_with(&ours.to_ascii_lowercase()), "{host}");
    }
}

/// Reads the answer to an upgrade in pieces that end at each multiple of `pieces`.
fn answered(bytes: &[u8], pieces: usize) {
    let key = derive_accept_key(KEY.as_bytes());
    let read = |bytes: &[u8]| read_response(bytes, &key).map_err(|error| error.to_string());
    let whole = read(bytes);
    if let Ok(Some(size)) = whole {
        let text = String::from_utf8_lossy(&bytes[..size]);
        assert!(text.contains(&key) && text.contains("101"), "{text}");
    }
    for end in (0..bytes.len()).step_by(pieces) {
        let part = read(&bytes[..end]);
        assert!(part == Ok(None) || part == whole, "{part:?} at {end}");
    }
}

/// Checks that a refusal is a complete HTTP response.
fn check_answer(answer: &str, outcome: &[Event]) {
    if answer.is_empty() {
        return;
    }
    let Ok(Some((size, parsed))) = Response::try_parse(answer.as_bytes()) else {
        panic!("{answer}");
    };
    let status = parsed.status().as_u16();
    if status == 101 {
        return;
    }
    let length = parsed.headers().get("content-length");
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    assert_eq!(length, Some(answer.len() - size), "{answer}");
    let refused = matches!(outcome, [Event::Refused(refused)] if *refused == status);
    assert!(refused, "{outcome:?}: {answer}");
}

/// Serves an upgrade, then reads messages; returns the answer and the events.
async fn served(bytes: &[u8], pieces: usize) -> (String, Vec<Event>) {
    let stream = Scripted::new(bytes, pieces);
    let written = Arc::clone(&stream.written);
    let policy = UpgradePolicy::new().hosts([HOST]).token(TOKEN);
    let (read, write) = tokio::io::split(stream);
    let accepted = WebSocket::accept_with_permit(
        read,
        write,
        &limits(),
        &policy,
        &ConnectionPermit::default(),
    )
    .await;
    let events = match accepted {
        Ok(accepted) => {
            let answer = written.lock().unwrap_or_else(PoisonError::into_inner).len();
            let events = events(accepted, Ready::Unused).await;
            // Later bytes are answers to pings, whose number depends on the split.
            written
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .truncate(answer);
            events
        }
        Err(ConnectionError::Io(error)) => {
            let rejection = error.get_ref().and_then(|error| error.downcast_ref());
            vec![
                rejection.map_or(Event::Lost, |rejection: &UpgradeRejection| {
                    Event::Refused(rejection.status)
                }),
            ]
        }
        Err(_) => vec![Event::Lost],
    };
    let written = written.lock().unwrap_or_else(PoisonError::into_inner);
    (String::from_utf8_lossy(&written).into_owned(), events)
}

/// What a reader finds.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Message(String),
    TooLarge(String),
    Framing(&'static str),
    Refused(u16),
    Closed,
    Lost,
}

impl Event {
    fn message(self) -> Option<String> {
        match self {
            Self::Message(message) => Some(message),
            _ => None,
        }
    }
}

/// Whether a reader also takes messages that need no further bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    Used,
    Unused,
}

/// Reads until the connection ends.
async fn events<R, W>(connection: WebSocket<R, W>, ready: Ready) -> Vec<Event>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (_send, mut receive) = Box::new(connection).split();
    let mut events = Vec::new();
    loop {
        match receive.receive().await {
            Ok(Some(message)) => {
                assert!(message.len() <= MESSAGE_BYTES);
                events.push(Event::Message(message));
            }
            Ok(None) => events.push(Event::Closed),
            Err(ConnectionError::TooLarge { head, limit }) => {
                assert_eq!(limit, MESSAGE_BYTES);
                assert!(head.chars().count() <= crate::bytes::HEAD_BYTES);
                events.push(Event::TooLarge(head));
                continue;
            }
            Err(ConnectionError::Framing(reason)) => events.push(Event::Framing(reason)),
            Err(_) => events.push(Event::Lost),
        }
        if !matches!(events.last(), Some(Event::Message(_))) {
            return events;
        }
        while ready == Ready::Used
            && let Some(message) = receive.receive_ready()
        {
            events.push(Event::Message(message));
        }
    }
}

fn upgraded(
    bytes: &[u8],
    pieces: usize,
    role: Role,
) -> WebSocket<tokio::io::ReadHalf<Scripted>, tokio::io::WriteHalf<Scripted>> {
    websocket::from_upgraded(Scripted::new(bytes, pieces), role, &limits())
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.message_bytes = MESSAGE_BYTES;
    limits
}

/// Runs a future and the tasks that it starts.
#[expect(clippy::expect_used, reason = "only a fuzzer and tests call it")]
fn run<T>(work: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().build();
    runtime.expect("a runtime without a driver").block_on(work)
}

/// A stream that returns given bytes in pieces and keeps written ones.
#[derive(Debug)]
struct Scripted {
    pieces: VecDeque<Vec<u8>>,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Scripted {
    fn new(bytes: &[u8], pieces: usize) -> Self {
        Self {
            pieces: bytes.chunks(pieces).map(<[u8]>::to_vec).collect(),
            written: Arc::default(),
        }
    }
}

impl AsyncRead for Scripted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(mut piece) = self.pieces.pop_front() {
            let rest = piece.split_off(piece.len().min(buffer.remaining()));
            buffer.put_slice(&piece);
            if !rest.is_empty() {
                self.pieces.push_front(rest);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Scripted {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::{frames, upgrade};

    /// Calls `check` with each seed of a fuzz target.
    fn seeds(target: &str, check: fn(&[u8])) {
        let folder = format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let mut count = 0;
        for seed in std::fs::read_dir(folder).unwrap() {
            check(&std::fs::read(seed.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 3, "{count} seeds of {target}");
    }

    #[test]
    fn frames_of_the_fuzzer_give_the_same_messages_in_pieces() {
        seeds("frames", frames);
    }

    #[test]
    fn heads_of_the_fuzzer_give_the_same_answer_in_pieces() {
        seeds("http", upgrade);
    }
}
