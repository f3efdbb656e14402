//! A relay between a managed process and a websocket, with one message per line.
//!
//! MCP clients parse each message as one JSON document, so a message always holds exactly one line.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandInputParams, Exclusive, ReadFrom, StreamName, View,
};
use box_protocol::{BoxError, BoxId, CommandId, CommandState, PerStream};
use box_rpc::Limits;
use bytes::Bytes;
use futures::{Sink, SinkExt as _, Stream, StreamExt as _};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Installation;
use super::codec::classes::class_of;
use super::context::Placement;
use super::errors::{admission, already_attached, no_session, not_running};
use super::fence::Lease;
use super::processes::Attachment;

/// The interval between pings to the client.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// The read buffer of a websocket; a longer message grows it.
const READ_BUFFER_BYTES: usize = 16 * 1024;

/// The maximum bytes of messages that wait for the process to read them.
const MAX_QUEUED_BYTES: usize = 16 * 1024 * 1024;

/// How long the process may take to read pending input after the client has left.
const INPUT_GRACE: Duration = Duration::from_secs(1);

/// How long the client may take to receive the last messages.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// The reason why a relay was refused.
#[derive(Debug)]
pub enum RelayRefused {
    /// The caller is not authorized or names no workspace; the answer gives no reason.
    Unauthorized,
    /// The process cannot be attached to; the server answers before the upgrade.
    Refused(BoxError),
}

impl RelayRefused {
    /// Returns the error class and text for LangBot's client.
    pub fn class_and_text(&self) -> (&'static str, &str) {
        match self {
            Self::Unauthorized => ("Unauthorized", "Unauthorized"),
            Self::Refused(error) => (class_of(error), error.message()),
        }
    }
}

impl From<BoxError> for RelayRefused {
    fn from(error: BoxError) -> Self {
        Self::Refused(error)
    }
}

/// An attached process, before its websocket is open.
#[derive(Debug)]
pub struct Relay {
    installation: Arc<Installation>,
    session: BoxId,
    process: CommandId,
    attachment: Attachment,
    stderr: u64,
    lease: Lease,
}

impl Installation {
    /// Attaches to a process in the workspace and placement that the headers name.
    pub async fn relay(
        self: &Arc<Self>,
        workspace: &str,
        generation: &str,
        session: &str,
        process: &str,
    ) -> Result<Relay, RelayRefused> {
        let placement = Placement::of_headers(&self.instance, workspace, generation);
        let placement = placement.ok_or(RelayRefused::Unauthorized)?;
        let lease = self
            .fence
            .current(&placement)
            .ok_or(RelayRefused::Unauthorized)?;
        if let Some(grant) = self.require_grant(&placement).await?
            && grant.max_managed_processes == 0
        {
            let refused = "Sandbox admission grant does not permit managed process relay";
            return Err(admission(refused).into());
        }
        if !placement.owns(session) {
            return Err(RelayRefused::Unauthorized);
        }
        let id = BoxId::new(session).map_err(|_| no_session(session))?;
        self.session(&id).await?;
        let info = self.process(&id, process).await?;
        if !matches!(info.state, CommandState::Running | CommandState::Held) {
            return Err(not_running(session, process).into());
        }
        let known = self.processes.find(&id, &info.command_id);
        let known = known.ok_or_else(|| not_running(session, process))?;
        let attachment = known
            .attach()
            .ok_or_else(|| already_attached(session, process))?;
        Ok(Relay {
            installation: Arc::clone(self),
            session: id,
            process: info.command_id,
            attachment,
            stderr: info.size.stderr,
            lease,
        })
    }
}

impl Relay {
    /// Sets the limits of the websocket.
    pub fn configure(&self, upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
        let bytes = Limits::network().message_bytes;
        upgrade
            .max_message_size(bytes)
            .max_frame_size(bytes)
            .read_buffer_size(READ_BUFFER_BYTES)
    }

    /// Relays lines and messages between the process and the client.
    ///
    /// The relay ends when the process ends, the client leaves, a newer placement connects, or `stop` returns. The
    /// process keeps running after the relay has ended.
    pub async fn run(self, socket: WebSocket, stop: impl Future<Output = ()>) {
        let (send, receive) = socket.split();
        let send = Mutex::new(send);
        let (queue, mut queued) = mpsc::unbounded_channel();
        let mut status = close_code::NORMAL;
        {
            let (received, capacity) = (
                AtomicU64::new(0),
                Arc::new(Semaphore::new(MAX_QUEUED_BYTES)),
            );
            let input = self.input(&mut queued);
            tokio::pin!(input);
            let left = tokio::select! {
                () = self.output(&send, Limits::network().message_bytes) => None,
                left = receive_messages(receive, &received, &queue, &capacity) => Some(left),
                () = &mut input => None,
                () = unresponsive(&send, &received, &capacity) => None,
                () = self.lease.stale() => None,
                () = stop => None,
            };
            if let Some(left) = left {
                status = left;
                drop(queue);
                let _ = timeout(INPUT_GRACE, input).await;
            }
        }
        let close = Message::Close(Some(CloseFrame {
            code: status,
            reason: "".into(),
        }));
        let mut send = send.into_inner();
        let _ = timeout(CLOSE_GRACE, send.send(close)).await;
    }

