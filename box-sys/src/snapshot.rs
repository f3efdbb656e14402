//! Copies the private files of a box to a directory: a snapshot.
//!
//! # Reading order
//! 1. [`copy`] walks the files by descriptor. It follows no link and never leaves a directory
//!    upwards, because a guest chose every name.
//! 2. `file.rs` copies one file with its holes. `attributes.rs` copies owner, mode, times and
//!    extended attributes.
//!
//! The copy is complete or an error: it never leaves out a file that it cannot read. The caller has
//! frozen the box. A copy has the owners that the files have in a box, so that it is a layer of
//! later boxes whatever ids they get.

mod attributes;
mod file;

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{At, Error, Result};
use attributes::Attributes;
use file::Copier;

/// Deepest nesting of directories in a snapshot.
const DEPTH_MAX: usize = 512;

/// Entries between two looks at the caller.
const LOOK_EVERY: u64 = 256;

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
    let mut copy = Copy {
        links: Links::new(&from, &to)?,
        copier: Copier::new(),
        attributes: Attributes::new(owners),
        limits,
        size: SnapshotSize::default(),
        is_cancelled,
    };
    copy.tree(from, to)?;
    Ok(copy.size)
}

/// A copy in progress.
struct Copy<'a> {
    links: Links,
    copier: Copier,
    attributes: Attributes,
    limits: SnapshotLimits,
    size: SnapshotSize,
    is_cancelled: &'a mut dyn FnMut() -> bool,
}

impl Copy<'_> {
    fn tree(&mut self, from: OwnedFd, to: OwnedFd) -> Result<()> {
        let mut levels = vec![Level::new(from, to)?];
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
                let done = self.attributes.copy(&level.from, &level.to, &stat);
                done.at("set the attributes of a directory")?;
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.count()?;
            let below = self.entry(level, name)?;
            if let Some(below) = below {
                if levels.len() == DEPTH_MAX {
                    return Err(Error::Invalid(format!(
                        "snapshot: directories are nested deeper than {DEPTH_MAX}"
                    )));
                }
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
        if self.size.entries.is_multiple_of(LOOK_EVERY) {
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
                rustix::fs::mkdirat(to, name, Mode::RWXU).at("create a directory")?;
                let (from, to) = (open_dir(from, name)?, open_dir(to, name)?);
                return Level::new(from, to).map(Some);
            }
            FileType::RegularFile => self.file(level, name, &stat)?,
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new()).at("read a link")?;
                rustix::fs::symlinkat(target, to, name).at("create a link")?;
                self.attributes
                    .copy_to_name(to, name, &stat)
                    .at("set the attributes of a link")?;
            }
            kind @ (FileType::Fifo | FileType::Socket) => {
                self.node(to, name, kind, &stat)?;
            }
            // The mark of an overlay for a removed file.
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                self.node(to, name, FileType::CharacterDevice, &stat)?;
            }
            // No guest can create one.
            _ => return Err(Error::Invalid("snapshot: the box contains a device".into())),
        }
        Ok(None)
    }

    fn node(&self, to: &OwnedFd, name: &CStr, kind: FileType, stat: &Stat) -> Result<()> {
        rustix::fs::mknodat(to, name, kind, Mode::RUSR, 0).at("create a special file")?;
        let done = self.attributes.copy_to_name(to, name, stat);
        done.at("set the attributes of a special file")
    }

    fn file(&mut self, level: &Level, name: &CStr, stat: &Stat) -> Result<()> {
        if stat.st_nlink > 1 && self.links.link(stat, &level.to, name)? {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let from = open_below(&level.from, name, flags).at("open a file of the box")?;
        let stat = rustix::fs::fstat(&from)
            .ok()
            .filter(|now| now.st_ino == stat.st_ino && now.st_dev == stat.st_dev)
            .ok_or(Errno::STALE)
            .at("open a file of the box")?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let to = rustix::fs::openat(&level.to, name, flags, Mode::RUSR | Mode::WUSR);
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
        let done = self.attributes.copy(&from, &to, &stat);
        done.at("set the attributes of a file")?;
        if stat.st_nlink > 1 {
            self.links.add(&stat, &level.to, name)?;
        }
        Ok(())
    }
}

impl Level {
    fn new(from: OwnedFd, to: OwnedFd) -> Result<Self> {
        let stat = rustix::fs::fstat(&from).at("read the metadata of a directory")?;
        let entries = Dir::read_from(&from).at("read a directory of the box")?;
        Ok(Self {
            entries,
            from,
            to,
            stat,
        })
    }
}

/// Opens a directory below another one.
fn open_dir(at: impl AsFd, name: &CStr) -> Result<OwnedFd> {
    open_below(at, name, OFlags::RDONLY | OFlags::DIRECTORY).at("open a directory")
}

/// Opens a name of a directory, on the same file system and without following a link.
fn open_below(at: impl AsFd, name: &CStr, flags: OFlags) -> io::Result<OwnedFd> {
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
    /// Creates the directory under a name that the box does not have.
    fn new(from: &OwnedFd, to: &OwnedFd) -> Result<Self> {
        let free = (0..).find_map(|n: u64| {
            let name = CString::new(format!(".links-{n}")).ok()?;
            let found = rustix::fs::statat(from, &*name, AtFlags::SYMLINK_NOFOLLOW);
            matches!(found, Err(Errno::NOENT)).then_some(name)
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
        stat.st_ino.to_string()
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
