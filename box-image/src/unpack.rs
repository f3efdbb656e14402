//! Applies layers to a directory, which becomes the image's read-only tree.
//!
//! Everything is created by descriptor beneath the directory. No link of an image is ever followed: neither as a parent
//! of an entry nor as an entry. An entry of a later layer below a link replaces the link by a directory, as an overlay of
//! the layers would show it; within one layer such an entry is refused.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::archive::{Archive, Entry, Kind, Segment, bad_at};
use crate::error::{At as _, Error, Result};
use crate::limits::{DIRECTORY_NAMES, Limits};

mod attributes;
mod path;
mod place;
mod seen;

use place::Place;
pub(crate) use place::remove_tree;
use seen::Seen;

/// The largest owner that a box can map.
const LAST_ID: u64 = 65_535;
/// The owner of files with a larger id, by which the kernel shows unmapped ids too.
const OVERFLOW_ID: u32 = 65_534;
/// Mode of directories that no entry describes.
const IMPLIED: Meta = Meta {
    mode: 0o755,
    mtime: (0, 0),
};

/// Counts of an unpacked image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    /// Entries in all layers.
    pub entries: u64,
    /// Bytes of files in all layers.
    pub bytes: u64,
    /// Devices that were skipped: a box has its own.
    pub devices_skipped: u64,
    /// Attributes that were dropped: capabilities, those of the kernel, and those that the disk refuses.
    pub attributes_dropped: u64,
    /// Entries whose owner is above 65535 and became 65534.
    pub owners_clamped: u64,
}

/// Mode and time of a directory, set after everything below it.
#[derive(Debug, Clone, Copy)]
struct Meta {
    mode: u32,
    mtime: (i64, u32),
}

/// Directory that layers are applied to.
#[derive(Debug)]
pub(crate) struct Unpacker {
    place: Place,
    /// Whether this process is root, and keeps the owners of files.
    keep_owners: bool,
    limits: Limits,
    directories: BTreeMap<Vec<u8>, Meta>,
    directory_names: u64,
    /// Paths of the current layer.
    seen: Seen,
    counts: Unpacked,
}

impl Unpacker {
    /// Prepares an empty directory.
    pub(crate) fn new(root: OwnedFd, limits: Limits) -> Self {
        Self {
            place: Place::new(root),
            keep_owners: rustix::process::geteuid().is_root(),
            limits,
            directories: BTreeMap::from([(Vec::new(), IMPLIED)]),
            directory_names: 0,
            seen: Seen::default(),
            counts: Unpacked::default(),
        }
    }

    /// Applies a layer on those before it.
    pub(crate) fn apply(&mut self, layer: &mut impl BufRead) -> Result<()> {
        self.seen = Seen::default();
        let mut archive = Archive::new(layer);
        while let Some(entry) = archive.next()? {
            self.counts.entries += 1;
            if self.counts.entries > self.limits.entries {
                return Err(Error::too_large("image", "entries", self.limits.entries));
            }
            self.entry(&entry, &mut archive)?;
        }
        Ok(())
    }

    /// Sets modes and times of directories, deepest first, and returns the counts.
    pub(crate) fn finish(self) -> Result<Unpacked> {
        for (path, meta) in self.directories.iter().rev() {
            let directory = self.place.open(path, OFlags::RDONLY).at_path(path)?;
            rustix::fs::futimens(&directory, &times(meta.mtime)).at_path(path)?;
            rustix::fs::fchmod(&directory, Mode::from_raw_mode(meta.mode)).at_path(path)?;
        }
        Ok(self.counts)
    }

