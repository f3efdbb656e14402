//! Landlock: commands write only where the plan allows it.
//!
//! This holds in addition to mounts and file modes. The rules do not scope signals and abstract
//! sockets. Two commands of a box are in separate domains, and one must be able to stop a server
//! that the other started. The kernel protects init from signals because it is pid 1.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::raw;

const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_BLOCK: u64 = 1 << 11;
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;

/// Rights below a writable path: everything except device nodes and device ioctls.
const WRITABLE: u64 = !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV);

/// Landlock version of this kernel, 0 for none.
pub(crate) fn abi() -> u32 {
    const VERSION: u32 = 1;
    raw::landlock_create(None, VERSION).map_or(0, |abi| u32::try_from(abi).unwrap_or(0))
}

/// The rights that a kernel of this version knows.
fn known(abi: u32) -> u64 {
    let mut rights = (1 << 13) - 1;
    for (since, right) in [(2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)] {
        if abi >= since {
            rights |= right;
        }
    }
    rights
}

/// Ruleset for the commands of a box: read everything, write below `writable`.
///
/// Returns `None` if the kernel has no Landlock.
pub(crate) fn ruleset<'a>(
    abi: u32,
    writable: impl Iterator<Item = &'a Path>,
) -> io::Result<Option<OwnedFd>> {
    if abi == 0 {
        return Ok(None);
    }
    let known = known(abi);
    let ruleset = raw::own_fd(raw::landlock_create(Some(&[known]), 0)?)?;
    let allow = |path: &Path, rights: u64| -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        // A path in a workspace may have become a link. Grant nothing at the target of the link.
        let resolve = ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
            Ok(place) => allow_beneath(&ruleset, &place, rights & known),
            Err(Errno::NOENT | Errno::LOOP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    };
    // Without a rule for the root, not even `ls /` works.
    allow(Path::new("/"), EXECUTE | READ_FILE | READ_DIR)?;
    // Read-only: a guest that lowers its `oom_score_adj` would survive its agent when memory runs
    // out. For `/proc/self/fd`, the kernel applies the rules of the link target.
    allow(Path::new("/proc"), READ_FILE | READ_DIR)?;
    allow(
        Path::new("/dev"),
        READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV,
    )?;
    allow(Path::new("/dev/shm"), WRITABLE)?;
    for path in writable {
        allow(path, WRITABLE)?;
    }
    Ok(Some(ruleset))
}

/// Adds a writable path for processes that enter the ruleset from now on.
///
/// The kernel copies the rules for each process, so earlier processes cannot write there.
pub(crate) fn add_writable(ruleset: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    allow_beneath(ruleset, place, WRITABLE & known(abi()))
}

fn allow_beneath(ruleset: &OwnedFd, place: &OwnedFd, rights: u64) -> io::Result<()> {
    // The kernel refuses directory rights on a file with EINVAL.
    let directory = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(place)?.st_mode).is_dir();
    let rights = if directory {
        rights
    } else {
        rights & (EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV)
    };
    raw::landlock_allow(ruleset.as_fd(), place.as_fd(), rights)
}
