//! Copies the private files of a box to a directory: a snapshot.
//!
//! # Reading order
//! 1. [`copy`] walks the files by descriptor. It follows no link and never leaves a directory
//!    upwards, because a guest chose every name.
//! 2. `file.rs` copies one file with its holes. `attributes.rs` copies owner, mode, times and
//!    extended attributes. `made.rs` keeps the times by which an apply finds conflicts.
//! 3. `merge.rs` copies the files of several layers to one.
//!
//! The copy is complete or an error: it never leaves out a file that it cannot read. The caller has
//! frozen the box. A copy has the owners that the files have in a box, so that it is a layer of
//! later boxes whatever ids they get.

mod attributes;
mod file;
mod merge;
mod version_times;

pub(crate) use merge::merge;
pub(crate) use version_times::{VersionTimes, nanos, now};

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{At, Error, Result};
use attributes::Attributes;
pub(crate) use file::Copier;

/// Deepest nesting of directories in a snapshot.
const DEPTH_MAX: usize = 512;

/// Entries between two looks at the caller.
const CHECK_EVERY: u64 = 256;

/// Limits of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLimits {
    /// Most bytes of all files, without holes.
    pub bytes: u64,
    /// Most files, directories and others.
    pub entries: u64,
}

/// Size of a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSize {
    /// Bytes of all files, without holes.
    pub bytes: u64,
    /// Files, directories and others.
    pub entries: u64,
}

/// How the owners of a box's files are stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owners {
    /// As the ids in the box: less the first id of boxes. For a server of root.
    OfBox {
        /// Id of the server's user namespace for id 0 of a box.
        base: u32,
        /// Number of ids of a box.
        count: u32,
    },
    /// As they are: all files belong to the user of the server.
    Same,
}

/// A directory whose entries are being copied.
struct Level {
    entries: Dir,
    from: OwnedFd,
    to: OwnedFd,
    stat: Stat,
    /// See [`VersionTimes`].
    made_at: Option<i64>,
}

/// Copies everything below a directory to another one, which is empty.
///
/// `is_cancelled` ends the copy early.
pub(crate) fn copy(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    owners: Owners,
    limits: SnapshotLimits,
    is_cancelled: &mut dyn FnMut() -> bool,
) -> Result<SnapshotSize> {
    let (from, to) = (open_dir(from, c".")?, open_dir(to, c".")?);
    let links = Links::new(&[from.as_fd()], &to)?;
    let mut copy = Copy::new(links, owners, limits, is_cancelled);
    copy.tree(from, to)?;
    Ok(copy.size)
}

/// Finds the time of the box's version of a file that is being copied.
type VersionTimeOf<'a> = dyn Fn(VersionTimes, &OwnedFd) -> Option<i64> + 'a;

/// A copy in progress.
struct Copy<'a> {
    links: Links,
    copier: Copier,
    attributes: Attributes,
    limits: SnapshotLimits,
    size: SnapshotSize,
    is_cancelled: &'a mut dyn FnMut() -> bool,
}

impl<'a> Copy<'a> {
    fn new(
        links: Links,
        owners: Owners,
        limits: SnapshotLimits,
        is_cancelled: &'a mut dyn FnMut() -> bool,
    ) -> Self {
        Self {
            links,
            copier: Copier::new(),
            attributes: Attributes::new(owners),
            limits,
            size: SnapshotSize::default(),
            is_cancelled,
        }
    }

