//! What is below a directory of the host that guests write to. The one way in which the host looks there.
//!
//! # Reading order
//! 1. [`open`]: a directory, by a path that leads through no link.
//! 2. [`walk`]: every name below it, each found by a descriptor of the directory that it is in.
//! 3. [`Size`]: what it all takes.
//!
//! A guest may change every name while it is looked at. Nothing is found by a path for that reason: a directory that has become a
//! link since it was named is not entered, and everything that is entered is below the first one, or was a moment ago.

use std::ffi::CStr;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Directories within each other that are entered. A guest that goes deeper is up to no good.
const DEPTH: usize = 128;

/// Opens a directory of the host by a path in which no link is followed: whoever allowed it has followed them already.
pub fn open(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let opened = rustix::fs::openat2(CWD, path.as_ref(), flags, Mode::empty(), resolve);
    Ok(opened?)
}

/// Opens a directory that is in another, or that other itself (`c"."`), if it is no link.
pub fn open_in(directory: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?)
}

/// The paths that are inside no other of them, each once.
pub fn outermost<T: AsRef<Path>>(paths: &[T]) -> impl Iterator<Item = &T> {
    paths.iter().enumerate().filter_map(move |(at, item)| {
        let path = item.as_ref();
        let holds_it = |(other_at, other): (usize, &T)| {
            let other = other.as_ref();
            other_at != at && path.starts_with(other) && (path != other || other_at < at)
        };
        (!paths.iter().enumerate().any(holds_it)).then_some(item)
    })
}

/// What a walk comes upon.
#[derive(Debug)]
pub enum Found<'a> {
    /// A name.
    Entry(Entry<'a>),
    /// A directory that cannot be looked into, though it is there; or one that is too deep.
    Closed,
}

/// A name in a directory.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The directory that it is in.
    pub directory: BorrowedFd<'a>,
    /// The name itself.
    pub name: &'a CStr,
    /// How many directories it is below the first one.
    pub depth: usize,
    /// What it was when it was looked at.
    pub stat: Stat,
}

impl Entry<'_> {
    /// What it is.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Bytes on disk.
    pub fn disk_bytes(&self) -> u64 {
        let blocks = u64::try_from(self.stat.st_blocks).unwrap_or(0);
        blocks.saturating_mul(512)
    }

    /// Bytes of content.
    pub fn content_bytes(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }
}

/// How a walk goes on after an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Into it, if it is a directory.
    Enter,
    /// Past it.
    Pass,
}

/// Shows everything below a directory, until there is no more or `look` breaks off. What vanishes meanwhile is not there.
pub fn walk<B>(
    directory: impl AsFd,
    mut look: impl FnMut(Found<'_>) -> ControlFlow<B, Then>,
) -> ControlFlow<B> {
    below(directory.as_fd(), 0, &mut look)
}

fn below<B>(
    directory: BorrowedFd<'_>,
    depth: usize,
    look: &mut impl FnMut(Found<'_>) -> ControlFlow<B, Then>,
) -> ControlFlow<B> {
    let entries = match Dir::read_from(directory) {
        Ok(entries) if depth < DEPTH => entries,
        _ => return look(Found::Closed).map_continue(drop),
    };
    for entry in entries {
        let Ok(entry) = entry else {
            return look(Found::Closed).map_continue(drop);
        };
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let entry = Entry {
            directory,
            name,
            depth,
            stat,
        };
        let is_directory = entry.kind() == FileType::Directory;
        if look(Found::Entry(entry))? == Then::Pass || !is_directory {
            continue;
        }
        match open_in(directory, name) {
            Ok(inner) => below(inner.as_fd(), depth + 1, look)?,
            Err(error) if has_changed(&error) => {}
            Err(_) => {
                look(Found::Closed)?;
            }
        }
    }
    ControlFlow::Continue(())
}

/// Whether a name has come to mean something else, or nothing.
fn has_changed(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// What is below a directory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// On disk.
    pub bytes: u64,
    /// Files, directories and everything else that has a name.
    pub entries: u64,
}

impl Size {
    /// Adds what is below a directory, as long as the sum is `fine`. What cannot be looked into might hold anything, so it is an
    /// error: a guest could hide what it has that way.
    pub fn add(&mut self, directory: impl AsFd, fine: impl Fn(&Self) -> bool) -> io::Result<()> {
        let walked = walk(directory, |found| {
            let Found::Entry(entry) = found else {
                return ControlFlow::Break(Err(io::ErrorKind::PermissionDenied.into()));
            };
            self.bytes = self.bytes.saturating_add(entry.disk_bytes());
            self.entries += 1;
            if fine(self) {
                ControlFlow::Continue(Then::Enter)
            } else {
                ControlFlow::Break(Ok(()))
            }
        });
        match walked {
            ControlFlow::Break(outcome) => outcome,
            ControlFlow::Continue(()) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
