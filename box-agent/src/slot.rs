//! Memory shared with the runtime, for output that is too much for messages.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use box_protocol::actions::{SPOOL_RING, StreamName};

/// A slot, shared by the agent and the command that uses it.
#[derive(Debug)]
pub(crate) struct Slot(Arc<OwnedFd>);

/// The use of a slot by one command; ends when dropped.
#[derive(Debug)]
pub(crate) struct Lease(Arc<OwnedFd>);

impl Slot {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }

    /// The slot, unless another command uses it.
    pub(crate) fn lease(&self) -> Option<Lease> {
        let free = Arc::strong_count(&self.0) == 1;
        free.then(|| Lease(Arc::clone(&self.0)))
    }
}

impl Lease {
    /// Bytes from this offset on that fit before the end of the ring.
    pub(crate) fn room(offset: u64) -> usize {
        usize::try_from(SPOOL_RING - offset % SPOOL_RING).unwrap_or(usize::MAX)
    }

    /// Writes a piece that does not go over the end of the ring.
    pub(crate) fn write(&self, stream: StreamName, offset: u64, piece: &[u8]) -> io::Result<()> {
        let ring = match stream {
            StreamName::Stdout => 0,
            StreamName::Stderr => SPOOL_RING,
        };
        let mut at = ring + offset % SPOOL_RING;
        let mut rest = piece;
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&*self.0, rest, at))?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += written as u64;
            rest = &rest[written..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_byte_is_where_its_offset_says() {
        let file = tempfile::tempfile().unwrap();
        let slot = Slot::new(file.try_clone().unwrap().into());
        let lease = slot.lease().unwrap();
        assert!(slot.lease().is_none(), "one command at a time");
        lease
            .write(StreamName::Stdout, 3 * SPOOL_RING + 5, b"out")
            .unwrap();
        lease.write(StreamName::Stderr, 7, b"err").unwrap();
        let read = |at| {
            let mut bytes = [0; 3];
            file.read_exact_at(&mut bytes, at).unwrap();
            bytes
        };
        assert_eq!((&read(5), &read(SPOOL_RING + 7)), (b"out", b"err"));
        assert_eq!(Lease::room(SPOOL_RING + 1), 1024 * 1024 - 1);
        drop(lease);
        assert!(slot.lease().is_some());
    }
}
