//! Since when a box has had its own version of a file.
//!
//! The kernel copies a file to the private files when the guest changes it for the first time, and
//! marks the copy (origin). The creation time of the copy is that moment. A file without the mark
//! is new, or has replaced an earlier version of the box; then only its directory says how old the
//! version can be. The times are never too late, because an apply overwrites files by them.
//!
//! A discard takes the file of the host over again, and stores the moment. What layers below had is
//! then of no importance.
//!
//! A snapshot has other creation times. So the copier stores the moment as an attribute of the
//! overlay, which a guest can neither see nor change, and which the kernel does not copy.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::SystemTime;

use rustix::fs::{AtFlags, StatxFlags, XattrFlags};
use rustix::io::Errno;

/// Reads and stores the moments, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VersionTimes {
    stored: &'static str,
    taken: &'static str,
    origin: &'static str,
}

impl VersionTimes {
    /// `is_root`: the server has the rights of root.
    pub(crate) fn new(is_root: bool) -> Self {
        if is_root {
            Self {
                stored: "trusted.overlay.made",
                taken: "trusted.overlay.taken",
                origin: "trusted.overlay.origin",
            }
        } else {
            Self {
                stored: "user.overlay.made",
                taken: "user.overlay.taken",
                origin: "user.overlay.origin",
            }
        }
    }

    /// The moment of a file or a directory, if it does not depend on the directory above.
    pub(crate) fn at(self, file: &OwnedFd) -> Option<i64> {
        time(file, self.stored).or_else(|| {
            rustix::fs::fgetxattr(file, self.origin, &mut [0_u8; 0][..]).ok()?;
            created_at(file).ok().flatten()
        })
    }

    /// The moment of the topmost directory of a layer.
    ///
    /// `is_copy`: a copier has made it, so that its creation time says nothing.
    pub(crate) fn at_top(self, directory: &OwnedFd, is_copy: bool) -> Option<i64> {
        time(directory, self.stored).or_else(|| {
            let created = created_at(directory).ok().flatten();
            created.filter(|_| !is_copy)
        })
    }

    /// When a discard has taken the file of the host over, if it has.
    pub(crate) fn taken(self, file: &OwnedFd) -> Option<i64> {
        time(file, self.taken)
    }

    /// Stores that a file is that of the host at this time.
    pub(crate) fn take(self, file: &OwnedFd, at: i64) -> io::Result<()> {
        store(file, self.taken, at)
    }

    /// Stores the moment of a file or a directory, if its file system can.
    pub(crate) fn store(self, file: impl AsFd, at: i64) -> io::Result<()> {
        store(file, self.stored, at)
    }

    /// Stores that the private files of a workspace begin now, unless they began earlier.
    pub(crate) fn begin(self, directory: &OwnedFd) -> io::Result<()> {
        if time(directory, self.stored).is_some() {
            return Ok(());
        }
        self.store(directory, now())
    }
}

fn time(file: &OwnedFd, attribute: &str) -> Option<i64> {
    let mut value = [0; size_of::<i64>()];
    let length = rustix::fs::fgetxattr(file, attribute, &mut value[..]).ok()?;
    (length == value.len()).then(|| i64::from_le_bytes(value))
}

fn store(file: impl AsFd, attribute: &str, at: i64) -> io::Result<()> {
    match rustix::fs::fsetxattr(file, attribute, &at.to_le_bytes(), XattrFlags::empty()) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The present, in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    i64::try_from(now.unwrap_or_default().as_nanos()).unwrap_or(i64::MAX)
}

/// When a file was created, if its file system knows.
fn created_at(file: &OwnedFd) -> io::Result<Option<i64>> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
    let known = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    Ok(known.then(|| nanos(stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)))
}

/// Nanoseconds since 1970.
pub(crate) fn nanos(seconds: i64, nanos: impl Into<i64>) -> i64 {
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanos.into())
}
