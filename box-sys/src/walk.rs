//! Walks a directory that guests write to, by descriptor, without following links.
//!
//! # Reading order
//! 1. [`open`] opens a directory by a path without links.
//! 2. [`walk`] visits every name below it. It reaches each name through a descriptor of the parent.
//! 3. [`Size`] adds up the disk usage.
//!
//! A guest can change every name during a walk, so the walk never uses paths. It does not enter a
//! directory that has become a link. Everything it enters is, or was a moment ago, below the root.

use std::ffi::CStr;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Deepest nesting that a walk enters. No legitimate workspace is deeper.
const DEPTH_MAX: usize = 128;

/// Opens a host directory by a path that contains no links.
///
/// The caller has resolved the links when it allowed the path.
pub fn open(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let opened = rustix::fs::openat2(CWD, path.as_ref(), flags, Mode::empty(), resolve);
    Ok(opened?)
}

/// Opens a subdirectory, or the directory itself (`c"."`). Refuses links.
pub fn open_in(directory: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?)
}

/// The paths that are not below another path of the list, without duplicates.
pub fn outermost<T: AsRef<Path>>(paths: &[T]) -> impl Iterator<Item = &T> {
    paths.iter().enumerate().filter_map(move |(at, item)| {
        let path = item.as_ref();
        let contains_path = |(other_at, other): (usize, &T)| {
            let other = other.as_ref();
            other_at != at && path.starts_with(other) && (path != other || other_at < at)
        };
        (!paths.iter().enumerate().any(contains_path)).then_some(item)
    })
}

/// One step of a walk.
#[derive(Debug)]
pub enum Found<'a> {
    /// An entry of a directory.
    Entry(Entry<'a>),
    /// A directory that cannot be read, or that is nested too deep.
    Unreadable,
}

/// An entry of a directory.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The parent directory.
    pub directory: BorrowedFd<'a>,
    /// The name in the parent directory.
    pub name: &'a CStr,
    /// Number of directories between the root of the walk and the entry.
    pub depth: usize,
    /// Metadata at the time of the visit.
    pub stat: Stat,
}

impl Entry<'_> {
    /// File type.
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

/// What the walk does after an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Enter the entry if it is a directory.
    Descend,
    /// Do not enter the entry.
    Skip,
}

/// Visits everything below a directory until `visit` breaks.
///
/// The walk skips entries that disappear during the walk.
pub fn walk<B>(
    directory: impl AsFd,
    mut visit: impl FnMut(Found<'_>) -> ControlFlow<B, Next>,
) -> ControlFlow<B> {
    walk_below(directory.as_fd(), 0, &mut visit)
}

fn walk_below<B>(
    directory: BorrowedFd<'_>,
    depth: usize,
    visit: &mut impl FnMut(Found<'_>) -> ControlFlow<B, Next>,
) -> ControlFlow<B> {
    let entries = match Dir::read_from(directory) {
        Ok(entries) if depth < DEPTH_MAX => entries,
        _ => return visit(Found::Unreadable).map_continue(drop),
    };
    for entry in entries {
        let Ok(entry) = entry else {
            return visit(Found::Unreadable).map_continue(drop);
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
        if visit(Found::Entry(entry))? == Next::Skip || !is_directory {
            continue;
        }
        match open_in(directory, name) {
            Ok(inner) => walk_below(inner.as_fd(), depth + 1, visit)?,
            Err(error) if has_changed(&error) => {}
            Err(_) => {
                visit(Found::Unreadable)?;
            }
        }
    }
    ControlFlow::Continue(())
}

/// Whether the entry was removed or replaced after it was listed.
fn has_changed(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Disk usage below a directory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Bytes on disk.
    pub bytes: u64,
    /// Number of entries of any type.
    pub entries: u64,
}

impl Size {
    /// Adds the entries below a directory while `within_limit` holds.
    ///
    /// A directory that cannot be read is an error, because a guest could hide files there.
    pub fn add(
        &mut self,
        directory: impl AsFd,
        within_limit: impl Fn(&Self) -> bool,
    ) -> io::Result<()> {
        let walked = walk(directory, |found| {
            let Found::Entry(entry) = found else {
                return ControlFlow::Break(Err(io::ErrorKind::PermissionDenied.into()));
            };
            self.bytes = self.bytes.saturating_add(entry.disk_bytes());
            self.entries += 1;
            if within_limit(self) {
                ControlFlow::Continue(Next::Descend)
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
