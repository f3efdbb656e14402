//! Memory shared with the runtime, for output that is too large for messages.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::actions::{SLOT_BYTES, SLOT_RING, SLOTS, StreamName};
use rustix::buffer::spare_capacity;

/// The slots of the shared memory, if the agent has any.
///
/// The runtime assigns them to calls.
#[derive(Debug, Clone)]
pub(crate) struct ShmPool(Option<Arc<Memory>>);

#[derive(Debug)]
struct Memory {
    file: OwnedFd,
    leased: Mutex<[bool; SLOTS as usize]>,
}

/// A slot in use by one call. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct ShmSlot {
    memory: Arc<Memory>,
    number: usize,
}

impl ShmPool {
    pub(crate) fn new(file: Option<OwnedFd>) -> Self {
        Self(file.map(|file| {
            Arc::new(Memory {
                file,
                leased: Mutex::default(),
            })
        }))
    }

    /// Takes a slot, unless the number is out of range or another call uses it.
    pub(crate) fn lease(&self, number: u32) -> Option<ShmSlot> {
        let memory = self.0.as_ref()?;
        let number = usize::try_from(number).ok()?;
        let mut leased = memory.leased.lock().unwrap_or_else(PoisonError::into_inner);
        let position = leased.get_mut(number)?;
        (!std::mem::replace(position, true)).then(|| ShmSlot {
            memory: Arc::clone(memory),
            number,
        })
    }

    /// Reads the first bytes of a slot.
    pub(crate) fn read(&self, number: u32, length: usize) -> io::Result<Vec<u8>> {
        let memory = self.0.as_ref().filter(|_| number < SLOTS);
        let memory = memory.ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let at = u64::from(number) * SLOT_BYTES + bytes.len() as u64;
            let read = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&memory.file, spare_capacity(&mut bytes), at)
            })?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        bytes.truncate(length);
        Ok(bytes)
    }

    /// The shared memory file, for a runtime that takes over.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.0.as_ref().map(|memory| &memory.file)
    }
}

impl ShmSlot {
    /// Bytes from this offset to the end of the ring.
    pub(crate) fn room(offset: u64) -> usize {
        usize::try_from(SLOT_RING - offset % SLOT_RING).unwrap_or(usize::MAX)
    }

    /// Writes a piece to a stream's ring. The piece must not wrap.
    pub(crate) fn write(&self, stream: StreamName, offset: u64, piece: &[u8]) -> io::Result<()> {
        let ring = match stream {
            StreamName::Stdout => 0,
            StreamName::Stderr => SLOT_RING,
        };
        self.write_at(ring + offset % SLOT_RING, piece)
    }

    /// Writes a piece at this position of the slot. It must fit there.
    pub(crate) fn write_at(&self, position: u64, piece: &[u8]) -> io::Result<()> {
        let mut at = self.number as u64 * SLOT_BYTES + position;
        let mut rest = piece;
        while !rest.is_empty() {
            let file = &self.memory.file;
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

impl Drop for ShmSlot {
    fn drop(&mut self) {
        let mut leased = self
            .memory
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
    fn an_offset_selects_the_position_in_the_ring() {
        let file = tempfile::tempfile().unwrap();
        let pool = ShmPool::new(Some(file.try_clone().unwrap().into()));
        let lease = pool.lease(1).unwrap();
        assert!(pool.lease(1).is_none(), "the slot is in use");
        assert!(pool.lease(SLOTS).is_none(), "the number is out of range");
        lease
            .write(StreamName::Stdout, 3 * SLOT_RING + 5, b"out")
            .unwrap();
        lease.write(StreamName::Stderr, 7, b"err").unwrap();
        let read = |at| {
            let mut bytes = [0; 3];
            file.read_exact_at(&mut bytes, SLOT_BYTES + at).unwrap();
            bytes
        };
        assert_eq!((&read(5), &read(SLOT_RING + 7)), (b"out", b"err"));
        assert_eq!(ShmSlot::room(SLOT_RING + 1), 1024 * 1024 - 1);
        drop(lease);
        assert!(pool.lease(1).is_some());
    }
}
