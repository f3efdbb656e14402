//! A relay between a managed process and a websocket, with one message per line.
//!
//! MCP clients parse each message as one JSON document, so a message always holds exactly one line.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandInputParams, Exclusive, ReadFrom, StreamName, Until,
    View,
};
use box_protocol::{BoxError, BoxId, CommandId, CommandState, PerStream};
use box_rpc::{Connection as _, ConnectionError, Limits, ReceiveHalf, SendHalf};
use box_transports::websocket::{Pinger, Role, WebSocket, from_upgraded};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Host;
use super::codec::classes::class_of;
use super::context::Placement;
use super::errors::{admission, already_attached, no_session, not_running};
use super::fence::Lease;
use super::processes::Attachment;

/// The interval between pings to the client.
const PING: Duration = Duration::from_secs(30);

/// The maximum bytes of messages that wait for the process to read them.
const WAITING_BYTES: usize = 16 * 1024 * 1024;

/// How long the process may take to read pending input after the client has left.
const LAST_INPUT: Duration = Duration::from_secs(1);

/// How long the client may take to receive the last messages.
const LAST_WORDS: Duration = Duration::from_secs(1);

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
    pub fn words(&self) -> (&'static str, &str) {
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
    host: Arc<Host>,
    session: BoxId,
    process: CommandId,
    attachment: Attachment,
    stderr: u64,
    lease: Lease,
}

impl Host {
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
            host: Arc::clone(self),
            session: id,
            process: info.command_id,
            attachment,
            stderr: info.size.stderr,
            lease,
        })
    }
}

impl Relay {
    /// Relays lines and messages between the process and the client.
    ///
    /// The relay ends when the process ends, the client leaves, a newer placement connects, or `stop` returns. The
    /// process keeps running after the relay has ended.
    pub async fn run<S>(self, stream: S, limits: &Limits, stop: impl Future<Output = ()>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let socket: WebSocket<_, _> = from_upgraded(stream, Role::Server, limits);
        let pinger = socket.pinger();
        let (mut send, mut receive) = Box::new(socket).split();
        let (queue, mut waiting) = mpsc::unbounded_channel();
        {
            let room = Arc::new(Semaphore::new(WAITING_BYTES));
            let input = self.input(&mut waiting);
            tokio::pin!(input);
            let left = tokio::select! {
                () = self.output(&mut *send, limits.message_bytes) => false,
                () = received(&mut *receive, &queue, &room) => true,
                () = &mut input => false,
                () = unheard(&pinger, &room) => false,
                () = self.lease.stale() => false,
                () = stop => false,
            };
            if left {
                drop(queue);
                let _ = timeout(LAST_INPUT, input).await;
            }
        }
        let _ = timeout(LAST_WORDS, send.close()).await;
    }

    /// Sends each output line as a message.
    ///
    /// Returns when the process ends or the client stops reading.
    async fn output(&self, send: &mut dyn SendHalf, longest: usize) {
        let (chunks, mut pieces) = mpsc::channel(4);
        let begin = self.attachment.passed_on();
        let params = CommandAttachParams {
            box_id: self.session.clone(),
            command_id: self.process.clone(),
            from: ReadFrom::Offsets(PerStream {
                stdout: begin,
                stderr: self.stderr,
            }),
            view: View::Bytes,
            until: Until::default(),
            exclusive: Some(Exclusive::Refuse),
            pty: None,
        };
        let mut lines = Lines::new(begin, longest);
        let caller = self.host.caller();
        let pass_on = async {
            while let Some(chunk) = pieces.recv().await {
                match chunk {
                    CommandChunk::Bytes(piece) if piece.stream == StreamName::Stdout => {
                        lines.take(&piece.data);
                    }
                    CommandChunk::Gap(gap) if gap.stream == StreamName::Stdout => {
                        lines.skip(gap.bytes);
                    }
                    _ => continue,
                }
                self.give(&mut lines, send).await?;
            }
            lines.finish();
            self.give(&mut lines, send).await
        };
        let read = self.host.runtime.attach_command(&caller, params, chunks);
        let read = async {
            if let Err(error) = read.await {
                tracing::debug!(%error, "a relay's process cannot be read");
            }
        };
        // A client that does not accept a line ends the relay; the end of the output ends the forwarding.
        tokio::pin!(read, pass_on);
        tokio::select! {
            _ = &mut pass_on => {}
            () = &mut read => {
                let _ = pass_on.await;
            }
        }
    }

    async fn give(
        &self,
        lines: &mut Lines,
        send: &mut dyn SendHalf,
    ) -> Result<(), ConnectionError> {
        let mut any = false;
        while let Some(line) = lines.next() {
            send.send(line).await?;
            any = true;
        }
        if any {
            send.flush().await?;
        }
        self.attachment.pass_on(lines.given);
        Ok(())
    }

    /// Writes each message as a line of the process's input until a write fails.
    async fn input(&self, waiting: &mut mpsc::UnboundedReceiver<(String, OwnedSemaphorePermit)>) {
        let caller = self.host.caller();
        while let Some((mut message, _room)) = waiting.recv().await {
            message.push('\n');
            let params = CommandInputParams {
                box_id: self.session.clone(),
                command_id: self.process.clone(),
                size: None,
                data: Some(message.into_bytes().into()),
                close: false,
            };
            if let Err(error) = self.host.runtime.input_command(&caller, params).await {
                tracing::debug!(%error, "a relay's process takes no input");
                return;
            }
        }
    }
}

