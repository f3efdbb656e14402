//! Measures disk speed without the page cache.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::Instant;

use libc::c_long;

const BLOCK: usize = 64 << 10;
/// Alignment of buffers for direct I/O.
const ALIGNED: usize = 4096;

/// Reads a file from disk or overwrites it, and returns the milliseconds.
pub(super) fn direct(path: &str, write: bool) -> io::Result<c_long> {
    let mut options = OpenOptions::new();
    options.read(true).write(write);
    let file = options.custom_flags(libc::O_DIRECT).open(path)?;
    let mut memory = vec![1_u8; BLOCK + ALIGNED];
    let first = memory.as_ptr().align_offset(ALIGNED);
    let block = &mut memory[first..first + BLOCK];
    let start = Instant::now();
    for place in (0..file.metadata()?.len()).step_by(BLOCK) {
        if write {
            file.write_all_at(block, place)?;
        } else {
            file.read_exact_at(block, place)?;
        }
    }
    c_long::try_from(start.elapsed().as_millis()).map_err(io::Error::other)
}