    fn tree(&mut self, from: OwnedFd, to: OwnedFd) -> Result<()> {
        let made_at = self.attributes.made().at_top(&from, false);
        let mut levels = vec![Level::new(from, to, made_at)?];
        while let Some(level) = levels.last_mut() {
            let next = level.entries.next();
            let entry = next.transpose().at("read a directory of the box")?;
            let Some(entry) = entry else {
                // The times of a directory change with its entries.
                if levels.len() == 1 {
                    self.links.remove().at("remove the index of links")?;
                }
                let Some(level) = levels.pop() else {
                    break;
                };
                let stat = level.stat;
                let copied = self
                    .attributes
                    .copy(&level.from, &level.to, &stat, level.made_at);
                copied.at("set the attributes of a directory")?;
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.count()?;
            let below = self.entry(level, name)?;
            if let Some(below) = below {
                check_depth(levels.len())?;
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Counts an entry against the limits.
    fn count(&mut self) -> Result<()> {
        self.size.entries += 1;
        if self.size.entries > self.limits.entries {
            return Err(Error::Invalid(format!(
                "snapshot: more than {} files; remove some, or raise the limit",
                self.limits.entries
            )));
        }
        if self.size.entries.is_multiple_of(CHECK_EVERY) {
            self.look()?;
        }
        Ok(())
    }

    fn look(&mut self) -> Result<()> {
        if (self.is_cancelled)() {
            return Err(Errno::CANCELED).at("copy the files of the box");
        }
        Ok(())
    }

    /// Copies an entry. Returns a directory whose entries are next.
    fn entry(&mut self, level: &Level, name: &CStr) -> Result<Option<Level>> {
        let Level { from, to, .. } = level;
        let stat = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW)
            .at("read the metadata of a file")?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let (from, to) = (open_dir(from, name)?, new_dir(to, name)?);
                let made_at = self.attributes.made().at(&from).or(level.made_at);
                return Level::new(from, to, made_at).map(Some);
            }
            _ => self.other((from, to), name, &stat, &|made, file| {
                made.at(file).or(level.made_at)
            })?,
        }
        Ok(None)
    }

    /// Copies anything but a directory.
    fn other(
        &mut self,
        (from, to): (&OwnedFd, &OwnedFd),
        name: &CStr,
        stat: &Stat,
        made_at: &VersionTimeOf<'_>,
    ) -> Result<()> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file((from, to), name, stat, made_at)?,
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new()).at("read a link")?;
                rustix::fs::symlinkat(target, to, name).at("create a link")?;
                self.attributes
                    .copy_to_name(to, name, stat)
                    .at("set the attributes of a link")?;
            }
            kind @ (FileType::Fifo | FileType::Socket) => {
                self.node(to, name, kind, stat)?;
            }
            // The mark of an overlay for a removed file.
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                self.node(to, name, FileType::CharacterDevice, stat)?;
            }
            // No guest can create one.
            _ => return Err(Error::Invalid("snapshot: the box contains a device".into())),
        }
        Ok(())
    }

    fn node(&self, to: &OwnedFd, name: &CStr, kind: FileType, stat: &Stat) -> Result<()> {
        rustix::fs::mknodat(to, name, kind, Mode::RUSR, 0).at("create a special file")?;
        let done = self.attributes.copy_to_name(to, name, stat);
        done.at("set the attributes of a special file")
    }

    fn file(
        &mut self,
        (from_dir, to_dir): (&OwnedFd, &OwnedFd),
        name: &CStr,
        stat: &Stat,
        made_at: &VersionTimeOf<'_>,
    ) -> Result<()> {
        if stat.st_nlink > 1 && self.links.link(stat, to_dir, name)? {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let from = open_below(from_dir, name, flags).at("open a file of the box")?;
        let stat = rustix::fs::fstat(&from)
            .ok()
            .filter(|now| now.st_ino == stat.st_ino && now.st_dev == stat.st_dev)
            .ok_or(Errno::STALE)
            .at("open a file of the box")?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let to = rustix::fs::openat(to_dir, name, flags, Mode::RUSR | Mode::WUSR);
        let to = to.at("create a file")?;
        let mut step = |bytes: u64| {
            self.size.bytes = self.size.bytes.saturating_add(bytes);
            if self.size.bytes > self.limits.bytes {
                return Err(Error::Invalid(format!(
                    "snapshot: the files have more than {} bytes; remove some, or raise the limit",
                    self.limits.bytes
                )));
            }
            if (self.is_cancelled)() {
                return Err(Errno::CANCELED).at("copy the files of the box");
            }
            Ok(())
        };
        self.copier.copy(&from, &to, &stat, &mut step)?;
        let made_at = made_at(self.attributes.made(), &from);
        let done = self.attributes.copy(&from, &to, &stat, made_at);
        done.at("set the attributes of a file")?;
        if stat.st_nlink > 1 {
            self.links.add(&stat, to_dir, name)?;
        }
        Ok(())
    }
}

