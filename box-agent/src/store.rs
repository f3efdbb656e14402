//! Room for output beyond memory: a file that was opened outside, cut into segments of one size.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FallocateFlags;

/// Bytes of a segment.
pub(crate) const SEGMENT: usize = 64 << 10;

/// Segments of one box that may be in use: the cap on what is spooled.
const SEGMENTS: u32 = 4096;

/// Free segments that keep their room in the file: giving it back and asking for it again costs more than writing.
const FILLED: usize = 4;

/// The file, and what of it is free.
#[derive(Debug)]
pub(crate) struct Store {
    file: OwnedFd,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Used before and given back as they were, for whoever comes next: a command that writes much goes round in them.
    filled: Vec<u32>,
    /// Used before, and given back empty.
    back: Vec<u32>,
    /// The first that was never used.
    next: u32,
}

/// A part of the file. Goes back when dropped.
#[derive(Debug)]
pub(crate) struct Segment {
    store: Arc<Store>,
    number: u32,
}

impl Store {
    pub(crate) fn new(file: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            file,
            free: Mutex::default(),
        })
    }

    /// A segment, unless all are in use.
    pub(crate) fn segment(self: &Arc<Self>) -> Option<Segment> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let again = free.filled.pop().or_else(|| free.back.pop());
        let number = again.or_else(|| {
            let number = free.next;
            (number < SEGMENTS).then(|| free.next += 1)?;
            Some(number)
        })?;
        Some(Segment {
            store: Arc::clone(self),
            number,
        })
    }
}

impl Segment {
    fn at(&self, offset: usize) -> u64 {
        u64::from(self.number) * SEGMENT as u64 + offset as u64
    }

    /// Writes at an offset; nothing beyond the segment's end is asked for.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = self.at(offset + done);
            let written = rustix::io::retry_on_intr(|| {
                rustix::io::pwrite(&self.store.file, &bytes[done..], at)
            })?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done += written;
        }
        Ok(())
    }

    /// Reads what was written.
    pub(crate) fn read(&self, offset: usize, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut done = 0;
        while done < length {
            let at = self.at(offset + done);
            let read = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&self.store.file, &mut bytes[done..], at)
            })?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            done += read;
        }
        Ok(bytes)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let free = || {
            let free = self.store.free.lock();
            free.unwrap_or_else(PoisonError::into_inner)
        };
        let mut kept = free();
        if kept.filled.len() < FILLED {
            return kept.filled.push(self.number);
        }
        drop(kept);
        // Room for others; where the file system cannot do that, the next one to use the segment overwrites it.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.store.file, hole, self.at(0), SEGMENT as u64);
        free().back.push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn segments_keep_apart_and_come_back_empty() {
        let file = tempfile::tempfile().unwrap();
        let store = Store::new(file.try_clone().unwrap().into());
        let more: Vec<_> = (0..FILLED).map(|_| store.segment().unwrap()).collect();
        let (one, two) = (store.segment().unwrap(), store.segment().unwrap());
        one.write(10, b"one").unwrap();
        two.write(0, &vec![7; SEGMENT]).unwrap();
        assert_eq!(one.read(10, 3).unwrap(), b"one");
        let blocks = file.metadata().unwrap().blocks();
        drop(more);
        drop(two);
        assert!(
            file.metadata().unwrap().blocks() < blocks,
            "the room is given back"
        );
        let again: Vec<_> = (0..=FILLED).map(|_| store.segment().unwrap()).collect();
        assert_eq!(again[FILLED].read(0, 1).unwrap(), [0]);
        assert_eq!(one.read(10, 3).unwrap(), b"one");
    }

    #[test]
    fn there_is_an_end_to_it() {
        let store = Store::new(tempfile::tempfile().unwrap().into());
        let all: Vec<_> = std::iter::from_fn(|| store.segment()).collect();
        assert_eq!(all.len(), SEGMENTS as usize);
        drop(all);
        assert!(store.segment().is_some());
    }
}