    fn entry<R: BufRead>(&mut self, entry: &Entry, archive: &mut Archive<R>) -> Result<()> {
        let path = path::clean(&entry.path)?;
        let Some((above, name)) = path::split(&path) else {
            // CVE-2021-29136: the root of an image was a link.
            if entry.kind != Kind::Directory {
                return Err(bad_at("has a root that is not a directory", &entry.path));
            }
            let root = self.place.root().at_path(&path)?;
            self.own(&root, b".", entry).at_path(&path)?;
            self.note_directory(Vec::new(), entry)?;
            return Ok(());
        };
        if path::is_whiteout(above) {
            return Err(bad_at("has an entry below a whiteout", &path));
        }
        if let Some(hidden) = name.strip_prefix(path::WHITEOUT) {
            return self.whiteout(above, hidden, &path);
        }
        let directory = self.parent(above)?;
        match &entry.kind {
            Kind::Directory => {
                if !self.place.make_directory(&directory, name).at_path(&path)? {
                    self.clear(&directory, name, &path).at_path(&path)?;
                    self.place.make_directory(&directory, name).at_path(&path)?;
                }
                self.own(&directory, name, entry).at_path(&path)?;
                if !entry.attributes.is_empty() {
                    let opened = self.place.open(&path, OFlags::RDONLY).at_path(&path)?;
                    self.counts.attributes_dropped +=
                        attributes::set(&opened, &entry.attributes).at_path(&path)?;
                }
                self.note_directory(path.clone(), entry)?;
            }
            Kind::File(size, segments) => {
                self.add_bytes(*size)?;
                let file = self.create(&directory, name, &path).at_path(&path)?;
                write_contents(&file, archive, *size, segments.as_deref()).at_path(&path)?;
                self.finish_file(&file, entry).at_path(&path)?;
            }
            Kind::Symlink(target) => {
                self.replace(&directory, name, &path, || {
                    rustix::fs::symlinkat(&target[..], &directory, name)
                })
                .at_path(&path)?;
                self.finish_other(&directory, name, entry).at_path(&path)?;
            }
            Kind::Link(target) => self.link(target, &directory, name, &path)?,
            Kind::Fifo => {
                let mode = Mode::from_raw_mode(0o600);
                let make = || rustix::fs::mknodat(&directory, name, FileType::Fifo, mode, 0);
                self.replace(&directory, name, &path, make).at_path(&path)?;
                self.finish_other(&directory, name, entry).at_path(&path)?;
                // Nothing can replace it meanwhile: the store is private.
                let mode = Mode::from_raw_mode(entry.mode);
                rustix::fs::chmodat(&directory, name, mode, AtFlags::empty()).at_path(&path)?;
            }
            Kind::Special => {
                // It hides an earlier entry nevertheless.
                self.clear(&directory, name, &path).at_path(&path)?;
                self.counts.devices_skipped += 1;
            }
        }
        self.seen.insert(&path);
        Ok(())
    }