impl Level {
    fn new(from: OwnedFd, to: OwnedFd, made_at: Option<i64>) -> Result<Self> {
        let stat = rustix::fs::fstat(&from).at("read the metadata of a directory")?;
        let entries = Dir::read_from(&from).at("read a directory of the box")?;
        Ok(Self {
            entries,
            from,
            to,
            stat,
            made_at,
        })
    }
}

fn check_depth(depth: usize) -> Result<()> {
    if depth < DEPTH_MAX {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "snapshot: directories are nested deeper than {DEPTH_MAX}"
    )))
}

/// Creates and opens a directory.
fn new_dir(at: &OwnedFd, name: &CStr) -> Result<OwnedFd> {
    rustix::fs::mkdirat(at, name, Mode::RWXU).at("create a directory")?;
    open_dir(at, name)
}

/// Opens a directory below another one.
fn open_dir(at: impl AsFd, name: &CStr) -> Result<OwnedFd> {
    open_below(at, name, OFlags::RDONLY | OFlags::DIRECTORY).at("open a directory")
}

/// Opens a name of a directory, on the same file system and without following a link.
pub(crate) fn open_below(
    at: impl AsFd,
    name: impl rustix::path::Arg,
    flags: OFlags,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(
        at,
        name,
        flags,
        Mode::empty(),
        resolve,
    )?)
}

/// The files with several names that have been copied, by their number.
///
/// They are in a directory of the copy, because a guest may have millions of them.
struct Links {
    parent: OwnedFd,
    name: CString,
    directory: OwnedFd,
}

impl Links {
    /// Creates the directory under a name that none of the sources has.
    fn new(from: &[BorrowedFd<'_>], to: &OwnedFd) -> Result<Self> {
        let lacks = |from: &BorrowedFd<'_>, name: &CStr| {
            let found = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW);
            matches!(found, Err(Errno::NOENT))
        };
        let free = (0..).find_map(|n: u64| {
            let name = CString::new(format!(".links-{n}")).ok()?;
            from.iter().all(|from| lacks(from, &name)).then_some(name)
        });
        let name = free.unwrap_or_default();
        rustix::fs::mkdirat(to, &*name, Mode::RWXU).at("create the index of links")?;
        Ok(Self {
            directory: open_dir(to, &name)?,
            parent: to.try_clone().at("duplicate")?,
            name,
        })
    }

    fn of(stat: &Stat) -> String {
        format!("{}-{}", stat.st_dev, stat.st_ino)
    }

    /// Links a name to a file that was copied before. Returns whether it was.
    fn link(&self, stat: &Stat, to: &OwnedFd, name: &CStr) -> Result<bool> {
        match rustix::fs::linkat(&self.directory, Self::of(stat), to, name, AtFlags::empty()) {
            // The second: the file system of the copy permits fewer names of a file. The content is
            // complete in any case.
            Err(Errno::NOENT | Errno::MLINK) => Ok(false),
            linked => linked.map(|()| true).at("create another name of a file"),
        }
    }

    /// Adds a file that has been copied.
    fn add(&self, stat: &Stat, to: &OwnedFd, name: &CStr) -> Result<()> {
        match rustix::fs::linkat(to, name, &self.directory, Self::of(stat), AtFlags::empty()) {
            Err(Errno::EXIST) => Ok(()),
            added => added.at("add a file to the index of links"),
        }
    }

    fn remove(&self) -> io::Result<()> {
        for entry in Dir::read_from(&self.directory)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                rustix::fs::unlinkat(&self.directory, entry.file_name(), AtFlags::empty())?;
            }
        }
        Ok(rustix::fs::unlinkat(
            &self.parent,
            &*self.name,
            AtFlags::REMOVEDIR,
        )?)
    }
}

#[cfg(test)]
mod tests;
