//! Walking a tree by descriptor.
//!
//! A walk visits entries in order of names, follows no link and does not recurse.

use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::error::PathContext;
use super::guest_root::{Step, too_large};
use super::temp_file::TEMP_PREFIX;

/// Maximum number of entries of one directory.
const NAMES_MAX: usize = 200_000;

/// Maximum bytes of the names held by a walk, over all its open directories.
pub(super) const NAMES_BYTES: usize = 32 << 20;

/// Maximum depth of a walk.
pub(super) const DEPTH_MAX: usize = 128;

/// An entry of the tree.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) dir: &'a OwnedFd,
    pub(super) name: &'a str,
    /// The path relative to the start of the walk.
    pub(super) path: String,
    pub(super) stat: Stat,
    /// 1 for the entries of the first directory.
    pub(super) depth: usize,
}

/// How a walk continues after an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WalkNext {
    /// Enters the entry, if it is a directory.
    Enter,
    /// Skips the contents of the entry.
    Skip,
    /// Ends the walk.
    Stop,
}

struct Level {
    dir: OwnedFd,
    prefix: String,
    names: std::vec::IntoIter<String>,
    /// The memory of the names.
    bytes: usize,
}

impl Level {
    /// Reads the names of a directory, which may take `room` bytes.
    fn new(dir: OwnedFd, prefix: String, path: &str, room: usize) -> Result<Self, BoxError> {
        let mut names = names(&dir, path, room)?;
        names.sort_unstable();
        Ok(Self {
            dir,
            prefix,
            bytes: names.iter().map(|name| name_cost(name)).sum(),
            names: names.into_iter(),
        })
    }
}

/// The memory of a name in the agent.
pub(super) fn name_cost(name: &str) -> usize {
    name.len() + size_of::<String>()
}

/// The names in a directory, if they fit into `room` bytes.
///
/// Temporary names of the agent and names that are not UTF-8 are omitted.
pub(super) fn names(dir: &OwnedFd, path: &str, mut room: usize) -> Result<Vec<String>, BoxError> {
    let mut names = Vec::new();
    let entries = Dir::read_from(dir).with_path(path)?;
    for entry in entries {
        let entry = entry.with_path(path)?;
        let Ok(name) = entry.file_name().to_str() else {
            continue;
        };
        if matches!(name, "." | "..") || name.starts_with(TEMP_PREFIX) {
            continue;
        }
        if names.len() == NAMES_MAX {
            return Err(too_large(
                "the number of entries in a directory",
                "directory_entries",
                NAMES_MAX,
            ));
        }
        let name = name.to_owned();
        let left = room.checked_sub(name_cost(&name));
        room =
            left.ok_or_else(|| too_large("the size of the names", "names_bytes", NAMES_BYTES))?;
        names.push(name);
    }
    Ok(names)
}

/// Visits everything below a directory, and returns whether the walk was complete.
///
/// Entries that vanish meanwhile or that the guest may not read are skipped.
pub(super) fn walk(
    step: &Step<'_>,
    dir: OwnedFd,
    path: &str,
    mut visit: impl FnMut(&Entry<'_>) -> Result<WalkNext, BoxError>,
) -> Result<bool, BoxError> {
    let mut levels = vec![Level::new(dir, String::new(), path, NAMES_BYTES)?];
    let mut complete = true;
    loop {
        step.cancel.check()?;
        let depth = levels.len();
        let Some(level) = levels.last_mut() else {
            return Ok(complete);
        };
        let Some(name) = level.names.next() else {
            levels.pop();
            continue;
        };
        let Ok(stat) = rustix::fs::statat(&level.dir, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let entry = Entry {
            dir: &level.dir,
            name: &name,
            path: if level.prefix.is_empty() {
                name.clone()
            } else {
                format!("{}/{name}", level.prefix)
            },
            stat,
            depth,
        };
        match visit(&entry)? {
            WalkNext::Stop => return Ok(false),
            WalkNext::Skip => continue,
            WalkNext::Enter => {}
        }
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_dir || step.guest_root.is_procfs(&stat) {
            continue;
        }
        if depth >= DEPTH_MAX {
            complete = false;
            continue;
        }
        let prefix = entry.path;
        match open_dir(&level.dir, &*name) {
            Ok(inner) => {
                let used: usize = levels.iter().map(|level| level.bytes).sum();
                let room = NAMES_BYTES.saturating_sub(used);
                levels.push(Level::new(inner, prefix, path, room)?);
            }
            Err(Errno::MFILE | Errno::NFILE) => return Err(Errno::MFILE).with_path(path),
            Err(_) => {}
        }
    }
}

/// Opens a directory in another one, without following a link.
pub(super) fn open_dir(dir: impl AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}
