//! The file that holds the output of all commands beyond memory.
//!
//! The runtime opens it outside the box. The agent divides it into segments.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;

/// The usual size of a segment, or a little more: one full block of a log.
pub(crate) const SEGMENT: usize = 64 << 10;

/// The unit of allocation.
///
/// It is small so that a command with little output takes little room.
const UNIT: usize = 4 << 10;

/// Maximum number of allocated units of one box: 256 MiB.
const UNITS: usize = 65_536;

/// Below this number of free units, the output of ended commands is dropped.
const LOW_UNITS: usize = UNITS / 16;

/// Freed segments that keep their disk blocks.
///
/// Punching and refilling a hole costs more than a write.
const CACHED_SEGMENTS: usize = 4;

/// Full blocks of all logs that may stay in memory while they are read.
///
/// They take 1 MiB: at most twice that with spare capacity, and as much again for their spans.
const MEMORY_BLOCKS_MAX: usize = 16;

/// The file and the map of its allocated units.
#[derive(Debug)]
pub(crate) struct LogFile {
    file: OwnedFd,
    units: Mutex<Units>,
}

#[derive(Debug, Default)]
struct Units {
    /// One bit per unit, set if the unit is allocated. Units beyond the end are free.
    used: Vec<u64>,
    count: usize,
    /// All units before this one are allocated.
    first_free: usize,
    /// Freed segments that keep their disk blocks, as (first unit, units).
    ///
    /// A command with much output cycles through them.
    cached: Vec<(usize, usize)>,
    permits: usize,
}

/// A part of the file. Dropping it frees the part.
#[derive(Debug)]
pub(crate) struct Segment {
    log_file: Arc<LogFile>,
    first: usize,
    units: usize,
}

/// Permission for one full block to stay in memory.
///
/// Dropping it ends the permission.
#[derive(Debug)]
pub(crate) struct MemoryPermit(Arc<LogFile>);

impl Drop for MemoryPermit {
    fn drop(&mut self) {
        self.0.units().permits -= 1;
    }
}

impl Units {
    fn is_used(&self, unit: usize) -> bool {
        let word = self.used.get(unit / 64).copied().unwrap_or(0);
        word >> (unit % 64) & 1 == 1
    }

    /// The first unit of a free range of this length.
    fn find(&self, units: usize) -> Option<usize> {
        let mut start = self.first_free;
        let mut at = start;
        while at < UNITS {
            if self.is_used(at) {
                let full = at.is_multiple_of(64) && self.used.get(at / 64) == Some(&u64::MAX);
                at += if full { 64 } else { 1 };
                start = at;
                continue;
            }
            at += 1;
            if at - start == units {
                return Some(start);
            }
        }
        None
    }

    fn allocate(&mut self, first: usize, units: usize) {
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

    fn free(&mut self, first: usize, units: usize) {
        for unit in first..first + units {
            self.used[unit / 64] &= !(1 << (unit % 64));
        }
        self.count -= units;
        self.first_free = self.first_free.min(first);
    }
}

impl LogFile {
    pub(crate) fn new(file: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            file,
            units: Mutex::default(),
        })
    }

    fn units(&self) -> MutexGuard<'_, Units> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether few units are free.
    pub(crate) fn is_low(&self) -> bool {
        self.units().count > UNITS - LOW_UNITS
    }

    /// Permission for one more block in memory, unless the limit is reached.
    pub(crate) fn memory_permit(self: &Arc<Self>) -> Option<MemoryPermit> {
        let mut units = self.units();
        if units.permits == MEMORY_BLOCKS_MAX {
            return None;
        }
        units.permits += 1;
        Some(MemoryPermit(Arc::clone(self)))
    }

    /// Allocates a segment of at least this many bytes, if the file has room.
    pub(crate) fn segment(self: &Arc<Self>, bytes: usize) -> Option<Segment> {
        let count = bytes.div_ceil(UNIT).max(1);
        let mut units = self.units();
        let same_size = |(_, units): &(usize, usize)| *units == count;
        let reused = units.cached.iter().rposition(same_size);
        let first = if let Some(reused) = reused {
            units.cached.swap_remove(reused).0
        } else {
            let first = units.find(count)?;
            units.allocate(first, count);
            first
        };
        Some(Segment {
            log_file: Arc::clone(self),
            first,
            units: count,
        })
    }
}

