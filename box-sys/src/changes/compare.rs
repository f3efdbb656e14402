//! Walks what can differ between two views of a directory, in the order of the names.
//!
//! A view is a stack of directories with the rules of an overlay: the topmost one that has a name
//! decides, a mark hides the name in all below it, and directories are merged down to an opaque
//! one. Only directories that belong to one of the views, not to both, contain differences. The
//! walk therefore visits the names of those, never a whole image.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::times::Times;
use super::{ChangeKind, Comparison, Relation, Selection, as_path, open_dir};
use crate::error::{At, Error, Result};
use crate::snapshot::open_below;

/// Deepest nesting of directories.
const DEPTH_MAX: usize = 512;

/// Names of one directory that are held at once.
const BATCH: usize = 1024;

/// Bytes of a file that are compared at once.
const PIECE: usize = 256 << 10;

/// A directory of one view or of both.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) directory: OwnedFd,
    pub(crate) in_new: bool,
    pub(crate) in_old: bool,
    /// Whether it is a copy of private files.
    pub(crate) is_copy: bool,
}

/// Two views of a directory.
pub(crate) struct Views<'a> {
    pub(crate) comparison: &'a Comparison,
    pub(crate) selection: &'a Selection,
    /// The directories, the topmost first.
    pub(crate) parts: Vec<Part>,
    /// The workspace, if it is below the compared directory: its path there and its directory.
    pub(crate) workspace: Option<(&'a Path, &'a OwnedFd)>,
    /// Name of the attribute of directories that hide those below them.
    pub(crate) opaque: &'static str,
    /// Set if the times of the box's versions are wanted.
    pub(crate) times: Option<Times>,
    /// Whether the caller has stopped to wait.
    pub(crate) is_cancelled: &'a dyn Fn() -> bool,
}

/// A file of one view.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<'a> {
    pub(crate) directory: BorrowedFd<'a>,
    pub(crate) name: &'a CStr,
    pub(crate) stat: Stat,
}

impl Entry<'_> {
    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }
}

/// A difference.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    /// Path below the compared directory.
    pub(crate) path: &'a [u8],
    pub(crate) kind: ChangeKind,
    /// The file in the new view, unless it was deleted.
    pub(crate) new: Option<Entry<'a>>,
    /// The file in the old view, unless it was added.
    pub(crate) old: Option<Entry<'a>>,
    /// When the box made its own version, or earlier, in nanoseconds since 1970. 0 if not wanted.
    pub(crate) made_at: i64,
}

/// Whether the walk continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Walk {
    Continue,
    /// Not with what is below the directory.
    Skip,
    End,
}

/// What one view has under a name.
#[derive(Debug, Clone)]
enum Seen {
    Nothing,
    /// Not a directory: index of its part.
    File(usize, Stat),
    /// Directories that are merged: indices of their parts.
    Directory(Vec<usize>, Stat),
}

impl Seen {
    /// The topmost part that has it.
    fn part(&self) -> Option<usize> {
        match self {
            Self::Nothing => None,
            Self::File(part, _) => Some(*part),
            Self::Directory(parts, _) => parts.first().copied(),
        }
    }
}

/// A directory whose names are being visited.
pub(super) struct Level {
    pub(super) parts: Vec<Part>,
    names: std::vec::IntoIter<CString>,
    /// Last name of the batch, if more may follow.
    next_after: Option<CString>,
    /// Number of directories above this one, and length of its path.
    depth: usize,
    path_length: usize,
    /// Whether the path is the beginning of the path after which the walk begins.
    on_start: bool,
    /// The box made no version of a file here before this time.
    pub(super) made_at: i64,
    /// Whether a directory above hides others, whose files the box may have changed earlier.
    pub(super) hides: bool,
}

