//! Merges layers: one directory with what an overlay of several directories shows.
//!
//! The topmost layer that has a name decides about it. Directories of several layers become one,
//! down to a directory that hides the layers below (opaque), a mark of a removed file (whiteout) or
//! a file. The result is a layer as well: it has the marks that hide files of lower layers which
//! are not merged.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, OFlags, Stat, XattrFlags};
use rustix::io::Errno;

use super::{
    Copy, Links, Owners, SnapshotLimits, SnapshotSize, VersionTimes, check_depth, new_dir,
    open_below, open_dir,
};
use crate::error::{At, Result};

/// Value of the mark of a directory that hides the layers below.
const OPAQUE: &[u8] = b"y";

/// Copies the files of layers, the topmost first, to an empty directory.
///
/// `is_cancelled` ends the copy early.
pub(crate) fn merge(
    layers: &[OwnedFd],
    to: BorrowedFd<'_>,
    owners: Owners,
    limits: SnapshotLimits,
    is_cancelled: &mut dyn FnMut() -> bool,
) -> Result<SnapshotSize> {
    let roots: Result<Vec<_>> = layers.iter().map(|layer| open_dir(layer, c".")).collect();
    let (roots, to) = (roots?, open_dir(to, c".")?);
    let sources: Vec<_> = roots.iter().map(AsFd::as_fd).collect();
    let links = Links::new(&sources, &to)?;
    let mut merge = Merge {
        copy: Copy::new(links, owners, limits, is_cancelled),
    };
    let made = merge.copy.attributes.made();
    let times = roots.iter().map(|root| made.at_top(root, false));
    // Unknown if one of them is.
    let made_at = times.min().flatten();
    merge.tree(Level::new(roots, to, false, made_at)?)?;
    Ok(merge.copy.size)
}

/// A directory that is being merged.
struct Level {
    /// The directories of the layers that have it, the topmost first.
    sources: Vec<OwnedFd>,
    /// The source whose entries are being copied, and the rest of them.
    at: usize,
    entries: Dir,
    to: OwnedFd,
    /// Whether the result is marked, so that it hides the layers below.
    is_opaque: bool,
    /// Whether it or a parent hides the layers below.
    hides_below: bool,
    /// Whether the result has marks of removed files.
    has_whiteouts: bool,
    /// The box made no version of a file here before this time.
    made_at: Option<i64>,
}

impl Level {
    fn new(
        sources: Vec<OwnedFd>,
        to: OwnedFd,
        is_opaque: bool,
        made_at: Option<i64>,
    ) -> Result<Self> {
        let first = sources.first().ok_or(Errno::NOENT).at("merge no layers")?;
        let entries = Dir::read_from(first).at("read a directory of a layer")?;
        Ok(Self {
            sources,
            at: 0,
            entries,
            to,
            is_opaque,
            hides_below: is_opaque,
            has_whiteouts: false,
            made_at,
        })
    }

    /// Begins with the entries of the next source. Returns `false` after the last.
    fn next_source(&mut self) -> Result<bool> {
        let Some(next) = self.sources.get(self.at + 1) else {
            return Ok(false);
        };
        self.entries = Dir::read_from(next).at("read a directory of a layer")?;
        self.at += 1;
        Ok(true)
    }

    /// The source whose entries are being copied.
    fn source(&self) -> Result<&OwnedFd> {
        let source = self.sources.get(self.at);
        source.ok_or(Errno::NOENT).at("find a directory of a layer")
    }

