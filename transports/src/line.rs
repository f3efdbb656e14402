//! Newline framing over any byte stream: one message, one line.
//!
//! The reader is tolerant. It drops empty lines and a carriage return before the newline, and accepts a last line
//! without a newline. Bytes that are not UTF-8 become replacement characters. It skips a line longer than
//! `message_bytes` in constant memory, reports [`ConnectionError::TooLarge`] and continues with the next line.
//!
//! ```
//! use box_rpc::{Connection, Limits};
//! use box_transports::line::Line;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), box_rpc::ConnectionError> {
//! // Any byte stream; here, a few lines that have already arrived.
//! let line = Line::new(&b"[1]\r\n\n[2]"[..], tokio::io::sink(), &Limits::default());
//! let (_, mut receive) = Box::new(line).split();
//! assert_eq!(receive.receive().await?.as_deref(), Some("[1]"));
//! assert_eq!(receive.receive_ready(), None, "the last line may be incomplete");
//! assert_eq!(receive.receive().await?.as_deref(), Some("[2]"));
//! assert_eq!(receive.receive().await?, None);
//! # Ok(())
//! # }
//! ```

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf, buffer_pool};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::bytes::{DIRECT_WRITE_BYTES, HEAD_BYTES, Probe, ReadBuffer, WriteBuffer, text_of};
use crate::connection_limit::ConnectionPermit;

/// A connection that frames by newlines.
#[derive(Debug)]
pub struct Line<R, W> {
    send: LineSend<W>,
    receive: LineReceive<R>,
}

impl<R, W> Line<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    /// Frames the streams `read` and `write`.
    /// `limits` gives the maximum length and the timeout of a message.
    pub fn new(read: R, write: W, limits: &Limits) -> Self {
        Self::with_permit(read, write, limits, &ConnectionPermit::default())
    }

    /// Like [`new`](Self::new), with a permit of a listener.
    pub(crate) fn with_permit(
        read: R,
        write: W,
        limits: &Limits,
        permit: &ConnectionPermit,
    ) -> Self {
        Self {
            send: LineSend::new(write, limits, permit.clone()),
            receive: LineReceive::new(read, limits, permit.clone()),
        }
    }

    /// Sets the method that checks whether the other end is gone.
    pub(crate) fn probed_by(mut self, probe: Probe) -> Self {
        self.send.probe = probe;
        self
    }

    /// Skips and counts lines that are not of the form `{…}` or `[…]`.
    pub fn skip_non_messages(&mut self) -> SkippedLines {
        self.receive.skipped_lines.get_or_insert_default().clone()
    }

    /// Returns both halves with their types.
    pub(crate) fn into_parts(self) -> (LineSend<W>, LineReceive<R>) {
        (self.send, self.receive)
    }
}

impl<R, W> Connection for Line<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.send), Box::new(self.receive))
    }
}

/// Sending half.
#[derive(Debug)]
pub struct LineSend<W> {
    write_buffer: WriteBuffer<W>,
    probe: Probe,
}

impl<W: AsyncWrite + Unpin> LineSend<W> {
    fn new(write: W, limits: &Limits, permit: ConnectionPermit) -> Self {
        Self {
            write_buffer: WriteBuffer::new(write, limits.frame, permit),
            probe: Probe::default(),
        }
    }

    /// Takes one message; buffers small ones until the flush.
    async fn write(&mut self, mut message: String) -> Result<(), ConnectionError> {
        // A line break outside of a JSON string is white space, and inside of one it is invalid JSON.
        if memchr::memchr(b'\n', message.as_bytes()).is_some() {
            message = message.replace('\n', " ");
        }
        if message.len() >= DIRECT_WRITE_BYTES {
            message.push('\n');
            let written = self.write_buffer.write_directly(message.as_bytes()).await;
            buffer_pool::recycle(message);
            return written;
        }
        let buffer = self.write_buffer.buffer();
        buffer.extend_from_slice(message.as_bytes());
        buffer.push(b'\n');
        self.write_buffer.write_if_full().await
    }

    /// Writes and flushes the buffered messages.
    async fn finish(&mut self) -> Result<(), ConnectionError> {
        self.write_buffer.flush().await
    }

    /// Checks whether the other end is gone; may detect it only the next time.
    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.write_buffer.probe(&self.probe).await
    }

    /// Flushes and ends the stream in this direction.
    async fn end(&mut self) -> Result<(), ConnectionError> {
        self.write_buffer.close().await
    }
}

#[async_trait]
impl<W: AsyncWrite + Unpin + Send> SendHalf for LineSend<W> {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.write(message).await
    }

    async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.finish().await
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        while let Some(message) = messages.pop_front() {
            self.write(message).await?;
        }
        self.finish().await
    }

    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.end().await
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.probe().await
    }
}

/// Counter of skipped lines that cannot be messages: prints, banners, logs.
#[derive(Debug, Clone, Default)]
pub struct SkippedLines(Arc<AtomicU64>);

impl SkippedLines {
    /// Returns the number of skipped lines.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn count(&self) {
        let skipped = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::debug!(skipped, "skipped a line that is not a message");
    }
}

