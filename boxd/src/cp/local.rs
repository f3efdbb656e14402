//! The local side of a copy.
//!
//! A guest may write to the local directory at the same time. So a link at the end of a path is not followed, and everything
//! below it is opened by descriptor.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// The source of a copy into a box.
#[derive(Debug)]
pub(super) enum Source {
    File(File, Stat),
    Directory(OwnedFd),
    /// A stream of this process, such as `/dev/stdin`.
    Stream(File),
}

/// The target of a copy out of a box.
#[derive(Debug)]
pub(super) enum Target {
    /// An existing directory.
    Directory(OwnedFd),
    /// A name, and the type of an existing file of that name.
    Named(DirEntry, Option<FileType>),
    /// A stream of this process, such as `/dev/stdin`.
    Stream(File),
}

/// A name in a directory.
#[derive(Debug)]
pub(super) struct DirEntry {
    pub(super) directory: OwnedFd,
    pub(super) name: OsString,
}

/// Opens the source.
pub(super) fn source(path: &Path) -> Result<Source> {
    // Do not wait for a writer of a pipe.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if is_process_stream(path) {
        return Ok(Source::Stream(
            File::open(path).with_context(|| display(path))?,
        ));
    }
    let followed = if names_directory(path) {
        OFlags::DIRECTORY
    } else {
        OFlags::NOFOLLOW
    };
    let opened = match rustix::fs::open(path, flags | followed, Mode::empty()) {
        Err(Errno::LOOP) => bail!("{}", link_error(path)),
        opened => opened.with_context(|| display(path))?,
    };
    let stat = rustix::fs::fstat(&opened).with_context(|| display(path))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(Source::Directory(opened)),
        FileType::RegularFile => Ok(Source::File(opened.into(), stat)),
        _ => bail!("{}: neither a file nor a directory", path.display()),
    }
}

/// Resolves the target.
pub(super) fn target(path: &Path) -> Result<Target> {
    if is_process_stream(path) {
        let stream = File::options().write(true).open(path);
        return Ok(Target::Stream(stream.with_context(|| display(path))?));
    }
    if names_directory(path) {
        match rustix::fs::open(path, DIRECTORY, Mode::empty()) {
            Ok(directory) => return Ok(Target::Directory(directory)),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno).with_context(|| display(path)),
        }
    }
    let plain: PathBuf = path.components().collect();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let kind = match rustix::fs::open(&plain, flags, Mode::empty()) {
        Ok(opened) => {
            let stat = rustix::fs::fstat(&opened).with_context(|| display(path))?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => bail!("{}", link_error(path)),
                FileType::Directory => {
                    let directory = rustix::fs::openat(&opened, c".", DIRECTORY, Mode::empty());
                    return Ok(Target::Directory(directory.with_context(|| display(path))?));
                }
                kind => Some(kind),
            }
        }
        Err(Errno::NOENT) => None,
        Err(errno) => return Err(errno).with_context(|| display(path)),
    };
    let parent = match plain.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let directory = rustix::fs::open(parent, DIRECTORY, Mode::empty());
    let directory = directory.with_context(|| display(parent))?;
    let name = name_of(&plain)?;
    Ok(Target::Named(DirEntry { directory, name }, kind))
}

/// The last part of a path.
pub(super) fn name_of(path: &Path) -> Result<OsString> {
    if let Some(name) = path.file_name() {
        return Ok(name.to_owned());
    }
    let real = std::fs::canonicalize(path).with_context(|| display(path))?;
    let name = real.file_name().map(OsStr::to_owned);
    name.with_context(|| format!("{}: no file name", path.display()))
}

/// Whether a path ends with a slash, so that a link to a directory is followed.
fn names_directory(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes.ends_with(b"/") || bytes.ends_with(b"/.")
}

/// Whether a path is a stream of this process, which the kernel shows as a link.
fn is_process_stream(path: &Path) -> bool {
    ["/dev/fd", "/proc/self/fd"]
        .iter()
        .any(|persist| path.parent() == Some(Path::new(persist)))
        || ["/dev/stdin", "/dev/stdout", "/dev/stderr"]
            .iter()
            .any(|name| path == Path::new(name))
}

fn link_error(path: &Path) -> String {
    let path = path.display();
    format!(
        "{path}: symbolic link, which cp does not follow; name its target, or write {path}/ for a directory"
    )
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

impl DirEntry {
    /// The metadata of the name, without following a link.
    pub(super) fn stat(&self) -> io::Result<Option<Stat>> {
        match rustix::fs::statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens or creates a directory, and replaces a link.
    pub(super) fn make_directory(&self) -> io::Result<OwnedFd> {
        let Self { directory, name } = self;
        for _ in 0..TRIES {
            match rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
            let flags = DIRECTORY | OFlags::NOFOLLOW;
            match rustix::fs::openat(directory, name, flags, Mode::empty()) {
                Err(Errno::LOOP | Errno::NOTDIR) => self.remove_link()?,
                Err(Errno::NOENT) => {}
                opened => return Ok(opened?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Creates a link, and replaces anything but a directory.
    pub(super) fn make_link(&self, target: &[u8]) -> io::Result<()> {
        let Self { directory, name } = self;
        for _ in 0..TRIES {
            match rustix::fs::symlinkat(target, directory, name) {
                Err(Errno::EXIST) => {
                    rustix::fs::unlinkat(directory, name, AtFlags::empty())?;
                }
                made => return Ok(made?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Removes a link; fails for anything else.
    fn remove_link(&self) -> io::Result<()> {
        let is_link = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        if !self.stat()?.is_some_and(is_link) {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(rustix::fs::unlinkat(
            &self.directory,
            &self.name,
            AtFlags::empty(),
        )?)
    }
}

/// How often to retry an operation that a guest may undo.
const TRIES: usize = 16;

/// Opens the same directory again.
pub(super) fn reopen(directory: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        directory,
        c".",
        DIRECTORY,
        Mode::empty(),
    )?)
}

/// Opens a directory of a test.
#[cfg(test)]
pub(super) fn directory(path: &Path) -> OwnedFd {
    rustix::fs::open(path, DIRECTORY, Mode::empty()).unwrap()
}