    /// When the box made its own version under a name, or an earlier time: that of the lowest layer.
    ///
    /// The box may have changed a hidden file even earlier, so the time of the directory counts then.
    fn made_at(&self, name: &CStr, made: VersionTimes) -> Result<Option<i64>> {
        let mut earliest = None::<Option<i64>>;
        for source in self
            .sources
            .iter()
            .skip(self.at)
            .filter(|_| !self.hides_below)
        {
            let Some(stat) = stat_of(source, name)? else {
                continue;
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            let file = if kind.is_file() || kind.is_dir() {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK;
                Some(open_below(source, name, flags).at("open a file of a layer")?)
            } else {
                None
            };
            let taken = file.as_ref().and_then(|file| made.taken(file));
            let made_at = taken.or_else(|| file.and_then(|file| made.at(&file)));
            let made_at = made_at.or(self.made_at);
            earliest = Some(earliest.map_or(made_at, |earliest| earliest.min(made_at)));
            if taken.is_some() {
                break;
            }
        }
        Ok(earliest.unwrap_or(self.made_at))
    }

    /// Whether a layer above the current one has decided about a name.
    fn is_decided(&self, name: &CStr) -> Result<bool> {
        for above in self.sources.iter().take(self.at) {
            if stat_of(above, name)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A merge in progress.
struct Merge<'a> {
    copy: Copy<'a>,
}

impl Merge<'_> {
    fn tree(&mut self, root: Level) -> Result<()> {
        let mut levels = vec![root];
        while let Some(level) = levels.last_mut() {
            let next = level.entries.next();
            let entry = next.transpose().at("read a directory of a layer")?;
            let Some(entry) = entry else {
                if level.next_source()? {
                    continue;
                }
                if levels.len() == 1 {
                    let removed = self.copy.links.remove();
                    removed.at("remove the index of links")?;
                }
                if let Some(level) = levels.pop() {
                    self.finish(&level)?;
                }
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") || level.is_decided(name)? {
                continue;
            }
            if let Some(below) = self.entry(level, name)? {
                check_depth(levels.len())?;
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Sets the attributes of a directory, whose times change with its entries.
    fn finish(&self, level: &Level) -> Result<()> {
        let Some(top) = level.sources.first() else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(top).at("read the metadata of a directory")?;
        if level.is_opaque {
            let mark = self.copy.attributes.mark("opaque");
            rustix::fs::fsetxattr(&level.to, mark, OPAQUE, XattrFlags::empty())
                .at("mark a directory")?;
        }
        if level.has_whiteouts {
            // Without it, the kernel lists the marks if no layer below has the directory.
            let origin = self.copy.attributes.mark("origin");
            rustix::fs::fsetxattr(&level.to, origin, b"", XattrFlags::empty())
                .at("mark a directory")?;
        }
        let attributes = &self.copy.attributes;
        let copied = attributes.copy(top, &level.to, &stat, level.made_at);
        copied.at("set the attributes of a directory")
    }

    /// Copies an entry. Returns a directory whose entries are next.
    fn entry(&mut self, level: &mut Level, name: &CStr) -> Result<Option<Level>> {
        let source = level.source()?;
        let Some(stat) = stat_of(source, name)? else {
            return Err(Errno::STALE).at("read the metadata of a file");
        };
        let is_whiteout = is_whiteout(&stat);
        if is_whiteout && level.hides_below {
            // Nothing is below that it could hide.
            return Ok(None);
        }
        self.copy.count()?;
        let made_at = level.made_at(name, self.copy.attributes.made())?;
        if !FileType::from_raw_mode(stat.st_mode).is_dir() {
            let places = (source, &level.to);
            self.copy.other(places, name, &stat, &|_, _| made_at)?;
            level.has_whiteouts |= is_whiteout;
            return Ok(None);
        }
        let (sources, is_opaque) = self.directories(level, name)?;
        let to = new_dir(&level.to, name)?;
        let mut below = Level::new(sources, to, is_opaque, made_at)?;
        below.hides_below |= level.hides_below;
        Ok(Some(below))
    }

    /// The directories with a name that an overlay merges, and whether they hide those below.
    fn directories(&self, level: &Level, name: &CStr) -> Result<(Vec<OwnedFd>, bool)> {
        let mut found = Vec::new();
        for source in level.sources.iter().skip(level.at) {
            let Some(stat) = stat_of(source, name)? else {
                continue;
            };
            if !FileType::from_raw_mode(stat.st_mode).is_dir() {
                return Ok((found, true));
            }
            let directory = open_dir(source, name)?;
            let is_opaque = self.is_opaque(&directory)?;
            found.push(directory);
            if is_opaque {
                return Ok((found, true));
            }
        }
        Ok((found, false))
    }

    fn is_opaque(&self, directory: &OwnedFd) -> Result<bool> {
        let mut value = [0; 2];
        let mark = self.copy.attributes.mark("opaque");
        match rustix::fs::fgetxattr(directory, mark, &mut value) {
            Ok(length) => Ok(value.get(..length) == Some(OPAQUE)),
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(false),
            Err(error) => Err(error).at("read the mark of a directory"),
        }
    }
}

/// Whether an entry is the mark of a removed file. Overlays of boxes make no other marks.
fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// The metadata of a name, if the directory has it.
fn stat_of(directory: &OwnedFd, name: &CStr) -> Result<Option<Stat>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error).at("read the metadata of a file"),
    }
}