impl Views<'_> {
    /// Visits the differences after this path, in the order of their paths.
    pub(crate) fn walk(
        mut self,
        after: Option<&[u8]>,
        visit: &mut dyn FnMut(&Found<'_>) -> Result<Walk>,
    ) -> Result<()> {
        let start: Vec<&[u8]> = match after {
            Some(path) => path.split(|byte| *byte == b'/').collect(),
            None => Vec::new(),
        };
        let parts = std::mem::take(&mut self.parts);
        let mut path = Vec::new();
        let made_at = self.made_at_top(&parts)?;
        let mut levels = vec![Level::new(parts, (0, 0), after.is_some(), (made_at, false))];
        while let Some(level) = levels.last_mut() {
            let at = level.depth;
            let first = level.on_start.then(|| start.get(at).copied()).flatten();
            let Some(name) = level.next_name(first)? else {
                levels.pop();
                continue;
            };
            if (self.is_cancelled)() {
                return Err(Errno::CANCELED).at("compare the files of the box");
            }
            path.truncate(level.path_length);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            // The directories of the path after which the walk begins, and the path itself.
            let was_visited = first == Some(name.to_bytes());
            let on_start = was_visited && at + 1 < start.len();
            let (walk, below) = self.name(level, &name, &path, was_visited, on_start, visit)?;
            if walk == Walk::End {
                return Ok(());
            }
            if let Some(below) = below {
                if levels.len() == DEPTH_MAX {
                    return Err(Error::Invalid(format!(
                        "directories are nested deeper than {DEPTH_MAX}"
                    )));
                }
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Compares what the views have under a name. Returns a directory to enter.
    fn name(
        &self,
        level: &Level,
        name: &CStr,
        path: &[u8],
        was_visited: bool,
        on_start: bool,
        visit: &mut dyn FnMut(&Found<'_>) -> Result<Walk>,
    ) -> Result<(Walk, Option<Level>)> {
        let relation = self.selection.relation(path);
        let is = |paths: &[std::path::PathBuf]| paths.iter().any(|other| other == as_path(path));
        if relation == Relation::Outside || is(&self.comparison.hidden) {
            return Ok((Walk::Continue, None));
        }
        let mut opened = Opened::new(&level.parts, name, self.opaque)?;
        let old = opened.see(|part| part.in_old)?;
        let new = opened.see(|part| part.in_new)?;
        let entry = |seen: &Seen| {
            let (Seen::File(_, stat) | Seen::Directory(_, stat)) = seen else {
                return None;
            };
            let (directory, stat) = (level.parts.get(seen.part()?)?.directory.as_fd(), *stat);
            Some(Entry {
                directory,
                name,
                stat,
            })
        };
        let (new_entry, old_entry) = (entry(&new), entry(&old));
        let kind = match (&new_entry, &old_entry) {
            (None, None) => return Ok((Walk::Continue, None)),
            (Some(_), None) => Some(ChangeKind::Added),
            (None, Some(_)) => Some(ChangeKind::Deleted),
            // Both views have the file of one layer.
            (Some(_), Some(_)) if new.part() == old.part() => None,
            (Some(new), Some(old)) => (!self.is_equal(new, old)?).then_some(ChangeKind::Changed),
        };
        let made = kind == Some(ChangeKind::Added)
            && matches!(new, Seen::Directory(..))
            && is(&self.comparison.made);
        let mut walk = Walk::Continue;
        if let Some(kind) = kind.filter(|_| relation == Relation::Inside && !was_visited && !made) {
            walk = visit(&Found {
                path,
                kind,
                new: new_entry,
                old: old_entry,
                made_at: self.made_at(level, &opened),
            })?;
        }
        let Seen::Directory(new_parts, _) = &new else {
            // The files below a deleted directory are deleted with it.
            return Ok((walk, None));
        };
        if walk != Walk::Continue {
            return Ok((walk, None));
        }
        let old_parts: &[usize] = match &old {
            Seen::Directory(parts, _) => parts,
            _ => &[],
        };
        let made_at = self.made_at(level, &opened);
        // As an opaque directory does.
        let hides = level.hides || opened.any_but(new_parts);
        let mut parts = Vec::new();
        for at in 0..level.parts.len() {
            let (in_new, in_old) = (new_parts.contains(&at), old_parts.contains(&at));
            if let Some(directory) = opened.take(at).filter(|_| in_new || in_old) {
                parts.push(Part {
                    directory,
                    in_new,
                    in_old,
                    is_copy: level.parts.get(at).is_some_and(|part| part.is_copy),
                });
            }
        }
        if let Some((at, workspace)) = self.workspace
            && at == as_path(path)
        {
            parts.push(Part {
                directory: open_dir(workspace, b"").at("open the workspace")?,
                in_new: true,
                in_old: true,
                is_copy: false,
            });
        }
        let is_same = parts.iter().all(|part| part.in_new && part.in_old);
        let below = (!is_same).then(|| {
            let place = (level.depth + 1, path.len());
            Level::new(parts, place, on_start, (made_at, hides))
        });
        Ok((walk, below))
    }

    /// Whether two files have the same type, mode, content and link target.
    fn is_equal(&self, new: &Entry<'_>, old: &Entry<'_>) -> Result<bool> {
        let bits = if self.comparison.special_modes {
            0o7777
        } else {
            0o777
        };
        let kind = new.kind();
        if kind != old.kind() {
            return Ok(false);
        }
        let same_mode = new.stat.st_mode & bits == old.stat.st_mode & bits;
        Ok(match kind {
            FileType::Symlink => {
                let target = |entry: &Entry<'_>| {
                    rustix::fs::readlinkat(entry.directory, entry.name, Vec::new())
                };
                matches!((target(new), target(old)), (Ok(new), Ok(old)) if new == old)
            }
            FileType::RegularFile => {
                same_mode
                    && new.stat.st_size == old.stat.st_size
                    && (new.stat.st_size == 0 || self.has_same_content(new, old)?)
            }
            FileType::CharacterDevice | FileType::BlockDevice => {
                same_mode && new.stat.st_rdev == old.stat.st_rdev
            }
            _ => same_mode,
        })
    }

    fn has_same_content(&self, new: &Entry<'_>, old: &Entry<'_>) -> Result<bool> {
        let open = |entry: &Entry<'_>| {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK;
            let file = open_below(entry.directory, entry.name, flags).ok()?;
            let stat = rustix::fs::fstat(&file).ok()?;
            (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(file)
        };
        // A file that cannot be read is not known to be equal.
        let (Some(new), Some(old)) = (open(new), open(old)) else {
            return Ok(false);
        };
        let (mut one, mut other) = (vec![0; PIECE], vec![0; PIECE]);
        let mut at = 0;
        loop {
            if (self.is_cancelled)() {
                return Err(Errno::CANCELED).at("compare the files of the box");
            }
            // What is a hole in both files is equal.
            let data = [&new, &old].map(|file| next_data(file, at));
            let Some(next) = data.into_iter().flatten().min() else {
                return Ok(true);
            };
            at = at.max(next);
            let (Ok(one), Ok(other)) = (read_at(&new, &mut one, at), read_at(&old, &mut other, at))
            else {
                return Ok(false);
            };
            if one != other {
                return Ok(false);
            }
            if one.is_empty() {
                return Ok(true);
            }
            at += one.len() as u64;
        }
    }
}

/// The next position of a file that is not in a hole, if one follows.
fn next_data(file: &OwnedFd, at: u64) -> Option<u64> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(next) => Some(next),
        Err(Errno::NXIO) => None,
        // A file system that knows no holes.
        Err(_) => Some(at),
    }
}

/// Fills a buffer, except at the end of the file.
fn read_at<'a>(file: &OwnedFd, buffer: &'a mut [u8], at: u64) -> io::Result<&'a [u8]> {
    let mut length = 0;
    while length < buffer.len() {
        let rest = buffer.get_mut(length..).unwrap_or_default();
        let read =
            rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *rest, at + length as u64))?;
        if read == 0 {
            break;
        }
        length += read;
    }
    Ok(buffer.get(..length).unwrap_or_default())
}

