//! Memory shared with an agent, for what is too much for messages: this end says which call uses which part.
//!
//! Half of the slots are for what the agent tells and half for what it is told. A slot that was filled here is never one that
//! the agent may still be writing to, for a call that was dropped a moment ago and that it has not heard the end of.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{SPOOL_BYTES, SPOOL_RING, SPOOL_SLOTS, StreamName};

/// The slots that an agent was handed. What is in them is as trustworthy as what the agent says.
#[derive(Debug, Clone)]
pub struct ShmPool(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    file: File,
    /// The agent writes, this end reads. Two calls that use the same one do no harm: the agent knows who had it first.
    to_read: Mutex<Vec<u32>>,
    /// This end writes, the agent reads.
    to_fill: Mutex<Vec<u32>>,
}

/// The first slot that is filled at this end.
const FIRST_TO_FILL: u32 = SPOOL_SLOTS / 2;

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

/// A slot for one call. Goes back when dropped.
#[derive(Debug)]
pub(crate) struct ShmSlot {
    slots: Arc<Slots>,
    number: u32,
}

impl ShmPool {
    /// The slots in this file, which must have their full length and keep it: `SPOOL_SLOTS` times `SPOOL_BYTES`.
    pub fn new(file: File) -> Self {
        Self(Arc::new(Slots {
            file,
            // The first is used most, so that few ever take memory.
            to_read: Mutex::new((0..FIRST_TO_FILL).rev().collect()),
            to_fill: Mutex::new((FIRST_TO_FILL..SPOOL_SLOTS).rev().collect()),
        }))
    }

    /// A slot for what the agent tells, if there is one that no call uses.
    pub(crate) fn to_read(&self) -> Option<ShmSlot> {
        self.take(0)
    }

    /// A slot for what the agent is told, if there is one that no call uses.
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

impl Drop for ShmSlot {
    fn drop(&mut self) {
        self.slots.free(self.number).push(self.number);
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
        let spool = ShmPool::new(file);
        let first = spool.to_read().unwrap();
        let slot = spool.to_read().unwrap();
        assert_eq!((first.number(), slot.number()), (0, 1));
        let read = |stream, offset, bytes| slot.read(stream, offset, bytes).ok();
        assert_eq!(read(StreamName::Stdout, SPOOL_RING + 5, 3).unwrap(), b"out");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 3).unwrap(), b"err");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 4), None);
        assert_eq!(read(StreamName::Stdout, 0, u64::MAX), None);
    }

    #[test]
    fn a_slot_has_one_user() {
        let spool = ShmPool::new(tempfile::tempfile().unwrap());
        let mut read: Vec<_> = std::iter::from_fn(|| spool.to_read()).collect();
        let mut filled: Vec<_> = std::iter::from_fn(|| spool.to_fill()).collect();
        assert_eq!(read.len() + filled.len(), SPOOL_SLOTS as usize);
        let (one, other) = (read.pop().unwrap().number(), filled.pop().unwrap().number());
        assert_eq!(spool.to_read().unwrap().number(), one);
        assert_eq!(spool.to_fill().unwrap().number(), other);
    }
}
