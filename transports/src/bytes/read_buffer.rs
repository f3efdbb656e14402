//! Reading side of a byte stream: bytes that are not yet part of a message.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::{Context, Poll},
    time::Duration,
};

use box_rpc::{ConnectionError, buffer_pool};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{Deadline, connection_error, thread_buffers};
use crate::connection_limit::ConnectionPermit;

/// Minimum size of one read.
const MIN_READ: usize = 16 * 1024;

/// Growth of a buffer in the middle of a message.
const GROWTH: usize = 64 * 1024;

/// Maximum capacity kept while waiting for the rest of a message.
const IDLE_CAPACITY: usize = 4 * 1024;

/// Minimum size of a message that takes over its read buffer without a copy.
const MIN_WITHOUT_COPY: usize = 128 * 1024;

/// Arrived bytes, and the stream they come from.
///
/// An idle value owns no memory (see [`thread_buffers`]), so ten thousand silent connections need almost no memory.
#[derive(Debug)]
pub(crate) struct ReadBuffer<R> {
    read: R,
    bytes: Vec<u8>,
    start: usize,
    deadline: Deadline,
    permit: ConnectionPermit,
}

impl<R: AsyncRead + Unpin> ReadBuffer<R> {
    /// Creates an empty buffer; `frame` is the timeout of one message.
    pub(crate) fn new(read: R, frame: Duration, permit: ConnectionPermit) -> Self {
        Self {
            read,
            bytes: Vec::new(),
            start: 0,
            deadline: Deadline::new(frame),
            permit,
        }
    }

    /// Returns the arrived bytes that are not consumed.
    pub(crate) fn buffered(&self) -> &[u8] {
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
        if self.start == 0 && count >= MIN_WITHOUT_COPY {
            let rest = self.bytes.split_off(count);
            let mut message = std::mem::replace(&mut self.bytes, rest);
            if message.capacity() > 2 * count.max(buffer_pool::MIN_POOLED) {
                // A large part of the read buffer belongs to another message.
                let exact = message.clone();
                buffer_pool::recycle(message);
                return exact;
            }
            if message.capacity() < buffer_pool::MIN_POOLED
                && message.capacity() > count + count / 4
            {
                message.shrink_to_fit();
            }
            return message;
        }
        let message = self.bytes[self.start..self.start + count].to_vec();
        self.consume(count);
        message
    }

    /// Confirms the permit, because the peer is identified.
    /// Returns `false` if the listener has evicted the connection.
    pub(crate) fn confirm_permit(&self) -> bool {
        self.permit.confirm()
    }

    /// Stops the clock, because the message is complete.
    pub(crate) fn message_ended(&mut self) {
        self.deadline.stop();
    }

    /// Waits for more bytes; `false` at the end of the stream.
    /// `is_partial` means that a part of a message has arrived, so the rest must arrive in time.
    pub(crate) async fn fill(&mut self, is_partial: bool) -> Result<bool, ConnectionError> {
        if is_partial {
            self.deadline.start();
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
        let passed = match &read {
            Poll::Ready(_) => self.deadline.has_passed(),
            Poll::Pending => {
                self.release_if_idle();
                self.deadline.poll_passed(cx).is_ready()
            }
        };
        if passed {
            return Poll::Ready(Err(ConnectionError::Stalled(self.deadline.limit())));
        }
        // Arrived bytes are read first, because they may identify the peer.
        if read.is_pending() && self.permit.poll_evicted(cx).is_ready() {
            return Poll::Ready(Err(ConnectionError::Closed));
        }
        read.map_err(connection_error)
    }

    /// Reads into the buffer if it has capacity, and otherwise through the stack.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<usize>> {
        if self.bytes.capacity() - self.bytes.len() < MIN_READ {
            if self.bytes.len() < IDLE_CAPACITY {
                let partial = std::mem::replace(&mut self.bytes, thread_buffers::take());
                self.bytes.extend_from_slice(&partial);
            } else {
                buffer_pool::reserve(&mut self.bytes, GROWTH);
            }
        }
        pin!(self.read.read_buf(&mut self.bytes)).poll(cx)
    }

    /// Returns the buffer while no bytes arrive; keeps a short partial message.
    fn release_if_idle(&mut self) {
        if self.bytes.len() < IDLE_CAPACITY && self.bytes.capacity() > IDLE_CAPACITY {
            let partial = self.bytes.as_slice().to_vec();
            thread_buffers::give_back(std::mem::replace(&mut self.bytes, partial));
        }
    }
}
