//! The agent's end of a pipe that a command writes to.

use std::io;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::fs::OFlags;
use rustix::pipe::PipeFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that can be waited for.
#[expect(
    deprecated,
    reason = "sound for an OwnedFd, which stays the same; the new way is `unsafe` for the sake of others"
)]
pub(crate) fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// The end that is read.
#[derive(Debug)]
pub(crate) struct Pipe {
    fd: AsyncFd<OwnedFd>,
    ended: bool,
}

impl Pipe {
    /// A pipe, and the end that is written.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Self::over(read)?, write))
    }

    /// The reading end of something that is there.
    pub(crate) fn over(fd: OwnedFd) -> io::Result<Self> {
        // Only this end: what a command finds at its standard output waits.
        rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)?;
        let fd = watched(fd)?;
        Ok(Self { fd, ended: false })
    }

    /// Whether nobody holds the other end any more, and everything was read.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The most it may hold now; its writer can have changed that.
    pub(crate) fn capacity(&self) -> usize {
        rustix::pipe::fcntl_getpipe_size(self.fd.get_ref()).unwrap_or(1 << 16)
    }

    /// Waits until there is something to read. May be dropped meanwhile.
    pub(crate) async fn readable(&self) {
        if self.ended {
            std::future::pending::<()>().await;
        }
        // An error is found by the read.
        let _ = self.fd.readable().await;
    }

    /// What is there, about `most` bytes; nothing if there is nothing now or never again.
    pub(crate) fn read(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(most);
        let read = self.fd.try_io(Interest::READABLE, |fd| {
            Ok(rustix::io::read(fd, spare_capacity(&mut bytes))?)
        });
        self.note_end(&read);
        bytes
    }

    /// The same, also of what came so lately that nobody was woken for it.
    pub(crate) fn read_now(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(most);
        let read = rustix::io::read(self.fd.get_ref(), spare_capacity(&mut bytes));
        self.note_end(&read.map_err(Into::into));
        bytes
    }

    fn note_end(&mut self, read: &io::Result<usize>) {
        self.ended |= match read {
            Ok(read) => *read == 0,
            Err(error) => !is_passing(error),
        };
    }

    /// Reads what nobody asks for any more, so that whoever still writes is neither held up nor ended by it.
    pub(crate) async fn discard(mut self) {
        while !self.ended {
            self.readable().await;
            self.read(4096);
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted)
}