impl Segment {
    fn at(&self, offset: usize) -> u64 {
        (self.first * UNIT + offset) as u64
    }

    /// Writes at an offset. The caller stays within the segment.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = self.at(offset + done);
            let written = rustix::io::retry_on_intr(|| {
                rustix::io::pwrite(&self.log_file.file, &bytes[done..], at)
            })?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done += written;
        }
        Ok(())
    }

    /// Reads bytes that were written before.
    pub(crate) fn read(&self, offset: usize, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut done = 0;
        while done < length {
            let at = self.at(offset + done);
            let read = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&self.log_file.file, &mut bytes[done..], at)
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
        let mut map = self.log_file.units();
        let (mut first, mut units) = (self.first, self.units);
        if units * UNIT >= SEGMENT {
            map.cached.push((first, units));
            if map.cached.len() <= CACHED_SEGMENTS {
                return;
            }
            (first, units) = map.cached.remove(0);
        }
        // Frees the disk blocks. If the file system cannot punch holes, the next segment overwrites them.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, length) = ((first * UNIT) as u64, (units * UNIT) as u64);
        let _ = rustix::fs::fallocate(&self.log_file.file, hole, start, length);
        map.free(first, units);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn segments_do_not_overlap_and_freed_ones_are_empty() {
        let file = tempfile::tempfile().unwrap();
        let log_file = LogFile::new(file.try_clone().unwrap().into());
        let more: Vec<_> = (0..CACHED_SEGMENTS)
            .map(|_| log_file.segment(SEGMENT).unwrap())
            .collect();
        let (one, two) = (
            log_file.segment(SEGMENT).unwrap(),
            log_file.segment(SEGMENT).unwrap(),
        );
        one.write(10, b"one").unwrap();
        more[0].write(0, &vec![7; SEGMENT]).unwrap();
        assert_eq!(one.read(10, 3).unwrap(), b"one");
        let blocks = file.metadata().unwrap().blocks();
        drop(more);
        drop(two);
        assert!(
            file.metadata().unwrap().blocks() < blocks,
            "disk blocks are freed"
        );
        // The segments freed last are reused first.
        let reused: Vec<_> = (0..=CACHED_SEGMENTS)
            .map(|_| log_file.segment(SEGMENT).unwrap())
            .collect();
        assert_eq!(reused[CACHED_SEGMENTS].read(0, 1).unwrap(), [0]);
        assert_eq!(one.read(10, 3).unwrap(), b"one");
    }

    #[test]
    fn the_file_has_a_limit() {
        let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
        let all: Vec<_> = std::iter::from_fn(|| log_file.segment(SEGMENT)).collect();
        assert_eq!(all.len() * SEGMENT, UNITS * UNIT);
        assert!(log_file.is_low() && log_file.segment(1).is_none());
        drop(all);
        assert!(!log_file.is_low());
        assert!(log_file.segment(SEGMENT).is_some());
    }

    #[test]
    fn small_segments_take_one_unit_and_freed_units_are_reused() {
        let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
        let mut all: Vec<_> = std::iter::from_fn(|| log_file.segment(1)).collect();
        assert_eq!(all.len(), UNITS);
        let mut firsts: Vec<_> = all.iter().map(|segment| segment.first).collect();
        firsts.dedup();
        assert_eq!(firsts.len(), UNITS, "no unit is allocated twice");
        // Freeing every second unit leaves no range of two.
        let mut number = 0;
        all.retain(|_| {
            number += 1;
            number % 2 == 0
        });
        assert!(log_file.segment(UNIT + 1).is_none());
        let reused = log_file.segment(UNIT).unwrap();
        all.remove(0);
        drop(reused);
        assert_eq!(log_file.segment(3 * UNIT).unwrap().first, 0);
    }
}
