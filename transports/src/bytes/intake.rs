//! The reading side of a byte stream: what has arrived and is not yet part of a message.

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

/// One read asks for at least this much.
const READ: usize = 16 * 1024;

/// What a buffer that is in the middle of a message grows by.
const GROWTH: usize = 64 * 1024;

/// Capacity that a connection may keep while it waits for the rest of a message.
const KEPT_WHILE_WAITING: usize = 4 * 1024;

/// From this size on, a message takes the buffer it was read into instead of a copy.
const HANDED_OVER: usize = 128 * 1024;

/// Bytes that have arrived, and the stream they come from.
///
/// An idle intake owns no buffer (see [`spare`]), so ten thousand silent connections cost next to
/// nothing.
#[derive(Debug)]
pub(crate) struct Intake<R> {
    read: R,
    bytes: Vec<u8>,
    start: usize,
    deadline: Deadline,
    place: Place,
}

impl<R: AsyncRead + Unpin> Intake<R> {
    /// An empty intake; `frame` is the time one message may take.
    pub(crate) fn new(read: R, frame: Duration, place: Place) -> Self {
        Self {
            read,
            bytes: Vec::new(),
            start: 0,
            deadline: Deadline::new(frame),
            place,
        }
    }

    /// What has arrived and is not consumed.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Lets go of the first `count` bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start >= self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Takes the first `count` bytes out. A large message keeps the buffer it was read into.
    pub(crate) fn take(&mut self, count: usize) -> Vec<u8> {
        if self.start == 0 && count >= HANDED_OVER {
            let rest = self.bytes.split_off(count);
            let mut message = std::mem::replace(&mut self.bytes, rest);
            if message.capacity() > 2 * count.max(large::LARGE) {
                // Much of what it was read into is another message's.
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

    /// The place is kept, because the peer is known. `false` if another connection has it already.
    pub(crate) fn keep_place(&self) -> bool {
        self.place.keep()
    }

    /// The message that was begun is complete, and the clock stops.
    pub(crate) fn message_ended(&mut self) {
        self.deadline.end();
    }

    /// Waits for more bytes; `false` at the end of the stream. `begun` says that part of a message
    /// has arrived, so the rest must come in time.
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

    /// Reads, and looks at the clock when there is a reason to.
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
        // What has come is read first: it may say who the peer is.
        if read.is_pending() && self.place.poll_lost(cx).is_ready() {
            return Poll::Ready(Err(ConnectionError::Closed));
        }
        read.map_err(connection_error)
    }

    /// Reads into the buffer where it has room, and through the stack where it has none.
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

    /// Gives the buffer back while nothing comes, but for the little of a message that has come.
    fn rest(&mut self) {
        if self.bytes.len() < KEPT_WHILE_WAITING && self.bytes.capacity() > KEPT_WHILE_WAITING {
            let begun = self.bytes.as_slice().to_vec();
            spare::give_back(std::mem::replace(&mut self.bytes, begun));
        }
    }
}
