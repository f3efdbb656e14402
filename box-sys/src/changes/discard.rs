//! Writes the old view to the workspace of a box, through the mount that the guest uses.
//!
//! Nothing changes below that mount, so the kernel and the guest see each step. The private files
//! keep copies of the old files, marked with the time: the box knows what changed on the host before.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::compare::{Entry, Views, Walk};
use super::host::remove;
use super::{open_dir, split};
use crate::error::{At, Error, Result};
use crate::snapshot::{Copier, VersionTimes, now, open_below};

/// Deepest nesting of directories that are copied.
const DEPTH_MAX: usize = 512;

/// How far the clock of a file system can be behind, in nanoseconds.
const CLOCK_LAG: i64 = 20_000_000;

/// Undoes the differences in a workspace. Returns their number.
///
/// `workspace` is the directory as the guest sees it, `upper` the private files of it.
pub(crate) fn discard(
    views: Views<'_>,
    workspace: &OwnedFd,
    upper: Option<&OwnedFd>,
    is_root: bool,
    temporary: &str,
) -> Result<u64> {
    let temporary = std::ffi::CString::new(temporary);
    let mut discard = Discard {
        temporary: temporary.map_err(|_| Error::Invalid("temporary: contains a zero".into()))?,
        is_cancelled: views.is_cancelled,
        copier: Copier::new(),
        is_root,
    };
    let begun = now().saturating_sub(CLOCK_LAG);
    let mut undone = 0;
    views.walk(None, &mut |found| {
        let (parent, name) = split(found.path)?;
        let parent = match open_dir(workspace, parent) {
            // The guest has removed it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Walk::Skip),
            parent => parent.at("open a directory of the workspace")?,
        };
        undone += 1;
        let walk = discard.one(&parent, &name, found.new.as_ref(), found.old.as_ref());
        let walk = walk.at("restore a file of the workspace")?;
        if let Some(upper) = upper
            && found.old.is_some_and(|old| old.kind().is_file())
        {
            // Without the mark, a later apply may report a conflict that is none.
            let _ = mark(upper, found.path, VersionTimes::new(is_root), begun);
        }
        Ok(walk)
    })?;
    Ok(undone)
}

/// Marks a file of the private files as that of the host.
fn mark(upper: &OwnedFd, path: &[u8], made: VersionTimes, at: i64) -> io::Result<()> {
    let (parent, name) = split(path).map_err(|_| io::ErrorKind::InvalidInput)?;
    let parent = open_dir(upper, parent)?;
    let file = open_below(&parent, &*name, OFlags::RDONLY | OFlags::NONBLOCK)?;
    made.take(&file, at)
}

struct Discard<'a> {
    temporary: std::ffi::CString,
    is_cancelled: &'a dyn Fn() -> bool,
    copier: Copier,
    is_root: bool,
}

impl Discard<'_> {
    /// Undoes one difference.
    fn one(
        &mut self,
        parent: &OwnedFd,
        name: &CStr,
        new: Option<&Entry<'_>>,
        old: Option<&Entry<'_>>,
    ) -> io::Result<Walk> {
        let Some(old) = old else {
            remove(parent, name, 0)?;
            return Ok(Walk::Skip);
        };
        let (was_dir, is_dir) = (
            old.kind().is_dir(),
            new.is_some_and(|new| new.kind().is_dir()),
        );
        if was_dir && is_dir {
            let directory = open_dir(parent, name.to_bytes())?;
            self.set_attributes(&directory, &old.stat)?;
            return Ok(Walk::Continue);
        }
        if was_dir || is_dir {
            remove(parent, name, 0)?;
        }
        self.copy(old, parent, name, 0)?;
        Ok(Walk::Skip)
    }

    /// Copies a file or a directory of the old view.
    fn copy(
        &mut self,
        old: &Entry<'_>,
        parent: &OwnedFd,
        name: &CStr,
        depth: usize,
    ) -> io::Result<()> {
        if depth == DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        if (self.is_cancelled)() {
            return Err(Errno::CANCELED.into());
        }
        match old.kind() {
            FileType::Directory => {
                let from = open_dir(old.directory, old.name.to_bytes())?;
                match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                let to = open_dir(parent, name.to_bytes())?;
                for entry in Dir::read_from(&from)? {
                    let entry = entry?;
                    let name = entry.file_name();
                    if matches!(name.to_bytes(), b"." | b"..") {
                        continue;
                    }
                    let stat = rustix::fs::statat(&from, name, AtFlags::SYMLINK_NOFOLLOW)?;
                    let below = Entry {
                        directory: from.as_fd(),
                        name,
                        stat,
                    };
                    self.copy(&below, &to, name, depth + 1)?;
                }
                self.set_attributes(&to, &old.stat)
            }
            FileType::RegularFile => self.copy_file(old, parent, name),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(old.directory, old.name, Vec::new())?;
                remove(parent, &self.temporary, 0)?;
                rustix::fs::symlinkat(target, parent, &*self.temporary)?;
                self.rename(parent, name, &old.stat)
            }
            kind @ (FileType::Fifo | FileType::Socket) => {
                remove(parent, &self.temporary, 0)?;
                let mode = Mode::from_raw_mode(old.stat.st_mode);
                rustix::fs::mknodat(parent, &*self.temporary, kind, mode, 0)?;
                self.rename(parent, name, &old.stat)
            }
            // A box has no devices of the host.
            _ => Ok(()),
        }
    }

    fn copy_file(&mut self, old: &Entry<'_>, parent: &OwnedFd, name: &CStr) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let from = open_below(old.directory, old.name, flags)?;
        let stat = rustix::fs::fstat(&from)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Errno::STALE.into());
        }
        remove(parent, &self.temporary, 0)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let to = rustix::fs::openat(
            parent,
            &*self.temporary,
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )?;
        let is_cancelled = self.is_cancelled;
        let mut step = |_| {
            if is_cancelled() {
                return Err(Errno::CANCELED).at("copy a file");
            }
            Ok(())
        };
        let copied = self.copier.copy(&from, &to, &stat, &mut step);
        let done = copied
            .map_err(|error| match error {
                Error::Step { source, .. } => source,
                _ => io::ErrorKind::Other.into(),
            })
            .and_then(|()| self.set_attributes(&to, &stat));
        if let Err(error) = done {
            let _ = rustix::fs::unlinkat(parent, &*self.temporary, AtFlags::empty());
            return Err(error);
        }
        Ok(rustix::fs::renameat(
            parent,
            &*self.temporary,
            parent,
            name,
        )?)
    }

    /// Gives a new link or special file its owner and its name.
    fn rename(&self, parent: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
        if self.is_root {
            crate::mounts::chown(parent, &*self.temporary, (stat.st_uid, stat.st_gid))?;
        }
        Ok(rustix::fs::renameat(
            parent,
            &*self.temporary,
            parent,
            name,
        )?)
    }

    fn set_attributes(&self, file: &OwnedFd, stat: &Stat) -> io::Result<()> {
        if self.is_root {
            let (user, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
            rustix::fs::fchown(file, Some(user), Some(group))?;
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(stat.st_mode))?;
        let time = |seconds, nanos: u64| Timespec {
            tv_sec: seconds,
            tv_nsec: i64::try_from(nanos).unwrap_or(0),
        };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
        };
        Ok(rustix::fs::futimens(file, &times)?)
    }
}