    /// Sends each output line as a message.
    ///
    /// Returns when the process ends or the client stops reading.
    async fn output<S>(&self, send: &Mutex<S>, max_bytes: usize)
    where
        S: Sink<Message> + Unpin,
    {
        let (sender, mut chunks) = mpsc::channel(4);
        let begin = self.attachment.forwarded();
        let params = CommandAttachParams {
            from: ReadFrom::Offsets(PerStream {
                stdout: begin,
                stderr: self.stderr,
            }),
            view: View::Bytes,
            exclusive: Some(Exclusive::Refuse),
            ..CommandAttachParams::new(self.session.clone(), self.process.clone())
        };
        let mut lines = Lines::new(begin, max_bytes);
        let caller = self.installation.caller();
        let forward = async {
            while let Some(chunk) = chunks.recv().await {
                match chunk {
                    CommandChunk::Bytes(bytes) if bytes.stream == StreamName::Stdout => {
                        lines.push(&bytes.data);
                    }
                    CommandChunk::Gap(gap) if gap.stream == StreamName::Stdout => {
                        lines.skip(gap.bytes);
                    }
                    _ => continue,
                }
                self.send_lines(&mut lines, send).await?;
            }
            lines.finish();
            self.send_lines(&mut lines, send).await
        };
        let read = self
            .installation
            .runtime
            .attach_command(&caller, params, sender);
        let read = async {
            if let Err(error) = read.await {
                tracing::debug!(%error, "cannot read the output of a relayed process");
            }
        };
        // A client that does not accept a line ends the relay; the end of the output ends the forwarding.
        tokio::pin!(read, forward);
        tokio::select! {
            _ = &mut forward => {}
            () = &mut read => {
                let _ = forward.await;
            }
        }
    }

    async fn send_lines<S>(&self, lines: &mut Lines, send: &Mutex<S>) -> Result<(), S::Error>
    where
        S: Sink<Message> + Unpin,
    {
        let mut send = send.lock().await;
        while let Some(line) = lines.next() {
            send.feed(Message::Text(line.into())).await?;
        }
        send.flush().await?;
        self.attachment.record_forwarded(lines.delivered);
        Ok(())
    }

    /// Writes each message as a line of the process's input until a write fails.
    async fn input(&self, queued: &mut mpsc::UnboundedReceiver<(String, OwnedSemaphorePermit)>) {
        let caller = self.installation.caller();
        while let Some((mut message, _room)) = queued.recv().await {
            message.push('\n');
            let params = CommandInputParams {
                data: Some(message.into_bytes().into()),
                ..CommandInputParams::new(self.session.clone(), self.process.clone())
            };
            if let Err(error) = self
                .installation
                .runtime
                .input_command(&caller, params)
                .await
            {
                tracing::debug!(%error, "cannot write to a relayed process");
                return;
            }
        }
    }
}

/// Receives messages until the client leaves, and returns the status to close with.
///
/// A bounded number of bytes is queued for the process.
async fn receive_messages(
    mut receive: impl Stream<Item = Result<Message, axum::Error>> + Unpin,
    received: &AtomicU64,
    queue: &mpsc::UnboundedSender<(String, OwnedSemaphorePermit)>,
    capacity: &Arc<Semaphore>,
) -> u16 {
    while let Some(Ok(message)) = receive.next().await {
        received.fetch_add(1, Ordering::Relaxed);
        let message = match message {
            Message::Text(text) => text.as_str().to_owned(),
            Message::Binary(_) => return close_code::UNSUPPORTED,
            Message::Ping(_) | Message::Pong(_) => continue,
            Message::Close(_) => return close_code::NORMAL,
        };
        let bytes = u32::try_from(message.len().clamp(1, MAX_QUEUED_BYTES)).unwrap_or(1);
        let Ok(permit) = Arc::clone(capacity).acquire_many_owned(bytes).await else {
            break;
        };
        if queue.send((message, permit)).is_err() {
            break;
        }
    }
    close_code::NORMAL
}

