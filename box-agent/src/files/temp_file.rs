//! Temporary files.
//!
//! They have no name until they are complete, so a box that ends early leaves none behind.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::{AsRawFd as _, OwnedFd};

use box_protocol::BoxError;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::error::PathContext;
use super::guest_root::{GuestRoot, Location};
use super::stat::etag;

/// Prefix of the agent's temporary names.
///
/// They are never listed, packed or searched.
pub(super) const TEMP_PREFIX: &str = ".box-tmp-";

/// A random temporary name.
pub(super) fn temp_name() -> String {
    format!(
        "{TEMP_PREFIX}{:016x}",
        RandomState::new().build_hasher().finish()
    )
}

/// A file that is not in its final location yet. Dropping it removes the file.
#[derive(Debug)]
pub(super) struct TempFile {
    pub(super) location: Location,
    pub(super) file: OwnedFd,
    /// The temporary name, if the file has one.
    ///
    /// A file gets it just before its final name, or at once if the file system has no unnamed files.
    name: Option<String>,
}

impl TempFile {
    /// Creates an empty file for this location.
    pub(super) fn new(location: Location, path: &str) -> Result<Self, BoxError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let unnamed = rustix::fs::openat(&location.dir, c".", flags | OFlags::TMPFILE, mode);
        let (file, name) = match unnamed {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let name = temp_name();
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let named = rustix::fs::openat(&location.dir, &name, flags, mode);
                (named.with_path(path)?, Some(name))
            }
            unnamed => (unnamed.with_path(path)?, None),
        };
        Ok(Self {
            location,
            file,
            name,
        })
    }

    /// Moves the file to its location if the existing file has the expected etag.
    pub(super) fn install(
        self,
        guest_root: &GuestRoot,
        if_match: Option<&str>,
        replace: bool,
        path: &str,
    ) -> Result<Stat, BoxError> {
        rustix::fs::fsync(&self.file).with_path(path)?;
        let _lock = guest_root.replace_lock();
        if let Some(expected) = if_match {
            let found = self.location.stat().with_path(path)?;
            if found.is_none_or(|found| etag(&found) != expected) {
                return Err(BoxError::conflict(
                    "if_match: etag mismatch; read the file again",
                ));
            }
        }
        self.rename(replace).with_path(path)
    }

    /// Moves the file to its location.
    ///
    /// It is linked under a temporary name and renamed, so that a watcher of the directory sees only a complete file.
    pub(super) fn rename(mut self, replace: bool) -> Result<Stat, Errno> {
        let flags = if replace {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        let Location { dir, name: target } = &self.location;
        if self.name.is_none() {
            let name = temp_name();
            let fd_path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, fd_path, dir, &name, AtFlags::SYMLINK_FOLLOW)?;
            self.name = Some(name);
        }
        if let Some(name) = &self.name {
            rustix::fs::renameat_with(dir, name, dir, target, flags)?;
            self.name = None;
        }
        rustix::fs::fstat(&self.file)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = rustix::fs::unlinkat(&self.location.dir, name, AtFlags::empty());
        }
    }
}

/// Writes all data at this offset.
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
