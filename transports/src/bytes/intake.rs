//! Reading side of a byte stream: bytes that are not yet part of a message.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::{Context, Poll},
    time::Duration,
};

use box_rpc::{ConnectionError, large};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{Deadline, connection_error, spare};
use crate::places::Place;

/// Minimum size of one read.
const READ: usize = 16 * 1024;

/// Growth of a buffer in the middle of a message.
const GROWTH: usize = 64 * 1024;

/// Maximum capacity kept while waiting for the rest of a message.
const KEPT_WHILE_WAITING: usize = 4 * 1024;

/// Minimum size of a message that takes over its read buffer without a copy.
const HANDED_OVER: usize = 128 * 1024;

/// Arrived bytes, and the stream they come from.
///
/// An idle intake owns no buffer (see [`spare`]), so ten thousand silent connections need almost no memory.
#[derive(Debug)]
pub(crate) struct Intake<R> {
    read: R,
    bytes: Vec<u8>,
    start: usize,
    deadline: Deadline,
    place: Place,
}

impl<R: AsyncRead + Unpin> Intake<R> {
    /// Creates an empty intake; `frame` is the timeout of one message.
    pub(crate) fn new(read: R, frame: Duration, place: Place) -> Self {
        Self {
            read,
            bytes: Vec::new(),
            start: 0,
            deadline: Deadline::new(frame),
            place,
        }
    }

    /// Returns the arrived bytes that are not consumed.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Discards the first `count` bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start >= self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Removes and returns the first `count` bytes.
    /// A large message keeps its read buffer.
    pub(crate) fn take(&mut self, count: usize) -> Vec<u8> {
        if self.start == 0 && count >= HANDED_OVER {
            let rest = self.bytes.split_off(count);
            let mut message = std::mem::replace(&mut self.bytes, rest);
            if message.capacity() > 2 * count.max(large::LARGE) {
                // A large part of the read buffer belongs to another message.
                let exact = message.clone();
                large::keep(message);
                return exact;
            }
            if message.capacity() < large::LARGE && message.capacity() > count + count / 4 {
                message.shrink_to_fit();
            }
            return message;
        }
        let message = self.bytes[self.start..self.start + count].to_vec();
        self.consume(count);
        message
    }

    /// Keeps the place, because the peer is identified.
    /// Returns `false` if another connection has taken it.
    pub(crate) fn keep_place(&self) -> bool {
        self.place.keep()
    }

    /// Stops the clock, because the message is complete.
    pub(crate) fn message_ended(&mut self) {
        self.deadline.end();
    }

    /// Waits for more bytes; `false` at the end of the stream.
    /// `begun` means that a part of a message has arrived, so the rest must arrive in time.
    pub(crate) async fn fill(&mut self, begun: bool) -> Result<bool, ConnectionError> {
        if begun {
            self.deadline.begin();
        }
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        let count = poll_fn(|cx| self.poll_fill(cx)).await?;
        Ok(count > 0)
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Reads, and checks the clock if needed.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<usize, ConnectionError>> {
        let read = self.poll_read(cx);
        let over = match &read {
            Poll::Ready(_) => self.deadline.is_over(),
            Poll::Pending => {
                self.rest();
                self.deadline.poll_over(cx).is_ready()
            }
        };
        if over {
            return Poll::Ready(Err(ConnectionError::Stalled(self.deadline.limit())));
        }
        // Arrived bytes are read first, because they may identify the peer.
        if read.is_pending() && self.place.poll_lost(cx).is_ready() {
            return Poll::Ready(Err(ConnectionError::Closed));
        }
        read.map_err(connection_error)
    }

    /// Reads into the buffer if it has capacity, and otherwise through the stack.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<usize>> {
        if self.bytes.capacity() - self.bytes.len() < READ {
            if self.bytes.len() < KEPT_WHILE_WAITING {
                let begun = std::mem::replace(&mut self.bytes, spare::take());
                self.bytes.extend_from_slice(&begun);
            } else {
                large::reserve(&mut self.bytes, GROWTH);
            }
        }
        pin!(self.read.read_buf(&mut self.bytes)).poll(cx)
    }

    /// Returns the buffer while no bytes arrive; keeps a short partial message.
    fn rest(&mut self) {
        if self.bytes.len() < KEPT_WHILE_WAITING && self.bytes.capacity() > KEPT_WHILE_WAITING {
            let begun = self.bytes.as_slice().to_vec();
            spare::give_back(std::mem::replace(&mut self.bytes, begun));
        }
    }
}