/// Returns once the client stops answering pings.
async fn unresponsive<S>(send: &Mutex<S>, received: &AtomicU64, capacity: &Semaphore)
where
    S: Sink<Message> + Unpin,
{
    let mut ticks = interval(PING_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut last_heard = None;
    loop {
        ticks.tick().await;
        // While the queue is full, the relay reads nothing and cannot see the answer to a ping.
        let listening = capacity.available_permits() > 0;
        let now = received.load(Ordering::Relaxed);
        if listening && last_heard == Some(now) {
            return;
        }
        last_heard = listening.then_some(now);
        let ping = Message::Ping(Bytes::new());
        if send.lock().await.send(ping).await.is_err() {
            return;
        }
    }
}

/// Splits output into lines; a line longer than the message limit is split further.
#[derive(Debug)]
struct Lines {
    bytes: Vec<u8>,
    /// The number of buffered bytes already searched for a line end.
    searched: usize,
    /// The output offset after the last returned line.
    delivered: u64,
    max_bytes: usize,
    /// Whether the next bytes belong to a line with a lost beginning.
    in_gap: bool,
    ended: bool,
}

impl Lines {
    fn new(begin: u64, max_bytes: usize) -> Self {
        Self {
            bytes: Vec::new(),
            searched: 0,
            delivered: begin,
            max_bytes,
            in_gap: false,
            ended: false,
        }
    }

    fn push(&mut self, mut bytes: &[u8]) {
        if self.in_gap {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let skipped = end.map_or(bytes.len(), |end| end + 1);
            self.delivered += skipped as u64;
            self.in_gap = end.is_none();
            bytes = &bytes[skipped..];
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Skips lost bytes and the rest of the line that they belong to.
    fn skip(&mut self, bytes: u64) {
        self.delivered += self.bytes.len() as u64 + bytes;
        self.bytes.clear();
        self.searched = 0;
        self.in_gap = true;
    }

    /// Marks the end of the output.
    fn finish(&mut self) {
        self.ended = true;
    }

    fn next(&mut self) -> Option<String> {
        let end = self.bytes[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n');
        let (length, taken) = match end {
            Some(end) => (self.searched + end, self.searched + end + 1),
            None if self.bytes.len() >= self.max_bytes => (self.max_bytes, self.max_bytes),
            None if self.ended && !self.bytes.is_empty() => (self.bytes.len(), self.bytes.len()),
            None => {
                self.searched = self.bytes.len();
                return None;
            }
        };
        let line = String::from_utf8_lossy(&self.bytes[..length]).into_owned();
        self.bytes.drain(..taken);
        self.searched = 0;
        self.delivered += taken as u64;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lines: &mut Lines) -> Vec<String> {
        std::iter::from_fn(|| lines.next()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_answers_no_ping_is_disconnected() {
        use tokio::time::Instant;

        let (sink, mut pings) = futures::channel::mpsc::unbounded();
        let (sink, received) = (Mutex::new(sink), AtomicU64::new(0));
        let started = Instant::now();
        let capacity = Semaphore::new(1);
        let ping = async { (pings.next().await, started.elapsed()) };
        let (first_ping, ()) = tokio::join!(ping, unresponsive(&sink, &received, &capacity));
        let expected = Message::Ping(Bytes::new());
        assert_eq!(first_ping, (Some(expected), PING_INTERVAL));
        assert_eq!(started.elapsed(), 2 * PING_INTERVAL);
        // The relay keeps a client that answers.
        let answers = async {
            while pings.next().await.is_some() {
                received.fetch_add(1, Ordering::Relaxed);
            }
        };
        tokio::select! {
            () = answers => {}
            within = timeout(10 * PING_INTERVAL, unresponsive(&sink, &received, &capacity)) => {
                assert!(within.is_err());
            }
        }
        // And while the queue is full, because it cannot read the client's answers.
        let full = Semaphore::new(0);
        let kept = timeout(10 * PING_INTERVAL, unresponsive(&sink, &received, &full));
        assert!(kept.await.is_err());
    }

    #[test]
    fn one_line_is_one_message_for_any_chunking() {
        let mut lines = Lines::new(10, 1 << 20);
        lines.push(b"one\ntw");
        assert_eq!(all(&mut lines), ["one"]);
        assert_eq!(lines.delivered, 14);
        lines.push("o ä".as_bytes());
        assert!(all(&mut lines).is_empty());
        // A code point that spans two chunks.
        let omega = "ω\n\nlast".as_bytes();
        lines.push(&omega[..1]);
        assert!(all(&mut lines).is_empty());
        lines.push(&omega[1..]);
        assert_eq!(all(&mut lines), ["two äω", ""]);
        lines.finish();
        assert_eq!(all(&mut lines), ["last"]);
        assert_eq!(lines.delivered, 10 + "one\ntwo äω\n\nlast".len() as u64);
    }

    #[test]
    fn a_long_line_is_one_message_up_to_the_limit() {
        let mut lines = Lines::new(0, 200_000);
        let long = "x".repeat(150_000);
        for chunk in long.as_bytes().chunks(65_536) {
            lines.push(chunk);
            assert!(lines.next().is_none());
        }
        lines.push(b"\n");
        assert_eq!(all(&mut lines), [long]);
        lines.push(&vec![b'y'; 250_000]);
        assert_eq!(all(&mut lines)[0].len(), 200_000);
        lines.push(b"\n");
        assert_eq!(all(&mut lines)[0].len(), 50_000);
    }

    #[test]
    fn output_continues_at_the_next_line_after_a_gap() {
        let mut lines = Lines::new(0, 1 << 20);
        lines.push(b"half a li");
        lines.skip(100);
        lines.push(b"rest of another");
        lines.push(b" line\nwhole\n");
        assert_eq!(all(&mut lines), ["whole"]);
        let before = "half a li".len() + 100 + "rest of another line\nwhole\n".len();
        assert_eq!(lines.delivered, before as u64);
    }
}