impl Level {
    fn new(
        parts: Vec<Part>,
        (depth, path_length): (usize, usize),
        on_start: bool,
        (made_at, hides): (i64, bool),
    ) -> Self {
        Self {
            parts,
            depth,
            names: Vec::new().into_iter(),
            next_after: Some(CString::default()),
            path_length,
            on_start,
            made_at,
            hides,
        }
    }

    /// The next name, in order, beginning with `first`.
    fn next_name(&mut self, first: Option<&[u8]>) -> Result<Option<CString>> {
        loop {
            if let Some(name) = self.names.next() {
                return Ok(Some(name));
            }
            let Some(after) = self.next_after.take() else {
                return Ok(None);
            };
            let is_first = after.is_empty();
            let wanted = |name: &[u8]| match first.filter(|_| is_first) {
                Some(first) => name >= first,
                None => name > after.to_bytes(),
            };
            let mut names = BTreeSet::new();
            for part in self.parts.iter().filter(|part| part.in_new != part.in_old) {
                let directory = open_dir(&part.directory, b"");
                let entries = directory.and_then(|directory| Ok(Dir::new(directory)?));
                for entry in entries.at("read a directory of the box")? {
                    let entry = entry.at("read a directory of the box")?;
                    let name = entry.file_name();
                    if matches!(name.to_bytes(), b"." | b"..") || !wanted(name.to_bytes()) {
                        continue;
                    }
                    names.insert(name.to_owned());
                    if names.len() > BATCH {
                        names.pop_last();
                    }
                }
            }
            if names.len() == BATCH {
                self.next_after = names.last().cloned();
            }
            if names.is_empty() {
                return Ok(None);
            }
            self.names = names.into_iter().collect::<Vec<_>>().into_iter();
        }
    }
}

