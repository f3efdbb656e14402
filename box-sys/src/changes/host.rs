//! The directory of the host that an apply writes to.
//!
//! Every operation opens the parent directory by its path below the root of the mount. It follows
//! no link, crosses no mount and stays beneath the root. It has the rights of the owner of the
//! directory, as a writable mount gives them to a guest.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RawMode, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::compare::Entry;
use super::open_dir;
use crate::error::At as _;
use crate::raw;
use crate::snapshot::{Copier, nanos, open_below};

/// Bits of a mode that an apply writes. No set-user-id, set-group-id or sticky bit.
const MODE: RawMode = 0o777;

/// Deepest nesting of directories that are removed.
const DEPTH_MAX: usize = 512;

/// A directory of the host.
pub(crate) struct Host {
    root: OwnedFd,
    /// Owner of the directory, if this process has more rights than that user.
    owner: Option<(u32, u32)>,
    temporary: std::ffi::CString,
    /// Times of earlier applies.
    own_writes: Vec<(i64, i64)>,
    copier: Copier,
}

/// Rights of the owner of the directory, until dropped.
struct OwnersRights(Option<CapabilitySets>);

impl OwnersRights {
    fn take(owner: Option<(u32, u32)>) -> io::Result<Self> {
        let Some(owner) = owner else {
            return Ok(Self(None));
        };
        let before = rustix::thread::capabilities(None)?;
        raw::set_file_ids(owner)?;
        let rights = Self(Some(before));
        // An owner that is root has no other rights over the files of others either.
        let without = CapabilitySets {
            effective: CapabilitySet::SETUID | CapabilitySet::SETGID,
            ..before
        };
        rustix::thread::set_capabilities(None, without)?;
        Ok(rights)
    }
}

impl Drop for OwnersRights {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            let restored = rustix::thread::set_capabilities(None, before).is_ok()
                && raw::set_file_ids((0, 0)).is_ok();
            if !restored {
                // Without its rights this process could read nothing of the box.
                raw::exit_now(1);
            }
        }
    }
}

/// The result of a look at a name of the host.
pub(crate) enum Lookup {
    /// Nothing is there.
    Nothing,
    /// This is there.
    Found(Stat),
}