    /// Removes what a whiteout hides: entries of earlier layers only.
    fn whiteout(&mut self, above: &[u8], hidden: &[u8], path: &[u8]) -> Result<()> {
        let all = hidden == path::OPAQUE;
        if !all && hidden.starts_with(path::WHITEOUT) {
            // Notes of an old file system about itself.
            return Ok(());
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(bad_at("has a whiteout of an invalid name", path));
        }
        // Nothing is behind a missing directory or a link.
        let directory = match self.place.open(above, OFlags::RDONLY) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(error) => return Err(error).at_path(path),
        };
        if all {
            return self.clear_unseen(&directory, above).at_path(path);
        }
        let path = path::join(above, hidden);
        self.hide(&directory, hidden, &path).at_path(&path)
    }

    /// Removes an entry unless the current layer made it.
    fn hide(&mut self, directory: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), Errno> {
        if !self.seen.contains(path) {
            return self.clear(directory, name, path);
        }
        match self.place.open(path, OFlags::RDONLY) {
            Ok(below) => self.clear_unseen(&below, path),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn clear_unseen(&mut self, directory: &OwnedFd, path: &[u8]) -> Result<(), Errno> {
        for name in place::names(directory)? {
            self.hide(directory, &name, &path::join(path, &name))?;
        }
        Ok(())
    }

    /// Removes an entry with everything below it, if it exists.
    fn clear(&mut self, directory: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), Errno> {
        if self.place.remove(directory, name)? {
            let below = path::join(path, b"");
            let range = self.directories.range(below.clone()..);
            let gone: Vec<_> = range
                .take_while(|(path, _)| path.starts_with(&below))
                .map(|(path, _)| path.clone())
                .collect();
            for path in gone.iter().map(Vec::as_slice).chain([path]) {
                if self.directories.remove(path).is_some() {
                    self.directory_names -= path.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// Opens the directory of an entry, and makes it if the archive omits it.
    fn parent(&mut self, path: &[u8]) -> Result<OwnedFd> {
        match self.place.parent(path) {
            Ok(directory) => return Ok(directory),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(error) => return Err(error).at_path(path),
        }
        let mut directory = self.place.root().at_path(path)?;
        for end in path::ends(path) {
            let (so_far, name) = (&path[..end], path::last(&path[..end]));
            match self.place.step(&directory, name) {
                Ok(next) => {
                    directory = next;
                    continue;
                }
                Err(Errno::NOENT) => {}
                Err(Errno::NOTDIR | Errno::LOOP) if self.seen.contains(so_far) => {
                    return Err(bad_at("has an entry behind a link or a file", path));
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    self.clear(&directory, name, so_far).at_path(path)?;
                }
                Err(error) => return Err(error).at_path(path),
            }
            self.place.make_directory(&directory, name).at_path(path)?;
            self.insert_directory(so_far.to_vec(), IMPLIED)?;
            directory = self.place.step(&directory, name).at_path(path)?;
        }
        Ok(directory)
    }

    /// Creates a file, in the place of anything else.
    fn create(&mut self, directory: &OwnedFd, name: &[u8], path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o600));
        self.replace(directory, name, path, open)
    }

    fn replace<T>(
        &mut self,
        directory: &OwnedFd,
        name: &[u8],
        path: &[u8],
        make: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match make() {
            Err(Errno::EXIST) => {
                self.clear(directory, name, path)?;
                make()
            }
            other => other,
        }
    }

    /// Gives a file another name.
    fn link(&mut self, target: &[u8], directory: &OwnedFd, name: &[u8], path: &[u8]) -> Result<()> {
        let missing = || bad_at("has a hard link to a file that it lacks", path);
        let target = path::clean(target)?;
        let (above, original) = path::split(&target).ok_or_else(missing)?;
        if target == path {
            return Err(missing());
        }
        self.clear(directory, name, path).at_path(path)?;
        let from = match self.place.open(above, OFlags::PATH) {
            Ok(from) => from,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Err(missing()),
            Err(error) => return Err(error).at_path(path),
        };
        let stat = match rustix::fs::statat(&from, original, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Err(missing()),
            stat => stat.at_path(path)?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            // Without following: the link itself gets the name.
            FileType::RegularFile | FileType::Symlink | FileType::Fifo => {
                rustix::fs::linkat(&from, original, directory, name, AtFlags::empty()).at_path(path)
            }
            _ => Err(missing()),
        }
    }

    fn add_bytes(&mut self, bytes: u64) -> Result<()> {
        let max = self.limits.decoded_bytes;
        let total = self.counts.bytes.saturating_add(bytes);
        if total > max {
            return Err(Error::too_large("image", "decoded_bytes", max));
        }
        self.counts.bytes = total;
        Ok(())
    }

    fn note_directory(&mut self, path: Vec<u8>, entry: &Entry) -> Result<()> {
        let (mode, mtime) = (entry.mode, entry.mtime);
        self.insert_directory(path, Meta { mode, mtime })
    }

    fn insert_directory(&mut self, path: Vec<u8>, meta: Meta) -> Result<()> {
        let bytes = path.len() as u64;
        if self.directories.insert(path, meta).is_none() {
            self.directory_names += bytes;
        }
        if self.directory_names > DIRECTORY_NAMES {
            return Err(Error::too_large(
                "image",
                "directory_names",
                DIRECTORY_NAMES,
            ));
        }
        Ok(())
    }

    /// Returns the owner of an entry; `None` if it is this process already.
    fn owner(&mut self, entry: &Entry) -> Option<(u32, u32)> {
        if !self.keep_owners {
            return None;
        }
        let clamped = |id: u64| match u32::try_from(id) {
            Ok(small) if id <= LAST_ID => small,
            _ => OVERFLOW_ID,
        };
        if entry.uid > LAST_ID || entry.gid > LAST_ID {
            self.counts.owners_clamped += 1;
        }
        Some((clamped(entry.uid), clamped(entry.gid)))
    }

    fn own(&mut self, directory: &OwnedFd, name: &[u8], entry: &Entry) -> Result<(), Errno> {
        let Some((uid, gid)) = self.owner(entry) else {
            return Ok(());
        };
        rustix::fs::chownat(
            directory,
            name,
            Some(rustix::fs::Uid::from_raw(uid)),
            Some(rustix::fs::Gid::from_raw(gid)),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    }

    /// Sets the owner before the mode, because it clears set-id bits.
    fn finish_file(&mut self, file: &OwnedFd, entry: &Entry) -> Result<(), Errno> {
        if let Some((uid, gid)) = self.owner(entry)
            && (uid, gid) != (0, 0)
        {
            let uid = rustix::fs::Uid::from_raw(uid);
            rustix::fs::fchown(file, Some(uid), Some(rustix::fs::Gid::from_raw(gid)))?;
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(entry.mode))?;
        self.counts.attributes_dropped += attributes::set(file, &entry.attributes)?;
        rustix::fs::futimens(file, &times(entry.mtime))
    }

    /// As [`finish_file`](Self::finish_file), for entries that cannot be opened.
    fn finish_other(
        &mut self,
        directory: &OwnedFd,
        name: &[u8],
        entry: &Entry,
    ) -> Result<(), Errno> {
        self.own(directory, name, entry)?;
        self.counts.attributes_dropped += entry.attributes.len() as u64;
        rustix::fs::utimensat(
            directory,
            name,
            &times(entry.mtime),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    }
}

/// Writes the contents of a file.
fn write_contents<R: BufRead>(
    file: &OwnedFd,
    archive: &mut Archive<R>,
    size: u64,
    segments: Option<&[Segment]>,
) -> std::io::Result<()> {
    let whole = [Segment {
        offset: 0,
        length: size,
    }];
    for segment in segments.unwrap_or(&whole) {
        let (mut offset, end) = (segment.offset, segment.offset + segment.length);
        while offset < end {
            let piece = archive.contents()?;
            let max = usize::try_from(end - offset).unwrap_or(usize::MAX);
            let piece = &piece[..piece.len().min(max)];
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, piece, offset))?;
            archive.consume(written);
            offset += written as u64;
        }
    }
    if segments.is_some() {
        rustix::fs::ftruncate(file, size)?;
    }
    Ok(())
}

fn times((seconds, nanoseconds): (i64, u32)) -> Timestamps {
    let last_modification = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds.into(),
    };
    Timestamps {
        last_access: last_modification,
        last_modification,
    }
}

#[cfg(test)]
mod tests;