/// Receives messages until the client leaves.
///
/// A bounded number of bytes is queued for the process.
async fn received(
    receive: &mut dyn ReceiveHalf,
    queue: &mpsc::UnboundedSender<(String, OwnedSemaphorePermit)>,
    room: &Arc<Semaphore>,
) {
    while let Ok(Some(message)) = receive.receive().await {
        let bytes = u32::try_from(message.len().clamp(1, WAITING_BYTES)).unwrap_or(1);
        let Ok(place) = Arc::clone(room).acquire_many_owned(bytes).await else {
            return;
        };
        if queue.send((message, place)).is_err() {
            return;
        }
    }
}

/// Returns once the client stops answering pings.
async fn unheard<W: AsyncWrite + Unpin + Send + 'static>(pinger: &Pinger<W>, room: &Semaphore) {
    let mut ticks = interval(PING);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut heard = None;
    loop {
        ticks.tick().await;
        // While the queue is full, the relay reads nothing and cannot see the answer to a ping.
        let listening = room.available_permits() > 0;
        let now = pinger.frames_received();
        if listening && heard == Some(now) {
            return;
        }
        heard = listening.then_some(now);
        if pinger.ping().await.is_err() {
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
    given: u64,
    longest: usize,
    /// Whether the next bytes belong to a line with a lost beginning.
    in_gap: bool,
    ended: bool,
}

impl Lines {
    fn new(begin: u64, longest: usize) -> Self {
        Self {
            bytes: Vec::new(),
            searched: 0,
            given: begin,
            longest,
            in_gap: false,
            ended: false,
        }
    }

    fn take(&mut self, mut bytes: &[u8]) {
        if self.in_gap {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let skipped = end.map_or(bytes.len(), |end| end + 1);
            self.given += skipped as u64;
            self.in_gap = end.is_none();
            bytes = &bytes[skipped..];
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Skips lost bytes and the rest of the line that they belong to.
    fn skip(&mut self, bytes: u64) {
        self.given += self.bytes.len() as u64 + bytes;
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
            None if self.bytes.len() >= self.longest => (self.longest, self.longest),
            None if self.ended && !self.bytes.is_empty() => (self.bytes.len(), self.bytes.len()),
            None => {
                self.searched = self.bytes.len();
                return None;
            }
        };
        let line = String::from_utf8_lossy(&self.bytes[..length]).into_owned();
        self.bytes.drain(..taken);
        self.searched = 0;
        self.given += taken as u64;
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
    async fn a_client_is_asked_for_signs_of_life_and_given_up_without_any() {
        use tokio::io::AsyncReadExt as _;
        use tokio::time::Instant;

        let (near, mut far) = tokio::io::duplex(1024);
        let socket = from_upgraded(near, Role::Server, &Limits::network());
        let pinger = socket.pinger();
        let begun = Instant::now();
        let room = Semaphore::new(1);
        let ping = async {
            let mut frame = [0; 2];
            far.read_exact(&mut frame).await.unwrap();
            (frame, begun.elapsed())
        };
        let (asked, ()) = tokio::join!(ping, unheard(&pinger, &room));
        assert_eq!(asked, ([0x89, 0], PING));
        assert_eq!(begun.elapsed(), 2 * PING);
        // The relay keeps a client while the queue is full, because it cannot read the client's answers.
        let full = Semaphore::new(0);
        assert!(timeout(10 * PING, unheard(&pinger, &full)).await.is_err());
    }

    #[test]
    fn a_message_is_a_line_however_it_comes() {
        let mut lines = Lines::new(10, 1 << 20);
        lines.take(b"one\ntw");
        assert_eq!(all(&mut lines), ["one"]);
        assert_eq!(lines.given, 14);
        lines.take("o ä".as_bytes());
        assert!(all(&mut lines).is_empty());
        // A code point that spans two pieces.
        let omega = "ω\n\nlast".as_bytes();
        lines.take(&omega[..1]);
        assert!(all(&mut lines).is_empty());
        lines.take(&omega[1..]);
        assert_eq!(all(&mut lines), ["two äω", ""]);
        lines.finish();
        assert_eq!(all(&mut lines), ["last"]);
        assert_eq!(lines.given, 10 + "one\ntwo äω\n\nlast".len() as u64);
    }

    #[test]
    fn a_long_line_is_one_message_up_to_the_limit() {
        let mut lines = Lines::new(0, 200_000);
        let long = "x".repeat(150_000);
        for piece in long.as_bytes().chunks(65_536) {
            lines.take(piece);
            assert!(lines.next().is_none());
        }
        lines.take(b"\n");
        assert_eq!(all(&mut lines), [long]);
        lines.take(&vec![b'y'; 250_000]);
        assert_eq!(all(&mut lines)[0].len(), 200_000);
        lines.take(b"\n");
        assert_eq!(all(&mut lines)[0].len(), 50_000);
    }

    #[test]
    fn after_a_gap_it_goes_on_with_the_next_line() {
        let mut lines = Lines::new(0, 1 << 20);
        lines.take(b"half a li");
        lines.skip(100);
        lines.take(b"rest of another");
        lines.take(b" line\nwhole\n");
        assert_eq!(all(&mut lines), ["whole"]);
        let before = "half a li".len() + 100 + "rest of another line\nwhole\n".len();
        assert_eq!(lines.given, before as u64);
    }
}
