//! Directories of skills, which boxes may have written to: files are opened beneath them, and nothing leads out.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::Why;

/// The most of a text.
pub(super) const TEXT_BYTES: usize = 1024 * 1024;

/// The most that is looked at, and found, in one search.
const SCANNED: usize = 10_000;
const FOUND: usize = 1_000;

/// The most that one skill is copied of.
const COPIED_ENTRIES: usize = 10_000;
const COPIED_BYTES: u64 = 256 << 20;

/// Where a path leads, as far as it is there.
pub(super) fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    box_service::paths::real_path(&absolute).unwrap_or(absolute)
}

/// Opens something beneath a directory. Links that stay inside are followed.
fn open(root: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // Non-blocking, so that a pipe cannot hold us up. The kernel wants no word too many.
    let waits = if flags.contains(OFlags::PATH) {
        OFlags::empty()
    } else {
        OFlags::NONBLOCK
    };
    let bits = if flags.contains(OFlags::CREATE) {
        0o644
    } else {
        0
    };
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC | waits;
    rustix::fs::openat2(root, path, flags, Mode::from_raw_mode(bits), inside)
}

pub(super) fn open_root(root: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat2(CWD, root, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

fn outside() -> Why {
    "path must stay within the skill package root".to_owned()
}

/// The file at this path, if it is one.
pub(super) fn file(root: &OwnedFd, path: &Path) -> Result<Option<File>, Why> {
    match open(root, path, OFlags::RDONLY) {
        Ok(file) => {
            let file = File::from(file);
            let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
            Ok(is_file.then_some(file))
        }
        Err(Errno::XDEV) => Err(outside()),
        Err(_) => Ok(None),
    }
}

/// The text of a file, which is called so.
pub(super) fn text(file: File, what: &str) -> Result<String, Why> {
    let mut bytes = Vec::new();
    let read = file.take(TEXT_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| format!("{what} cannot be read: {}", error.kind()))?;
    if bytes.len() > TEXT_BYTES {
        return Err(format!("{what} exceeds the {TEXT_BYTES}-byte limit"));
    }
    String::from_utf8(bytes).map_err(|_| format!("{what} is not valid UTF-8 text"))
}

/// Writes a file, whole or not at all; directories on the way are made.
pub(super) fn write(root: &OwnedFd, path: &Path, content: &str) -> Result<(), Why> {
    let failed = |error: Errno| match error {
        Errno::XDEV => outside(),
        error => format!("it cannot be written: {}", io::Error::from(error).kind()),
    };
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(outside());
    };
    let mut directory = open(root, Path::new("."), OFlags::PATH).map_err(failed)?;
    let mut so_far = PathBuf::from(".");
    for part in parent.components() {
        match rustix::fs::mkdirat(&directory, part.as_os_str(), Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error)),
        }
        so_far.push(part);
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        directory = open(root, &so_far, flags).map_err(failed)?;
    }
    if file_is_directory(&directory, name) {
        return Err("it is a directory".to_owned());
    }
    let fresh = format!(".{}.new", uuid::Uuid::now_v7().simple());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let made = open(&directory, Path::new(&fresh), flags).map_err(failed)?;
    let written = File::from(made).write_all(content.as_bytes());
    let renamed = written
        .map_err(|error| format!("it cannot be written: {}", error.kind()))
        .and_then(|()| rustix::fs::renameat(&directory, &fresh, &directory, name).map_err(failed));
    if renamed.is_err() {
        let _ = rustix::fs::unlinkat(&directory, &fresh, rustix::fs::AtFlags::empty());
    }
    renamed
}

fn file_is_directory(directory: &OwnedFd, name: &std::ffi::OsStr) -> bool {
    let stat = rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| {
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory
    })
}

/// The entries of a directory beneath the root, at most so many.
pub(super) fn entries(
    root: &OwnedFd,
    path: &Path,
    most: usize,
) -> Result<Option<Vec<Listed>>, Why> {
    let directory = match open(root, path, OFlags::RDONLY | OFlags::DIRECTORY) {
        Ok(directory) => directory,
        Err(Errno::XDEV) => return Err(outside()),
        Err(_) => return Ok(None),
    };
    let unreadable = |_| "the directory cannot be read".to_owned();
    let mut found = Vec::new();
    let duplicate = rustix::io::dup(&directory).map_err(unreadable)?;
    for entry in rustix::fs::Dir::new(duplicate).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "." || name == ".." {
            continue;
        }
        if found.len() >= most {
            return Err("Skill directory exceeds the configured entry limit".to_owned());
        }
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        let Ok(stat) = rustix::fs::statat(directory.as_fd(), entry.file_name(), flags) else {
            continue;
        };
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        let is_dir = kind == rustix::fs::FileType::Directory;
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        found.push(Listed { name, is_dir, size });
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Some(found))
}

/// What a directory lists.
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) is_dir: bool,
    pub(super) size: u64,
}

/// The file that makes a directory a skill's.
pub(super) fn entry_file(directory: &Path) -> Option<&'static str> {
    let root = open_root(directory).ok()?;
    ["SKILL.md", "skill.md"]
        .into_iter()
        .find(|name| matches!(file(&root, Path::new(name)), Ok(Some(_))))
}

/// Skills below a directory, itself included, so deep; not those inside of others.
pub(super) fn discover(root: &Path, deepest: usize) -> Result<Vec<(PathBuf, &'static str)>, Why> {
    let mut found = Vec::new();
    let mut waiting = VecDeque::from([(root.to_owned(), 0)]);
    let mut scanned = 0;
    while let Some((directory, depth)) = waiting.pop_front() {
        if let Some(entry) = entry_file(&directory) {
            found.push((directory, entry));
            if found.len() > FOUND {
                return Err("Skill discovery exceeded the configured package limit".to_owned());
            }
            continue;
        }
        if depth >= deepest {
            continue;
        }
        let mut below = Vec::new();
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            scanned += 1;
            if scanned > SCANNED {
                return Err("Skill discovery exceeded the configured entry limit".to_owned());
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                below.push(entry.path());
            }
        }
        below.sort();
        waiting.extend(below.into_iter().map(|path| (path, depth + 1)));
    }
    Ok(found)
}

/// Copies a directory. What is no file and no directory is refused, and so is too much.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), Why> {
    let failed = |error: io::Error| format!("the directory cannot be copied: {}", error.kind());
    let (mut entries, mut bytes) = (0, 0);
    let mut waiting = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = waiting.pop() {
        fs::create_dir(&to).map_err(failed)?;
        for entry in fs::read_dir(&from).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (metadata, target) = (
                entry.metadata().map_err(failed)?,
                to.join(entry.file_name()),
            );
            (entries, bytes) = (entries + 1, bytes + metadata.len());
            if entries > COPIED_ENTRIES || bytes > COPIED_BYTES {
                return Err("the directory is too large for a skill".to_owned());
            }
            if metadata.is_dir() {
                waiting.push((entry.path(), target));
            } else if metadata.is_file() {
                fs::copy(entry.path(), target).map_err(failed)?;
            } else {
                return Err("a skill can contain regular files only".to_owned());
            }
        }
    }
    Ok(())
}

/// A path that was asked for, without detours; none if it leads out.
pub(super) fn normal(path: &str) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !plain.pop() {
                    return None;
                }
            }
            Component::Normal(part) => plain.push(part),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(plain)
}
