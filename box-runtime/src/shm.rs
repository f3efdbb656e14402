//! Memory shared with an agent, for data that is too large for messages.
//!
//! The runtime assigns the slots of this memory to calls. The agent writes to the first half of the
//! slots, and the runtime writes to the second half. A cancelled call may leave the agent writing
//! to its slot for a moment, so the runtime never writes to a slot of the first half.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{SLOT_BYTES, SLOT_RING, SLOTS, StreamName};

/// The slots shared with one agent. Their content is as untrusted as its messages.
#[derive(Debug, Clone)]
pub struct ShmPool(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    file: File,
    /// Free slots that the agent writes and the runtime reads.
    ///
    /// Two calls may use the same slot, because the agent knows which call came first.
    to_read: Mutex<Vec<u32>>,
    /// Free slots that the runtime writes and the agent reads.
    to_fill: Mutex<Vec<u32>>,
}

/// The first slot that the runtime writes.
const FIRST_TO_FILL: u32 = SLOTS / 2;

impl Slots {
    fn free(&self, number: u32) -> MutexGuard<'_, Vec<u32>> {
        let free = if number < FIRST_TO_FILL {
            &self.to_read
        } else {
            &self.to_fill
        };
        free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot assigned to one call. Dropping it returns the slot to the pool.
#[derive(Debug)]
pub(crate) struct ShmSlot {
    slots: Arc<Slots>,
    number: u32,
}

impl ShmPool {
    /// Creates the pool in a file of `SLOTS` times `SLOT_BYTES` bytes.
    ///
    /// The file must keep this length.
    pub fn new(file: File) -> Self {
        Self(Arc::new(Slots {
            file,
            // The pool prefers the lowest slot, so that few slots ever use memory.
            to_read: Mutex::new((0..FIRST_TO_FILL).rev().collect()),
            to_fill: Mutex::new((FIRST_TO_FILL..SLOTS).rev().collect()),
        }))
    }

    /// Takes a free slot for data from the agent.
    pub(crate) fn to_read(&self) -> Option<ShmSlot> {
        self.take(0)
    }

    /// Takes a free slot for data to the agent.
    pub(crate) fn to_fill(&self) -> Option<ShmSlot> {
        self.take(FIRST_TO_FILL)
    }

    fn take(&self, like: u32) -> Option<ShmSlot> {
        Some(ShmSlot {
            number: self.0.free(like).pop()?,
            slots: Arc::clone(&self.0),
        })
    }
}

impl ShmSlot {
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Reads a part of a stream from its ring buffer.
    ///
    /// A part that crosses the end of the ring is an error, because a correct agent never sends
    /// one.
    pub(crate) fn read(&self, stream: StreamName, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let at = offset % SLOT_RING;
        if bytes > SLOT_RING - at {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ring = match stream {
            StreamName::Stdout => 0,
            StreamName::Stderr => SLOT_RING,
        };
        self.read_at(ring + at, bytes)
    }

    /// Reads from an offset of the slot. The range must be within the slot.
    pub(crate) fn read_at(&self, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        if offset.saturating_add(bytes) > SLOT_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut piece = vec![0; length];
        let at = u64::from(self.number) * SLOT_BYTES + offset;
        self.slots.file.read_exact_at(&mut piece, at)?;
        Ok(piece)
    }

    /// Writes to the start of the slot. The data must fit into the slot.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() as u64 > SLOT_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = u64::from(self.number) * SLOT_BYTES;
        self.slots.file.write_all_at(bytes, at)
    }
}

impl Drop for ShmSlot {
    fn drop(&mut self) {
        self.slots.free(self.number).push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_at_their_offset_within_the_ring() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(SLOTS) * SLOT_BYTES).unwrap();
        file.write_all_at(b"out", SLOT_BYTES + 5).unwrap();
        file.write_all_at(b"err", 2 * SLOT_BYTES - 3).unwrap();
        let pool = ShmPool::new(file);
        let first = pool.to_read().unwrap();
        let slot = pool.to_read().unwrap();
        assert_eq!((first.number(), slot.number()), (0, 1));
        let read = |stream, offset, bytes| slot.read(stream, offset, bytes).ok();
        assert_eq!(read(StreamName::Stdout, SLOT_RING + 5, 3).unwrap(), b"out");
        assert_eq!(read(StreamName::Stderr, SLOT_RING - 3, 3).unwrap(), b"err");
        assert_eq!(read(StreamName::Stderr, SLOT_RING - 3, 4), None);
        assert_eq!(read(StreamName::Stdout, 0, u64::MAX), None);
    }

    #[test]
    fn a_slot_has_one_user() {
        let pool = ShmPool::new(tempfile::tempfile().unwrap());
        let mut read: Vec<_> = std::iter::from_fn(|| pool.to_read()).collect();
        let mut filled: Vec<_> = std::iter::from_fn(|| pool.to_fill()).collect();
        assert_eq!(read.len() + filled.len(), SLOTS as usize);
        let (one, other) = (read.pop().unwrap().number(), filled.pop().unwrap().number());
        assert_eq!(pool.to_read().unwrap().number(), one);
        assert_eq!(pool.to_fill().unwrap().number(), other);
    }
}
