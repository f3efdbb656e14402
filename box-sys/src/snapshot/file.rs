//! Copies the content of a file, without its holes.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;

use crate::error::{At, Result};

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// The ways to copy, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The files share their blocks until one changes.
    Share,
    /// The kernel copies.
    InKernel,
    /// This process copies.
    Plain,
}

/// Copies contents, and remembers which way works.
#[derive(Debug)]
pub(crate) struct Copier {
    way: Way,
    buffer: Vec<u8>,
}

impl Copier {
    pub(crate) fn new() -> Self {
        Self {
            way: Way::Share,
            buffer: Vec::new(),
        }
    }

    /// Copies a file. `step` gets the number of bytes before they are copied.
    pub(crate) fn copy(
        &mut self,
        from: &OwnedFd,
        to: &OwnedFd,
        stat: &Stat,
        step: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size == 0 {
            return Ok(());
        }
        if self.way == Way::Share {
            let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
            step(blocks.saturating_mul(512).min(size))?;
            match rustix::fs::ioctl_ficlone(to, from) {
                Ok(()) => return Ok(()),
                // Another file system, or one that cannot share.
                Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS) => {
                    self.way = Way::InKernel;
                }
                // This file cannot be shared.
                Err(_) => {}
            }
            return self.data(from, to, size, &mut |_| step(0));
        }
        self.data(from, to, size, step)
    }

    /// Copies each part between two holes.
    fn data(
        &mut self,
        from: &OwnedFd,
        to: &OwnedFd,
        size: u64,
        step: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        rustix::fs::ftruncate(to, size).at("set the size of a file")?;
        let mut at = 0;
        while at < size {
            let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
                Ok(start) => start,
                // Only a hole is left.
                Err(Errno::NXIO) => return Ok(()),
                // A file system that knows no holes.
                Err(Errno::INVAL) => at,
                Err(error) => return Err(error).at("find the data of a file"),
            };
            let end = match rustix::fs::seek(from, SeekFrom::Hole(start)) {
                Ok(end) => end.min(size),
                Err(_) => size,
            };
            at = start;
            while at < end {
                let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                step(length as u64)?;
                at += self.piece(from, to, at, length).at("copy a file")?;
            }
        }
        Ok(())
    }

    /// Copies the next bytes. Returns their number, which is not 0.
    fn piece(&mut self, from: &OwnedFd, to: &OwnedFd, at: u64, length: usize) -> io::Result<u64> {
        if self.way != Way::Plain {
            let (mut source, mut target) = (at, at);
            let copied =
                rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), length);
            match copied {
                Ok(copied) if copied > 0 => return Ok(copied as u64),
                // A file that is shorter than its size said is found by the plain way.
                Ok(_) | Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                    self.way = Way::Plain;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.buffer.resize(PIECE, 0);
        let buffer = self.buffer.get_mut(..length).unwrap_or_default();
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(from, &mut *buffer, at))?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut written = 0;
        while written < read {
            let rest = buffer.get(written..read).unwrap_or_default();
            let target = at + written as u64;
            written += rustix::io::retry_on_intr(|| rustix::io::pwrite(to, rest, target))?;
        }
        Ok(read as u64)
    }
}
