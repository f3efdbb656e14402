//! Memory shared with an agent, for output that is too much for messages: this end reads, and says which call uses which part.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::actions::{SPOOL_BYTES, SPOOL_RING, SPOOL_SLOTS, StreamName};

/// The slots that an agent was handed. What is in them is as trustworthy as what the agent says.
#[derive(Debug, Clone)]
pub struct Spool(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    file: File,
    free: Mutex<Vec<u32>>,
}

/// A slot for one call. Goes back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Arc<Slots>,
    number: u32,
}

impl Spool {
    /// The slots in this file, which must have their full length and keep it: `SPOOL_SLOTS` times `SPOOL_BYTES`.
    pub fn new(file: File) -> Self {
        Self(Arc::new(Slots {
            file,
            // The first is used most, so that few are ever filled.
            free: Mutex::new((0..SPOOL_SLOTS).rev().collect()),
        }))
    }

    /// A slot that no call uses, if there is one.
    pub(crate) fn slot(&self) -> Option<Slot> {
        let mut free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Slot {
            number: free.pop()?,
            slots: Arc::clone(&self.0),
        })
    }
}

impl Slot {
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Reads a piece of a stream. One that goes over the end of its ring is refused, as no agent means that.
    pub(crate) fn read(&self, stream: StreamName, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let at = offset % SPOOL_RING;
        if bytes > SPOOL_RING - at {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ring = match stream {
            StreamName::Stdout => 0,
            StreamName::Stderr => SPOOL_RING,
        };
        self.read_at(ring + at, bytes)
    }

    /// Reads from a place of the slot, which must have so much there.
    pub(crate) fn read_at(&self, place: u64, bytes: u64) -> io::Result<Vec<u8>> {
        if place.saturating_add(bytes) > SPOOL_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut piece = vec![0; length];
        let at = u64::from(self.number) * SPOOL_BYTES + place;
        self.slots.file.read_exact_at(&mut piece, at)?;
        Ok(piece)
    }

    /// Writes to the begin of the slot, which must have room for it.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() as u64 > SPOOL_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = u64::from(self.number) * SPOOL_BYTES;
        self.slots.file.write_all_at(bytes, at)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut free = self
            .slots
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_where_they_are_and_never_over_the_end() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(SPOOL_SLOTS) * SPOOL_BYTES).unwrap();
        file.write_all_at(b"out", SPOOL_BYTES + 5).unwrap();
        file.write_all_at(b"err", 2 * SPOOL_BYTES - 3).unwrap();
        let spool = Spool::new(file);
        let first = spool.slot().unwrap();
        let slot = spool.slot().unwrap();
        assert_eq!((first.number(), slot.number()), (0, 1));
        let read = |stream, offset, bytes| slot.read(stream, offset, bytes).ok();
        assert_eq!(read(StreamName::Stdout, SPOOL_RING + 5, 3).unwrap(), b"out");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 3).unwrap(), b"err");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 4), None);
        assert_eq!(read(StreamName::Stdout, 0, u64::MAX), None);
    }

    #[test]
    fn a_slot_has_one_user() {
        let spool = Spool::new(tempfile::tempfile().unwrap());
        let mut all: Vec<_> = std::iter::from_fn(|| spool.slot()).collect();
        assert_eq!(all.len(), SPOOL_SLOTS as usize);
        let number = all.pop().unwrap().number();
        assert_eq!(spool.slot().unwrap().number(), number);
    }
}
