//! Walks a directory that guests write to, by descriptor, without following links.
//!
//! # Reading order
//! 1. [`open`] opens a directory by a path without links.
//! 2. [`walk`] visits every name below it. It reaches each name through a descriptor of the parent.
//! 3. [`Size`] adds up the disk usage. [`remove_all`] removes a tree.
//!
//! A guest can change every name during a walk, so the walk never uses paths. It does not enter a
//! directory that has become a link. Everything it enters is, or was a moment ago, below the root.

use std::ffi::{CStr, CString};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
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

/// Removes a directory with everything below it, or a file.
///
/// The walk is never deeper than two directories, however deep the guest's tree is: it moves each
/// directory that is not empty up to the root of the tree first. It follows no link.
pub fn remove_all(path: &Path) -> io::Result<()> {
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = rustix::fs::open(parent, flags, Mode::empty())?;
    let root = match open_for_removal(&parent, name) {
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?);
        }
        root => root?,
    };
    let mut moved: u64 = 0;
    while let Some(batch) = names(&root)? {
        for name in batch {
            if !unlink(&root, &name)? {
                let inner = open_for_removal(&root, &*name)?;
                while let Some(batch) = names(&inner)? {
                    for name in batch {
                        if !unlink(&inner, &name)? {
                            move_up(&inner, &name, &root, &mut moved)?;
                        }
                    }
                }
            }
        }
    }
    Ok(rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
}

/// Moves a directory up to the root of the tree, under a name that is not in use.
fn move_up(from: &OwnedFd, name: &CStr, root: &OwnedFd, moved: &mut u64) -> Result<(), Errno> {
    // Moving a directory changes its link to the parent, which requires access to it.
    drop(open_for_removal(from, name)?);
    loop {
        *moved += 1;
        let fresh = format!(".removed-{moved}");
        match rustix::fs::renameat_with(from, name, root, fresh, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            done => return done,
        }
    }
}

/// Most names of a directory that are held at once.
const BATCH: usize = 4096;

/// Opens a directory that is about to be removed, and gives its owner access.
fn open_for_removal(at: &OwnedFd, name: impl rustix::path::Arg + Copy) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match rustix::fs::openat(at, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let path = rustix::fs::openat(at, name, path, Mode::empty())?;
            let number = std::os::fd::AsRawFd::as_raw_fd(&path);
            rustix::fs::chmod(format!("/proc/self/fd/{number}"), Mode::RWXU)?;
            rustix::fs::openat(at, name, flags, Mode::empty())?
        }
        opened => opened?,
    };
    if rustix::fs::fstat(&opened)?.st_mode & 0o700 != 0o700 {
        rustix::fs::fchmod(&opened, Mode::RWXU)?;
    }
    Ok(opened)
}

/// The next names of a directory, or `None` if it is empty.
fn names(directory: &OwnedFd) -> io::Result<Option<Vec<CString>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok((!names.is_empty()).then_some(names))
}

/// Removes an entry, unless it is a directory that is not empty.
fn unlink(at: &OwnedFd, name: &CStr) -> Result<bool, Errno> {
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        done => return done.map(|()| true),
    }
    match rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::ACCESS) => Ok(false),
        done => done.map(|()| true),
    }
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
    /// A directory that cannot be read is an error, because a guest could hide files there. The
    /// entries `skipped` of the directory itself do not count.
    pub fn add(
        &mut self,
        directory: impl AsFd,
        skipped: &[&CStr],
        within_limit: impl Fn(&Self) -> bool,
    ) -> io::Result<()> {
        let walked = walk(directory, |found| {
            let Found::Entry(entry) = found else {
                return ControlFlow::Break(Err(io::ErrorKind::PermissionDenied.into()));
            };
            if entry.depth == 0 && skipped.contains(&entry.name) {
                return ControlFlow::Continue(Next::Skip);
            }
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