/// The parts of a directory under one name.
pub(super) struct Opened<'a> {
    parts: &'a [Part],
    pub(super) name: &'a CStr,
    opaque: &'static str,
    pub(super) stats: Vec<Option<Stat>>,
    directories: Vec<Option<OwnedFd>>,
}

impl<'a> Opened<'a> {
    fn new(parts: &'a [Part], name: &'a CStr, opaque: &'static str) -> Result<Self> {
        let mut stats = Vec::with_capacity(parts.len());
        for part in parts {
            let stat = rustix::fs::statat(&part.directory, name, AtFlags::SYMLINK_NOFOLLOW);
            stats.push(match stat {
                Ok(stat) => Some(stat),
                Err(Errno::NOENT) => None,
                Err(error) => return Err(error).at("read the metadata of a file"),
            });
        }
        Ok(Self {
            parts,
            name,
            opaque,
            directories: (0..parts.len()).map(|_| None).collect(),
            stats,
        })
    }

    /// What a view has under the name.
    fn see(&mut self, is_in: impl Fn(&Part) -> bool) -> Result<Seen> {
        let (mut merged, mut first) = (Vec::new(), None);
        for (at, part) in self.parts.iter().enumerate() {
            let Some(stat) = self
                .stats
                .get(at)
                .copied()
                .flatten()
                .filter(|_| is_in(part))
            else {
                continue;
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind != FileType::Directory {
                let is_mark = kind == FileType::CharacterDevice && stat.st_rdev == 0;
                match (merged.is_empty(), is_mark) {
                    (true, true) => return Ok(Seen::Nothing),
                    (true, false) => return Ok(Seen::File(at, stat)),
                    // It is below a directory.
                    (false, _) => break,
                }
            }
            let directory = match open_dir(&part.directory, self.name.to_bytes()) {
                // The guest or a user of the host has replaced it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                directory => directory.at("open a directory of the box")?,
            };
            let is_opaque = is_opaque(&directory, self.opaque);
            if let Some(place) = self.directories.get_mut(at) {
                *place = Some(directory);
            }
            first.get_or_insert(stat);
            merged.push(at);
            if is_opaque {
                break;
            }
        }
        Ok(first.map_or(Seen::Nothing, |stat| Seen::Directory(merged, stat)))
    }

    /// Whether parts other than these have the name.
    fn any_but(&self, parts: &[usize]) -> bool {
        let mut found = self.stats.iter().enumerate();
        found.any(|(at, stat)| stat.is_some() && !parts.contains(&at))
    }

    fn take(&mut self, at: usize) -> Option<OwnedFd> {
        self.directories.get_mut(at)?.take()
    }
}

/// Whether a directory hides those below it.
pub(crate) fn is_opaque(directory: &OwnedFd, attribute: &str) -> bool {
    let mut value = [0; 1];
    let length = rustix::fs::fgetxattr(directory, attribute, &mut value);
    matches!((length, value), (Ok(1), [b'y']))
}
