//! A file on its way: without a name until it is whole, so that nothing is left of it if the box ends before.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::{AsRawFd as _, OwnedFd};

use box_protocol::BoxError;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, Stat};
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
    pub(super) file: OwnedFd,
    /// The name it has meanwhile, if it has one: just before it gets its own, and where the file system knows no files
    /// without a name.
    hidden: Option<String>,
}

impl Draft {
    /// An empty one, for this spot.
    pub(super) fn new(spot: Spot, path: &str) -> Result<Self, BoxError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let unnamed = rustix::fs::openat(&spot.dir, c".", flags | OFlags::TMPFILE, mode);
        let (file, hidden) = match unnamed {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let hidden = hidden_name();
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let named = rustix::fs::openat(&spot.dir, &hidden, flags, mode);
                (named.about(path)?, Some(hidden))
            }
            unnamed => (unnamed.about(path)?, None),
        };
        Ok(Self { spot, file, hidden })
    }

    /// Puts it in its place, if what is there is what is expected.
    pub(super) fn place(
        self,
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
        self.put(replace).about(path)
    }

    /// Puts it in its place. By a name of ours and a rename, so that whoever watches the directory sees a file that is whole.
    pub(super) fn put(mut self, replace: bool) -> Result<Stat, Errno> {
        let flags = if replace {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        let Spot { dir, name } = &self.spot;
        if self.hidden.is_none() {
            let hidden = hidden_name();
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, own, dir, &hidden, AtFlags::SYMLINK_FOLLOW)?;
            self.hidden = Some(hidden);
        }
        if let Some(hidden) = &self.hidden {
            rustix::fs::renameat_with(dir, hidden, dir, name, flags)?;
            self.hidden = None;
        }
        rustix::fs::fstat(&self.file)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(hidden) = &self.hidden {
            let _ = rustix::fs::unlinkat(&self.spot.dir, hidden, AtFlags::empty());
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
