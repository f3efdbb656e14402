//! Writing side of a byte stream: many small messages, few writes.

use std::{
    future::poll_fn,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use box_rpc::ConnectionError;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::AsyncWrite;

use super::{Deadline, connection_error, thread_buffers};
use crate::connection_limit::ConnectionPermit;

/// Size at which the buffer is written out.
const WRITE_SIZE: usize = 64 * 1024;

/// Minimum size of a message that is written without a copy.
pub(crate) const DIRECT_WRITE_BYTES: usize = 32 * 1024;

/// Method to check whether the other end is gone after its end of input.
#[derive(Debug, Default)]
pub(crate) enum Probe {
    /// Sends an empty line, which every peer drops. Needed over a network.
    #[default]
    EmptyLine,
    /// Writes zero bytes, which fails if both ends are on one machine.
    EmptyWrite,
    /// Polls the descriptor.
    Poll(OwnedFd),
    /// Does not check.
    Never,
}

/// Outgoing bytes, and the stream they go to.
///
/// Each write of the buffer, or of one large message, must finish within the limit `frame`. A peer that stops reading
/// therefore cannot hold its messages in memory indefinitely.
#[derive(Debug)]
pub(crate) struct WriteBuffer<W> {
    /// `None` once closed: a pipe signals its end only by being dropped.
    write: Option<W>,
    buffer: Vec<u8>,
    deadline: Deadline,
    /// Whether a write is incomplete: it failed, or its future was dropped.
    /// The peer would read any further bytes as the rest of it.
    incomplete: bool,
    _permit: ConnectionPermit,
}

impl<W: AsyncWrite + Unpin> WriteBuffer<W> {
    /// Creates an empty buffer; `frame` is the timeout of one write.
    pub(crate) fn new(write: W, frame: Duration, permit: ConnectionPermit) -> Self {
        Self {
            write: Some(write),
            buffer: Vec::new(),
            deadline: Deadline::new(frame),
            incomplete: false,
            _permit: permit,
        }
    }

    /// Returns the buffer for small messages.
    /// Call [`write_if_full`](Self::write_if_full) after each.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        if self.buffer.capacity() == 0 {
            self.buffer = thread_buffers::take();
        }
        &mut self.buffer
    }

    /// Writes the buffer out if it is large.
    pub(crate) async fn write_if_full(&mut self) -> Result<(), ConnectionError> {
        if self.buffer.len() >= WRITE_SIZE {
            self.write_buffer().await?;
        }
        Ok(())
    }

    /// Writes the buffer and then `bytes`, which are not copied.
    pub(crate) async fn write_directly(&mut self, bytes: &[u8]) -> Result<(), ConnectionError> {
        self.write_buffer().await?;
        self.write_all(bytes).await
    }

    /// Sends all buffered bytes.
    pub(crate) async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.write_buffer().await?;
        thread_buffers::give_back(std::mem::take(&mut self.buffer));
        self.in_time(|write, cx| Pin::new(write).poll_flush(cx))
            .await
    }

    /// Checks whether the other end still accepts data.
    pub(crate) async fn probe(&mut self, how: &Probe) -> Result<(), ConnectionError> {
        match how {
            Probe::EmptyLine => {
                self.buffer().push(b'\n');
                self.flush().await
            }
            Probe::EmptyWrite => {
                self.in_time(|write, cx| Pin::new(write).poll_write(cx, &[]).map_ok(drop))
                    .await
            }
            Probe::Poll(fd) => {
                let mut polled = [PollFd::new(fd, PollFlags::empty())];
                let now = Timespec::default();
                rustix::event::poll(&mut polled, Some(&now)).map_err(std::io::Error::from)?;
                let gone = PollFlags::ERR | PollFlags::HUP;
                if polled[0].revents().intersects(gone) {
                    return Err(ConnectionError::Closed);
                }
                Ok(())
            }
            Probe::Never => Ok(()),
        }
    }

    /// Flushes and ends the stream in this direction. No write may follow.
    pub(crate) async fn close(&mut self) -> Result<(), ConnectionError> {
        if self.write.is_none() {
            return Ok(());
        }
        let flushed = self.flush().await;
        let ended = match flushed {
            Ok(()) => {
                self.in_time(|write, cx| Pin::new(write).poll_shutdown(cx))
                    .await
            }
            Err(error) => Err(error),
        };
        self.write = None;
        ended
    }

    async fn write_buffer(&mut self) -> Result<(), ConnectionError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let written = self.write_all(&buffer).await;
        buffer.clear();
        self.buffer = buffer;
        written
    }

    async fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        if std::mem::replace(&mut self.incomplete, true) {
            return Err(ConnectionError::Closed);
        }
        self.in_time(|write, cx| {
            while !bytes.is_empty() {
                match Pin::new(&mut *write).poll_write(cx, bytes) {
                    Poll::Ready(Ok(0)) => {
                        return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into()));
                    }
                    Poll::Ready(Ok(count)) => bytes = &bytes[count..],
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            Poll::Ready(Ok(()))
        })
        .await?;
        self.incomplete = false;
        Ok(())
    }

    /// Repeats `step` until it is done or the timeout has passed.
    async fn in_time(
        &mut self,
        mut step: impl FnMut(&mut W, &mut Context<'_>) -> Poll<std::io::Result<()>>,
    ) -> Result<(), ConnectionError> {
        let Self {
            write, deadline, ..
        } = self;
        let write = write.as_mut().ok_or(ConnectionError::Closed)?;
        let result = poll_fn(|cx| match step(write, cx) {
            Poll::Ready(result) => Poll::Ready(result.map_err(connection_error)),
            Poll::Pending => {
                deadline.start();
                deadline
                    .poll_passed(cx)
                    .map(|()| Err(ConnectionError::Stalled(deadline.limit())))
            }
        })
        .await;
        self.deadline.stop();
        result
    }
}
