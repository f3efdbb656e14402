//! Walking a tree by descriptor: in order of names, through no link, without recursion.

use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::draft::HIDDEN;
use super::error::About;
use super::ground::{Step, too_large};

/// Names of one directory that are sorted at once.
const NAMES: usize = 200_000;

/// Bytes that the names of a walk may take at once: those of every directory it is in.
pub(super) const NAMES_BYTES: usize = 32 << 20;

/// Directories within each other that are walked.
const DEPTH: usize = 128;

/// Something in the tree.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) dir: &'a OwnedFd,
    pub(super) name: &'a str,
    /// Below the beginning of the walk.
    pub(super) path: String,
    pub(super) stat: Stat,
    /// 1 for what is in the first directory.
    pub(super) depth: usize,
}

/// How a walk goes on after an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Into it, if it is a directory.
    Into,
    /// Past it.
    Past,
    /// Not at all.
    Stop,
}

struct Level {
    dir: OwnedFd,
    prefix: String,
    names: std::vec::IntoIter<String>,
    /// What they take.
    bytes: usize,
}

impl Level {
    /// The names of a directory, which may take so many bytes.
    fn new(dir: OwnedFd, prefix: String, path: &str, room: usize) -> Result<Self, BoxError> {
        let mut names = names(&dir, path, room)?;
        names.sort_unstable();
        Ok(Self {
            dir,
            prefix,
            bytes: names.iter().map(|name| taken(name)).sum(),
            names: names.into_iter(),
        })
    }
}

/// What a name takes of the agent's memory.
pub(super) fn taken(name: &str) -> usize {
    name.len() + size_of::<String>()
}

/// The names in a directory, but for those of ours, if they take no more bytes than this. What is not text cannot be asked for,
/// and is left out.
pub(super) fn names(dir: &OwnedFd, path: &str, mut room: usize) -> Result<Vec<String>, BoxError> {
    let mut names = Vec::new();
    let entries = Dir::read_from(dir).about(path)?;
    for entry in entries {
        let entry = entry.about(path)?;
        let Ok(name) = entry.file_name().to_str() else {
            continue;
        };
        if matches!(name, "." | "..") || name.starts_with(HIDDEN) {
            continue;
        }
        if names.len() == NAMES {
            return Err(too_large(
                "a directory's entries",
                "directory_entries",
                NAMES,
            ));
        }
        let name = name.to_owned();
        let left = room.checked_sub(taken(&name));
        room = left.ok_or_else(|| too_large("the names", "names_bytes", NAMES_BYTES))?;
        names.push(name);
    }
    Ok(names)
}

/// Visits everything below a directory. What vanishes meanwhile, or may not be looked into, is passed over. Whether it was
/// walked to its end.
pub(super) fn walk(
    step: &Step<'_>,
    dir: OwnedFd,
    path: &str,
    mut visit: impl FnMut(&Entry<'_>) -> Result<Next, BoxError>,
) -> Result<bool, BoxError> {
    let mut levels = vec![Level::new(dir, String::new(), path, NAMES_BYTES)?];
    let mut whole = true;
    loop {
        step.wanted.check()?;
        let depth = levels.len();
        let Some(level) = levels.last_mut() else {
            return Ok(whole);
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
            Next::Stop => return Ok(false),
            Next::Past => continue,
            Next::Into => {}
        }
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_dir || step.ground.is_procfs(&stat) {
            continue;
        }
        if depth >= DEPTH {
            whole = false;
            continue;
        }
        let prefix = entry.path;
        match open_dir(&level.dir, &*name) {
            Ok(inner) => {
                let held: usize = levels.iter().map(|level| level.bytes).sum();
                let room = NAMES_BYTES.saturating_sub(held);
                levels.push(Level::new(inner, prefix, path, room)?);
            }
            Err(Errno::MFILE | Errno::NFILE) => return Err(Errno::MFILE).about(path),
            Err(_) => {}
        }
    }
}

/// Opens a directory in another, if it is one.
pub(super) fn open_dir(dir: impl AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}
