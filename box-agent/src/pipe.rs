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

/// A pipe whose ends the guest may open once more by their names, as `/dev/stdout` is one. It would be the agent's alone.
pub(crate) fn for_guest() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fchmod(&write, Mode::from(0o666))?;
    Ok((read, write))
}

impl Pipe {
    /// A pipe, and the end that is written.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = for_guest()?;
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

    /// Reads what nobody asks for any more.
    async fn discard(mut self) {
        while !self.ended {
            self.readable().await;
            self.read(4096);
        }
    }
}

/// Pipes of commands that have ended, which somebody still holds: read on, so that whoever writes is neither held up nor ended by
/// it.
#[derive(Debug, Default)]
pub(crate) struct Leftovers(Mutex<VecDeque<AbortHandle>>);

/// So many at most: each is a descriptor of the agent's, and a guest can hold as many as there were commands.
const LEFTOVERS: usize = 128;

impl Leftovers {
    /// Reads one more to its end. Beyond what there may be, the oldest is closed.
    pub(crate) fn read_on(&self, pipe: Pipe) {
        let reading = tokio::spawn(pipe.discard()).abort_handle();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|reading| !reading.is_finished());
        all.push_back(reading);
        if all.len() > LEFTOVERS
            && let Some(oldest) = all.pop_front()
        {
            oldest.abort();
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_pipes_that_are_held_the_oldest_are_closed() {
        let leftovers = Leftovers::default();
        let mut held = Vec::new();
        for _ in 0..LEFTOVERS + 3 {
            let (pipe, writer) = Pipe::new().unwrap();
            leftovers.read_on(pipe);
            held.push(writer);
        }
        // One that ended by itself leaves its place.
        drop(held.pop());
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let (pipe, writer) = Pipe::new().unwrap();
        leftovers.read_on(pipe);
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