/// Receiving half.
#[derive(Debug)]
pub struct LineReceive<R> {
    read_buffer: ReadBuffer<R>,
    /// Maximum length of a line.
    limit: usize,
    /// Bytes of the waiting line already searched for its end.
    searched: usize,
    /// Beginning of an oversize line that is being skipped.
    skipping: Option<Vec<u8>>,
    /// Whether the stream has ended; the waiting bytes are the last line.
    ended: bool,
    /// Set if the reader skips lines that cannot be messages.
    skipped_lines: Option<SkippedLines>,
}

/// Result of searching the buffered bytes.
enum Found {
    /// A whole line.
    Message(Vec<u8>),
    /// Beginning of a line that was skipped.
    TooLarge(Vec<u8>),
    /// No end of a line.
    Nothing,
}

impl<R: AsyncRead + Unpin> LineReceive<R> {
    fn new(read: R, limits: &Limits, permit: ConnectionPermit) -> Self {
        Self {
            read_buffer: ReadBuffer::new(read, limits.frame, permit),
            limit: limits.message_bytes,
            searched: 0,
            skipping: None,
            ended: false,
            skipped_lines: None,
        }
    }

    /// Returns the next line; `None` at the end. Cancel safe.
    /// `self` keeps all intermediate state.
    async fn next(&mut self) -> Result<Option<String>, ConnectionError> {
        loop {
            match self.find() {
                Found::Message(line) => return Ok(Some(text_of(line))),
                Found::TooLarge(head) => {
                    return Err(ConnectionError::TooLarge {
                        head: text_of(head),
                        limit: self.limit,
                    });
                }
                Found::Nothing if self.ended => return Ok(None),
                Found::Nothing => {
                    let is_partial =
                        self.skipping.is_some() || !self.read_buffer.buffered().is_empty();
                    self.ended = !self.read_buffer.fill(is_partial).await?;
                }
            }
        }
    }

    /// Returns a whole line that has already arrived.
    fn next_ready(&mut self) -> Option<String> {
        // Only `next` can report an oversize line.
        if self.skipping.is_some() || self.read_buffer.buffered().len() > self.limit {
            return None;
        }
        match self.find() {
            Found::Message(line) => Some(text_of(line)),
            Found::TooLarge(_) | Found::Nothing => None,
        }
    }

    /// Searches the waiting bytes for a line, and skips lines that are no message.
    fn find(&mut self) -> Found {
        loop {
            let buffered = self.read_buffer.buffered();
            let end =
                memchr::memchr(b'\n', &buffered[self.searched..]).map(|at| self.searched + at);
            let (length, whole) = match end {
                Some(end) => (end, true),
                None => (
                    buffered.len(),
                    self.ended && !(buffered.is_empty() && self.skipping.is_none()),
                ),
            };
            if let Some(head) = &mut self.skipping {
                extend_head(head, &buffered[..length]);
                self.drop_line(length, end.is_some());
                if whole && let Some(head) = self.skipping.take() {
                    if self.is_skipped(&head, None) {
                        continue;
                    }
                    return Found::TooLarge(head);
                }
                return Found::Nothing;
            }
            if length > self.limit.saturating_add(1)
                || (whole && trimmed(&buffered[..length]).len() > self.limit)
            {
                self.skipping = Some(Vec::with_capacity(HEAD_BYTES));
                continue;
            }
            if !whole {
                self.searched = length;
                return Found::Nothing;
            }
            let kept = trimmed(&buffered[..length]).len();
            if kept == 0 || self.is_skipped(&buffered[..kept], Some(&buffered[..kept])) {
                self.drop_line(length, end.is_some());
                if end.is_none() {
                    return Found::Nothing;
                }
                continue;
            }
            let line = self.read_buffer.take(kept);
            self.drop_line(length - kept, end.is_some());
            return Found::Message(line);
        }
    }

    /// Consumes `length` bytes and the newline after them.
    /// The newline ends the timeout of the line, whatever the line was.
    fn drop_line(&mut self, length: usize, newline: bool) {
        self.read_buffer.consume(length + usize::from(newline));
        self.searched = 0;
        if newline {
            self.read_buffer.message_ended();
        }
    }

    /// Whether to skip a line that begins with `head` and ends like `tail`.
    /// `tail` is set if the end is known. Counts a skipped line.
    fn is_skipped(&self, head: &[u8], tail: Option<&[u8]>) -> bool {
        let Some(skipped_lines) = &self.skipped_lines else {
            return false;
        };
        let close = match head.trim_ascii_start().first() {
            Some(b'{') => Some(&b'}'),
            Some(b'[') => Some(&b']'),
            _ => None,
        };
        let framed =
            close.is_some() && tail.is_none_or(|tail| tail.trim_ascii_end().last() == close);
        if !framed {
            skipped_lines.count();
        }
        !framed
    }
}

#[async_trait]
impl<R: AsyncRead + Unpin + Send> ReceiveHalf for LineReceive<R> {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        self.next().await
    }

    fn receive_ready(&mut self) -> Option<String> {
        self.next_ready()
    }

    fn set_message_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    fn peer_identified(&mut self) -> bool {
        self.read_buffer.confirm_permit()
    }
}

/// Returns the line without its carriage return.
fn trimmed(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Adds bytes to the kept beginning of an oversize message, up to its limit.
pub(crate) fn extend_head(head: &mut Vec<u8>, bytes: &[u8]) {
    let room = HEAD_BYTES.saturating_sub(head.len()).min(bytes.len());
    head.extend_from_slice(&bytes[..room]);
}
