//! A file on its way: hidden beside its place until it is whole.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::error::About;
use super::ground::{Ground, Spot};
use super::stat::etag;

/// How hidden files of ours begin; they are never listed, packed or searched.
pub(super) const HIDDEN: &str = ".box-tmp-";

/// A name that nobody else has.
pub(super) fn hidden_name() -> String {
    format!(
        "{HIDDEN}{:016x}",
        RandomState::new().build_hasher().finish()
    )
}

/// A file that is not in its place yet. Dropped before it is, it is removed.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) spot: Spot,
    hidden: String,
    pub(super) file: OwnedFd,
    placed: bool,
}

impl Draft {
    /// An empty one, for this spot.
    pub(super) fn new(spot: Spot, path: &str) -> Result<Self, BoxError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let hidden = hidden_name();
        let file = rustix::fs::openat(&spot.dir, &hidden, flags, Mode::from_raw_mode(0o600));
        Ok(Self {
            file: file.about(path)?,
            spot,
            hidden,
            placed: false,
        })
    }

    /// Puts it in its place, if what is there is what is expected.
    pub(super) fn place(
        mut self,
        ground: &Ground,
        if_match: Option<&str>,
        replace: bool,
        path: &str,
    ) -> Result<Stat, BoxError> {
        rustix::fs::fsync(&self.file).about(path)?;
        let _turn = ground.turn();
        if let Some(expected) = if_match {
            let found = self.spot.stat().about(path)?;
            if found.is_none_or(|found| etag(&found) != expected) {
                return Err(BoxError::conflict("if_match: the file is another one"));
            }
        }
        let flags = if replace {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        let Spot { dir, name } = &self.spot;
        rustix::fs::renameat_with(dir, &self.hidden, dir, name, flags).about(path)?;
        self.placed = true;
        rustix::fs::fstat(&self.file).about(path)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.placed {
            let _ = rustix::fs::unlinkat(&self.spot.dir, &self.hidden, AtFlags::empty());
        }
    }
}

/// Writes all of it, from this offset on.
pub(super) fn write_at(file: &OwnedFd, mut data: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !data.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, data, offset))?;
        if written == 0 {
            return Err(Errno::NOSPC);
        }
        offset += written as u64;
        data = &data[written..];
    }
    Ok(())
}
