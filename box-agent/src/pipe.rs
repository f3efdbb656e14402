//! The agent's end of a pipe that a command writes to.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// Registers a descriptor with the event loop.
#[expect(
    deprecated,
    reason = "sound for an OwnedFd, which never changes; the replacement is `unsafe` for other types"
)]
pub(crate) fn async_fd(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// The reading end of a pipe or terminal.
#[derive(Debug)]
pub(crate) struct Pipe {
    fd: AsyncFd<OwnedFd>,
    ended: bool,
}

/// A pipe that the guest may reopen by name, for example as `/dev/stdout`.
///
/// Without the mode only the agent's user could open it.
pub(crate) fn for_guest() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fchmod(&write, Mode::from(0o666))?;
    Ok((read, write))
}

impl Pipe {
    /// Creates a pipe and returns it with its writing end.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = for_guest()?;
        Ok((Self::from_fd(read)?, write))
    }

    /// Wraps an existing descriptor for reading.
    pub(crate) fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        // Only this end is non-blocking. The command's end keeps blocking.
        rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)?;
        let fd = async_fd(fd)?;
        Ok(Self { fd, ended: false })
    }

    /// Whether all writers have closed the pipe and all data was read.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The current capacity of the pipe. Its writer can change it.
    pub(crate) fn capacity(&self) -> usize {
        rustix::pipe::fcntl_getpipe_size(self.fd.get_ref()).unwrap_or(1 << 16)
    }

    /// Waits until the pipe is readable. Cancel safe.
    pub(crate) async fn readable(&self) {
        if self.ended {
            std::future::pending::<()>().await;
        }
        // The next read reports an error.
        let _ = self.fd.readable().await;
    }

    /// Reads up to `max` bytes; empty if no data is available or the pipe has ended.
    pub(crate) fn read(&mut self, max: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(max);
        let read = self.fd.try_io(Interest::READABLE, |fd| {
            Ok(rustix::io::read(fd, spare_capacity(&mut bytes))?)
        });
        self.note_end(&read);
        bytes
    }

    /// As `read`, but also finds data that the event loop has not reported yet.
    pub(crate) fn read_unpolled(&mut self, max: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(max);
        let read = rustix::io::read(self.fd.get_ref(), spare_capacity(&mut bytes));
        self.note_end(&read.map_err(Into::into));
        bytes
    }

    fn note_end(&mut self, read: &io::Result<usize>) {
        self.ended |= match read {
            Ok(read) => *read == 0,
            Err(error) => !is_transient(error),
        };
    }

    /// Reads and discards everything until the end.
    async fn discard(mut self) {
        while !self.ended {
            self.readable().await;
            self.read(4096);
        }
    }
}

/// Pipes of ended commands that other processes still hold open.
///
/// The agent keeps reading them, so that a writer neither blocks nor gets SIGPIPE.
#[derive(Debug, Default)]
pub(crate) struct OrphanedPipes(Mutex<VecDeque<AbortHandle>>);

/// Maximum number of such pipes.
///
/// Each one costs the agent a descriptor, and a guest can hold one per command.
const ORPHANED_MAX: usize = 128;

impl OrphanedPipes {
    /// Drains one more pipe to its end. Beyond the limit the oldest is closed.
    pub(crate) fn drain(&self, pipe: Pipe) {
        let reading = tokio::spawn(pipe.discard()).abort_handle();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|reading| !reading.is_finished());
        all.push_back(reading);
        if all.len() > ORPHANED_MAX
            && let Some(oldest) = all.pop_front()
        {
            oldest.abort();
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_orphaned_pipes_are_closed() {
        let orphaned_pipes = OrphanedPipes::default();
        let mut held = Vec::new();
        for _ in 0..ORPHANED_MAX + 3 {
            let (pipe, writer) = Pipe::new().unwrap();
            orphaned_pipes.drain(pipe);
            held.push(writer);
        }
        // A pipe that ended by itself frees its place.
        drop(held.pop());
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let (pipe, writer) = Pipe::new().unwrap();
        orphaned_pipes.drain(pipe);
        held.push(writer);
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let open = |writer: &OwnedFd| rustix::io::write(writer, b"x").is_ok();
        let closed = held.iter().take_while(|writer| !open(writer)).count();
        assert_eq!(closed, 3);
        assert!(held[closed..].iter().all(open));
    }
}