impl Host {
    /// The directory behind a mount. `owner` is set if this process has the rights of root.
    pub(crate) fn new(
        root: OwnedFd,
        is_root: bool,
        temporary: &str,
        own_writes: Vec<(i64, i64)>,
    ) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&root)?;
        let temporary = std::ffi::CString::new(temporary);
        let temporary = temporary.map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(Self {
            root,
            owner: is_root.then_some((stat.st_uid, stat.st_gid)),
            temporary,
            own_writes,
            copier: Copier::new(),
        })
    }

    /// Name of temporary files.
    pub(crate) fn temporary(&self) -> &CStr {
        &self.temporary
    }

    fn rights(&self) -> io::Result<OwnersRights> {
        OwnersRights::take(self.owner)
    }

    /// Looks at a name. A missing parent directory is nothing as well.
    pub(crate) fn look(&self, parent: &[u8], name: &CStr) -> io::Result<Lookup> {
        let _rights = self.rights()?;
        let parent = match open_dir(&self.root, parent) {
            Err(error) if is_absent(&error) => return Ok(Lookup::Nothing),
            parent => parent?,
        };
        match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Lookup::Found(stat)),
            Err(Errno::NOENT) => Ok(Lookup::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a file changed after this time other than by an apply.
    ///
    /// The clock of files has steps of milliseconds. A change in the same step may be the later one.
    pub(crate) fn changed_after(&self, stat: &Stat, time: i64) -> bool {
        let nanoseconds = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
        let changed = nanos(stat.st_ctime, nanoseconds);
        let is_own = |(first, last): &(i64, i64)| (*first..=*last).contains(&changed);
        changed >= time && !self.own_writes.iter().any(is_own)
    }

    /// The first file below a directory that changed after this time, as a path below it.
    pub(crate) fn changed_below(
        &self,
        parent: &[u8],
        name: &CStr,
        time: i64,
    ) -> io::Result<Option<Vec<u8>>> {
        let _rights = self.rights()?;
        let directory = open_dir(&self.root, parent)?;
        self.find_changed(&open_dir(&directory, name.to_bytes())?, time, 0)
    }

    fn find_changed(
        &self,
        directory: &OwnedFd,
        time: i64,
        depth: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        if depth == DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            let below = if FileType::from_raw_mode(stat.st_mode).is_dir() {
                self.find_changed(&open_dir(directory, name.to_bytes())?, time, depth + 1)?
            } else {
                self.changed_after(&stat, time).then(Vec::new)
            };
            if let Some(below) = below {
                let mut path = name.to_bytes().to_vec();
                if !below.is_empty() {
                    path.push(b'/');
                    path.extend_from_slice(&below);
                }
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// Opens a parent directory, and creates those that are missing.
    fn parent(&self, path: &[u8]) -> io::Result<OwnedFd> {
        match open_dir(&self.root, path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            parent => return parent,
        }
        let mut directory = open_dir(&self.root, b"")?;
        for name in path.split(|byte| *byte == b'/') {
            match rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            directory = open_dir(&directory, name)?;
        }
        Ok(directory)
    }

    /// Creates a directory, in place of a file if needed, or sets the mode of an existing one.
    pub(crate) fn put_directory(&self, parent: &[u8], entry: &Entry<'_>) -> io::Result<()> {
        let _rights = self.rights()?;
        let parent = self.parent(parent)?;
        // The owner needs its rights until everything below is written.
        let mode = Mode::from_raw_mode(entry.stat.st_mode & MODE | 0o700);
        match rustix::fs::mkdirat(&parent, entry.name, mode) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                match rustix::fs::unlinkat(&parent, entry.name, AtFlags::empty()) {
                    Ok(()) => rustix::fs::mkdirat(&parent, entry.name, mode)?,
                    Err(Errno::ISDIR | Errno::PERM) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        }
        let directory = open_dir(&parent, entry.name.to_bytes())?;
        Ok(rustix::fs::fchmod(&directory, mode)?)
    }

    /// Sets the final mode of a directory.
    pub(crate) fn finish_directory(&self, path: &[u8], mode: RawMode) -> io::Result<()> {
        let _rights = self.rights()?;
        let directory = open_dir(&self.root, path)?;
        Ok(rustix::fs::fchmod(
            &directory,
            Mode::from_raw_mode(mode & MODE),
        )?)
    }

    /// Writes a file under a temporary name, and renames it.
    ///
    /// `go_on` is asked before the rename, and fails if the content may be incomplete.
    pub(crate) fn put_file(
        &mut self,
        parent: &[u8],
        entry: &Entry<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let from = open_below(entry.directory, entry.name, flags)?;
        let stat = rustix::fs::fstat(&from)?;
        let is_same = (stat.st_dev, stat.st_ino) == (entry.stat.st_dev, entry.stat.st_ino);
        if !is_same || !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Errno::STALE.into());
        }
        let rights = self.rights()?;
        let parent = self.parent(parent)?;
        let temporary = Temporary::new(&parent, &self.temporary)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let to = rustix::fs::openat(
            &parent,
            &*self.temporary,
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )?;
        let mut step = |_| {
            if go_on() {
                return Ok(());
            }
            Err(Errno::CANCELED).at("copy a file")
        };
        self.copier
            .copy(&from, &to, &stat, &mut step)
            .map_err(|error| match error {
                crate::error::Error::Step { source, .. } => source,
                _ => io::ErrorKind::Other.into(),
            })?;
        rustix::fs::fchmod(&to, Mode::from_raw_mode(stat.st_mode & MODE))?;
        rustix::fs::futimens(&to, &times(&stat))?;
        if !go_on() {
            return Err(Errno::CANCELED.into());
        }
        self.replace(&parent, entry.name)?;
        temporary.keep();
        drop(rights);
        Ok(())
    }

    /// Creates a link under a temporary name, and renames it.
    pub(crate) fn put_link(&self, parent: &[u8], entry: &Entry<'_>) -> io::Result<()> {
        let target = rustix::fs::readlinkat(entry.directory, entry.name, Vec::new())?;
        let _rights = self.rights()?;
        let parent = self.parent(parent)?;
        let temporary = Temporary::new(&parent, &self.temporary)?;
        rustix::fs::symlinkat(target, &parent, &*self.temporary)?;
        self.replace(&parent, entry.name)?;
        temporary.keep();
        Ok(())
    }

    /// Renames the temporary file, in place of a file or of a directory.
    fn replace(&self, parent: &OwnedFd, name: &CStr) -> io::Result<()> {
        match rustix::fs::renameat(parent, &*self.temporary, parent, name) {
            Err(Errno::ISDIR) => {
                remove(parent, name, 0)?;
                Ok(rustix::fs::renameat(
                    parent,
                    &*self.temporary,
                    parent,
                    name,
                )?)
            }
            renamed => Ok(renamed?),
        }
    }

    /// Removes a file, or a directory with everything below it.
    pub(crate) fn remove(&self, parent: &[u8], name: &CStr) -> io::Result<()> {
        let _rights = self.rights()?;
        let parent = match open_dir(&self.root, parent) {
            Err(error) if is_absent(&error) => return Ok(()),
            parent => parent?,
        };
        remove(&parent, name, 0)
    }
}

/// A temporary name in a directory, removed when dropped.
struct Temporary<'a> {
    parent: &'a OwnedFd,
    name: &'a CStr,
    is_kept: bool,
}

impl<'a> Temporary<'a> {
    /// Removes what an interrupted apply has left behind.
    fn new(parent: &'a OwnedFd, name: &'a CStr) -> io::Result<Self> {
        match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self {
            parent,
            name,
            is_kept: false,
        })
    }

    /// The file has its final name now.
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = rustix::fs::unlinkat(self.parent, self.name, AtFlags::empty());
        }
    }
}

/// Removes a file, or a directory with everything below it on the same mount.
pub(super) fn remove(parent: &OwnedFd, name: &CStr, depth: usize) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTEMPTY | Errno::EXIST) if depth < DEPTH_MAX => {}
        Err(error) => return Err(error.into()),
    }
    let directory = open_dir(parent, name.to_bytes())?;
    let mut names = Vec::new();
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    for name in names {
        remove(&directory, &name, depth + 1)?;
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

fn is_absent(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR))
}

/// The access time stays, so that the kernel sets it to now.
fn times(stat: &Stat) -> Timestamps {
    const NOW: i64 = libc::UTIME_NOW;
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: NOW,
        },
        last_modification: Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
    }
}
