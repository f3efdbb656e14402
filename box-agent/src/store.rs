//! Room for output beyond memory: a file that was opened outside, of which parts are given out.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;

/// Parts of this size are asked for often, or a little larger: full blocks of logs.
pub(crate) const SEGMENT: usize = 64 << 10;

/// Parts are rows of these, so that a command that says little takes little.
const UNIT: usize = 4 << 10;

/// Units of one box that may be in use: the cap on what is spooled, 256 MiB.
const UNITS: usize = 65_536;

/// Where fewer are left, the output of those that have ended makes room.
const FEW: usize = UNITS / 16;

/// Free parts that keep their room in the file: giving it back and asking for it again costs more than writing.
const FILLED: usize = 4;

/// Full blocks of all logs together that may be in memory while they are read: 1 MiB, twice that with what
/// their buffers have spare, and as much for their runs at most.
const HELD: usize = 16;

/// The file, and what of it is in use.
#[derive(Debug)]
pub(crate) struct Store {
    file: OwnedFd,
    units: Mutex<Units>,
}

#[derive(Debug, Default)]
struct Units {
    /// A bit for each unit: whether it is in use. What is beyond the end is not.
    used: Vec<u64>,
    count: usize,
    /// All before it are in use.
    first_free: usize,
    /// Large parts given back as they were, for whoever wants as much next: a command that writes much goes round in them.
    filled: Vec<(usize, usize)>,
    held: usize,
}

/// A part of the file. Goes back when dropped.
#[derive(Debug)]
pub(crate) struct Segment {
    store: Arc<Store>,
    first: usize,
    units: usize,
}

/// Leave to have a block in memory although it is full. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Held(Arc<Store>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.units().held -= 1;
    }
}

impl Units {
    fn is_used(&self, unit: usize) -> bool {
        let word = self.used.get(unit / 64).copied().unwrap_or(0);
        word >> (unit % 64) & 1 == 1
    }

    /// The first of so many free ones in a row.
    fn find(&self, units: usize) -> Option<usize> {
        let mut begin = self.first_free;
        let mut at = begin;
        while at < UNITS {
            if self.is_used(at) {
                let full = at.is_multiple_of(64) && self.used.get(at / 64) == Some(&u64::MAX);
                at += if full { 64 } else { 1 };
                begin = at;
                continue;
            }
            at += 1;
            if at - begin == units {
                return Some(begin);
            }
        }
        None
    }

    fn take(&mut self, first: usize, units: usize) {
        self.used
            .resize(self.used.len().max((first + units).div_ceil(64)), 0);
        for unit in first..first + units {
            self.used[unit / 64] |= 1 << (unit % 64);
        }
        self.count += units;
        if first == self.first_free {
            self.first_free += units;
        }
    }

    fn give_back(&mut self, first: usize, units: usize) {
        for unit in first..first + units {
            self.used[unit / 64] &= !(1 << (unit % 64));
        }
        self.count -= units;
        self.first_free = self.first_free.min(first);
    }
}

impl Store {
    pub(crate) fn new(file: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            file,
            units: Mutex::default(),
        })
    }

    fn units(&self) -> MutexGuard<'_, Units> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is little room left.
    pub(crate) fn is_low(&self) -> bool {
        self.units().count > UNITS - FEW
    }

    /// Leave to have one more block in memory, unless there are enough.
    pub(crate) fn hold(self: &Arc<Self>) -> Option<Held> {
        let mut units = self.units();
        if units.held == HELD {
            return None;
        }
        units.held += 1;
        Some(Held(Arc::clone(self)))
    }

    /// Room for so many bytes, if there is any.
    pub(crate) fn segment(self: &Arc<Self>, bytes: usize) -> Option<Segment> {
        let count = bytes.div_ceil(UNIT).max(1);
        let mut units = self.units();
        let as_large = |(_, units): &(usize, usize)| *units == count;
        let again = units.filled.iter().rposition(as_large);
        let first = if let Some(again) = again {
            units.filled.swap_remove(again).0
        } else {
            let first = units.find(count)?;
            units.take(first, count);
            first
        };
        Some(Segment {
            store: Arc::clone(self),
            first,
            units: count,
        })
    }
}

impl Segment {
    fn at(&self, offset: usize) -> u64 {
        (self.first * UNIT + offset) as u64
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
        let mut free = self.store.units();
        let (mut first, mut units) = (self.first, self.units);
        if units * UNIT >= SEGMENT {
            free.filled.push((first, units));
            if free.filled.len() <= FILLED {
                return;
            }
            (first, units) = free.filled.remove(0);
        }
        // Room for others; where the file system cannot do that, the next one to use it overwrites it.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (begin, length) = ((first * UNIT) as u64, (units * UNIT) as u64);
        let _ = rustix::fs::fallocate(&self.store.file, hole, begin, length);
        free.give_back(first, units);
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
        let more: Vec<_> = (0..FILLED)
            .map(|_| store.segment(SEGMENT).unwrap())
            .collect();
        let (one, two) = (
            store.segment(SEGMENT).unwrap(),
            store.segment(SEGMENT).unwrap(),
        );
        one.write(10, b"one").unwrap();
        more[0].write(0, &vec![7; SEGMENT]).unwrap();
        assert_eq!(one.read(10, 3).unwrap(), b"one");
        let blocks = file.metadata().unwrap().blocks();
        drop(more);
        drop(two);
        assert!(
            file.metadata().unwrap().blocks() < blocks,
            "the room is given back"
        );
        // Those that were given back last come first.
        let again: Vec<_> = (0..=FILLED)
            .map(|_| store.segment(SEGMENT).unwrap())
            .collect();
        assert_eq!(again[FILLED].read(0, 1).unwrap(), [0]);
        assert_eq!(one.read(10, 3).unwrap(), b"one");
    }

    #[test]
    fn there_is_an_end_to_it() {
        let store = Store::new(tempfile::tempfile().unwrap().into());
        let all: Vec<_> = std::iter::from_fn(|| store.segment(SEGMENT)).collect();
        assert_eq!(all.len() * SEGMENT, UNITS * UNIT);
        assert!(store.is_low() && store.segment(1).is_none());
        drop(all);
        assert!(!store.is_low());
        assert!(store.segment(SEGMENT).is_some());
    }

    #[test]
    fn little_takes_little_and_what_is_given_back_is_used_again() {
        let store = Store::new(tempfile::tempfile().unwrap().into());
        let mut all: Vec<_> = std::iter::from_fn(|| store.segment(1)).collect();
        assert_eq!(all.len(), UNITS);
        let mut firsts: Vec<_> = all.iter().map(|segment| segment.first).collect();
        firsts.dedup();
        assert_eq!(firsts.len(), UNITS, "none is given out twice");
        // Every second one makes no room for two in a row.
        let mut number = 0;
        all.retain(|_| {
            number += 1;
            number % 2 == 0
        });
        assert!(store.segment(UNIT + 1).is_none());
        let again = store.segment(UNIT).unwrap();
        all.remove(0);
        drop(again);
        assert_eq!(store.segment(3 * UNIT).unwrap().first, 0);
    }
}
