//! Memory shared with the runtime, for output that is too much for messages.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::actions::{SPOOL_BYTES, SPOOL_RING, SPOOL_SLOTS, StreamName};
use rustix::buffer::spare_capacity;

/// The slots, if there are any. Which call uses which is for the runtime to say.
#[derive(Debug, Clone)]
pub(crate) struct Slots(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    file: OwnedFd,
    leased: Mutex<[bool; SPOOL_SLOTS as usize]>,
}

/// The use of a slot by one call; ends when dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    number: usize,
}

impl Slots {
    pub(crate) fn new(file: Option<OwnedFd>) -> Self {
        Self(file.map(|file| {
            Arc::new(Shared {
                file,
                leased: Mutex::default(),
            })
        }))
    }

    /// A slot, unless there is none of this number or another call uses it.
    pub(crate) fn lease(&self, number: u32) -> Option<Lease> {
        let shared = self.0.as_ref()?;
        let number = usize::try_from(number).ok()?;
        let mut leased = shared.leased.lock().unwrap_or_else(PoisonError::into_inner);
        let place = leased.get_mut(number)?;
        (!std::mem::replace(place, true)).then(|| Lease {
            shared: Arc::clone(shared),
            number,
        })
    }

    /// What is at the begin of a slot.
    pub(crate) fn read(&self, number: u32, length: usize) -> io::Result<Vec<u8>> {
        let shared = self.0.as_ref().filter(|_| number < SPOOL_SLOTS);
        let shared = shared.ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let at = u64::from(number) * SPOOL_BYTES + bytes.len() as u64;
            let read = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&shared.file, spare_capacity(&mut bytes), at)
            })?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        bytes.truncate(length);
        Ok(bytes)
    }

    /// The memory, for a runtime that takes over.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.0.as_ref().map(|shared| &shared.file)
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
        self.write_at(ring + offset % SPOOL_RING, piece)
    }

    /// Writes a piece at this place of the slot, which must have room for it there.
    pub(crate) fn write_at(&self, place: u64, piece: &[u8]) -> io::Result<()> {
        let mut at = self.number as u64 * SPOOL_BYTES + place;
        let mut rest = piece;
        while !rest.is_empty() {
            let file = &self.shared.file;
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, rest, at))?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += written as u64;
            rest = &rest[written..];
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut leased = self
            .shared
            .leased
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        leased[self.number] = false;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_byte_is_where_its_offset_says() {
        let file = tempfile::tempfile().unwrap();
        let slots = Slots::new(Some(file.try_clone().unwrap().into()));
        let lease = slots.lease(1).unwrap();
        assert!(slots.lease(1).is_none(), "one call at a time");
        assert!(slots.lease(SPOOL_SLOTS).is_none(), "there are no more");
        lease
            .write(StreamName::Stdout, 3 * SPOOL_RING + 5, b"out")
            .unwrap();
        lease.write(StreamName::Stderr, 7, b"err").unwrap();
        let read = |at| {
            let mut bytes = [0; 3];
            file.read_exact_at(&mut bytes, SPOOL_BYTES + at).unwrap();
            bytes
        };
        assert_eq!((&read(5), &read(SPOOL_RING + 7)), (b"out", b"err"));
        assert_eq!(Lease::room(SPOOL_RING + 1), 1024 * 1024 - 1);
        drop(lease);
        assert!(slots.lease(1).is_some());
    }
}
