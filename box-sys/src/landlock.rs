//! Landlock, the second fence around files: a command may write only where the plan says, whatever else the mounts or the
//! modes of files would allow.
//!
//! Signals and abstract sockets are left unscoped on purpose: two commands of one box are each under their own domain, and
//! the second must be able to end a server that the first one started. Init is safe from signals as pid 1.

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

/// What is allowed where one may write: all but making devices and speaking to them.
const WRITABLE: u64 = !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV);

/// The version of Landlock this kernel has, 0 for none.
pub(crate) fn abi() -> u32 {
    const VERSION: u32 = 1;
    raw::landlock_create(None, VERSION).map_or(0, |abi| u32::try_from(abi).unwrap_or(0))
}

/// The rights a kernel of this version knows about.
fn known(abi: u32) -> u64 {
    let mut rights = (1 << 13) - 1;
    for (since, right) in [(2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)] {
        if abi >= since {
            rights |= right;
        }
    }
    rights
}

/// A ruleset for the commands of a box: read everything that is there, write beneath `writable`. `None` where the kernel has
/// no Landlock.
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
        // A place in a workspace may have become a link meanwhile; where that leads is nothing to be written.
        let resolve = ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
            Ok(place) => allow_beneath(&ruleset, &place, rights & known),
            Err(Errno::NOENT | Errno::LOOP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    };
    // Without a rule for the root itself not even `ls /` works.
    allow(Path::new("/"), EXECUTE | READ_FILE | READ_DIR)?;
    // Nothing to write there: who lowers its own score in `oom_score_adj` goes after its agent when memory runs out. What
    // `/proc/self/fd` leads to is written by the rules of where it is.
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

/// Adds a place beneath which whoever is put under the rules from now on may write. Who is under them already may not: the
/// kernel has taken a copy for each.
pub(crate) fn add_writable(ruleset: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    allow_beneath(ruleset, place, WRITABLE & known(abi()))
}

fn allow_beneath(ruleset: &OwnedFd, place: &OwnedFd, rights: u64) -> io::Result<()> {
    // Rights about entries of a directory are refused on a file: EINVAL.
    let directory = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(place)?.st_mode).is_dir();
    let rights = if directory {
        rights
    } else {
        rights & (EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV)
    };
    raw::landlock_allow(ruleset.as_fd(), place.as_fd(), rights)
}
