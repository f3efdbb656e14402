//! Path lookup beneath the box's root.
//!
//! Every path is opened by descriptor, beneath the root and through no magic link. The kernel resolves it once with the
//! guest's rights; afterwards the agent uses only the descriptor. A guest that swaps a directory for a link meanwhile
//! gains nothing.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use box_sys::Guest;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::error::PathContext;
use super::path::{self, PathBase};
use super::pool::CancelFlag;
use super::upload::Uploads;

/// Attempts for a lookup that the kernel abandons because of a concurrent rename.
const LOOKUP_ATTEMPTS: usize = 256;

/// Maximum number of symbolic links at the end of a path, the same as the kernel's.
const LINKS_MAX: usize = 40;

const DIR: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// The root of the box and the state shared by all file operations.
#[derive(Debug)]
pub(super) struct GuestRoot {
    root: OwnedFd,
    /// The device of procfs.
    ///
    /// To the kernel these threads belong to the agent, and its memory and descriptors are private. Therefore nothing
    /// of any process is opened there.
    procfs: Option<u64>,
    pub(super) guest: Guest,
    settings: Mutex<Settings>,
    pub(super) uploads: Uploads,
    /// Held while a file is compared and replaced.
    ///
    /// Of two calls that expect the same etag, only one succeeds.
    replace_lock: Mutex<()>,
}

#[derive(Debug, Default)]
struct Settings {
    base: PathBase,
    file_bytes: Option<u64>,
}

/// A name in an open directory.
#[derive(Debug)]
pub(super) struct Location {
    pub(super) dir: OwnedFd,
    pub(super) name: String,
}

impl GuestRoot {
    /// Uses this directory as the root.
    pub(super) fn new(root: OwnedFd, guest: Guest) -> Self {
        let procfs = rustix::fs::statat(&root, "proc", AtFlags::SYMLINK_NOFOLLOW);
        Self {
            procfs: procfs.ok().map(|stat| stat.st_dev),
            root,
            guest,
            settings: Mutex::default(),
            uploads: Uploads::default(),
            replace_lock: Mutex::default(),
        }
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn replace_lock(&self) -> MutexGuard<'_, ()> {
        self.replace_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_base(&self, base: PathBase) {
        self.settings().base = base;
    }

    /// The environment of every command.
    pub(super) fn env(&self) -> BTreeMap<String, String> {
        self.settings().base.env.clone()
    }

    pub(super) fn set_file_bytes(&self, bytes: u64) {
        self.settings().file_bytes = Some(bytes);
    }

    pub(super) fn file_bytes(&self) -> Option<u64> {
        self.settings().file_bytes
    }

    /// The absolute path for a requested one.
    pub(super) fn path(&self, requested: &str, expand: bool) -> Result<String, BoxError> {
        let base = expand.then(|| self.settings().base.clone());
        path::absolute(requested, base.as_ref())
    }

    /// Returns an error if a file of this size exceeds the limit.
    pub(super) fn check_size(&self, size: u64) -> Result<(), BoxError> {
        match self.settings().file_bytes {
            Some(max) if size > max => Err(BoxError::capacity(format!(
                "file: {size} bytes exceed the limit file_bytes of {max}"
            ))
            .with_detail(&Detail {
                errno: Some("EFBIG".to_owned()),
                subject: Some(Subject::Disk),
                limit: Some("file_bytes".to_owned()),
                max: Some(max),
                ..Detail::default()
            })),
            _ => Ok(()),
        }
    }

    /// Opens an existing file of any kind without blocking.
    pub(super) fn open(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = if flags.contains(OFlags::PATH) {
            flags | OFlags::CLOEXEC
        } else {
            flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
        };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let opened = lookup(&self.root, path, flags, resolve)?;
        if !flags.contains(OFlags::PATH) && self.belongs_to_process(&opened)? {
            return Err(Errno::ACCESS);
        }
        Ok(opened)
    }

    /// Whether this is in procfs, where nothing may be opened.
    pub(super) fn is_procfs(&self, stat: &Stat) -> bool {
        self.procfs == Some(stat.st_dev)
    }

    /// Whether an open file belongs to a process, or is a procfs directory.
    fn belongs_to_process(&self, opened: &OwnedFd) -> Result<bool, Errno> {
        let stat = rustix::fs::fstat(opened)?;
        if !self.is_procfs(&stat) {
            return Ok(false);
        }
        // The kernel's path: the requested one may have led through links.
        let fd_path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        let target = rustix::fs::readlink(fd_path, Vec::new())?;
        let part = target.to_str().ok().and_then(|path| path.split('/').nth(2));
        let is_process =
            part.is_none_or(|part| part.starts_with(|char: char| char.is_ascii_digit()));
        Ok(is_process || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile)
    }

    /// Opens a regular file for reading.
    pub(super) fn open_file(&self, path: &str) -> Result<(OwnedFd, Stat), BoxError> {
        let file = self.open(path, OFlags::RDONLY).with_path(path)?;
        let stat = rustix::fs::fstat(&file).with_path(path)?;
        check_regular(&stat, path)?;
        Ok((file, stat))
    }

    /// Opens a directory for listing.
    pub(super) fn open_dir(&self, path: &str) -> Result<OwnedFd, BoxError> {
        self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)
            .with_path(path)
    }

    /// The location that a path names. A symbolic link at its end is not followed.
    pub(super) fn location(&self, path: &str) -> Result<Location, BoxError> {
        let (dir, name) = path::split(path).ok_or(Errno::INVAL).with_path(path)?;
        let dir = self.open(dir, OFlags::PATH | DIR).with_path(path)?;
        if self.is_procfs(&rustix::fs::fstat(&dir).with_path(path)?) {
            return Err(Errno::ACCESS).with_path(path);
        }
        let name = name.to_owned();
        Ok(Location { dir, name })
    }

    /// The location that a path names after its symbolic links are followed.
    pub(super) fn resolve(&self, path: &str) -> Result<Location, BoxError> {
        let mut at = path.to_owned();
        for _ in 0..LINKS_MAX {
            let location = self.location(&at)?;
            let Ok(target) = rustix::fs::readlinkat(&location.dir, &location.name, Vec::new())
            else {
                return Ok(location);
            };
            let target = target.to_str().map_err(|_| Errno::INVAL).with_path(path)?;
            let (dir, _) = path::split(&at).ok_or(Errno::INVAL).with_path(path)?;
            at = if target.starts_with('/') {
                target.to_owned()
            } else {
                // Not normalised: the kernel resolves `..`.
                path::join(dir, target)
            };
        }
        Err(Errno::LOOP).with_path(path)
    }

    /// Creates a directory and its parents. Returns whether the directory is new.
    pub(super) fn make_dirs(&self, path: &str) -> Result<(OwnedFd, bool), BoxError> {
        let mut missing = Vec::new();
        let mut at = path;
        let mut dir = loop {
            match self.open(at, OFlags::RDONLY | DIR) {
                Ok(dir) => break dir,
                Err(Errno::NOENT) => {
                    let (parent, name) = path::split(at).ok_or(Errno::NOENT).with_path(path)?;
                    missing.push(name);
                    at = parent;
                }
                // Traversing a directory needs no read permission.
                Err(Errno::ACCESS) if !missing.is_empty() => {
                    break self.open(at, OFlags::PATH | DIR).with_path(path)?;
                }
                Err(Errno::NOTDIR) => return Err(Errno::EXIST).with_path(path),
                Err(errno) => return Err(errno).with_path(path),
            }
        };
        let mut is_new = false;
        for name in missing.into_iter().rev() {
            (dir, is_new) = make_dir(&dir, name, 0o755).with_path(path)?;
        }
        Ok((dir, is_new))
    }

    /// The location for a new file. Its directory is created if `parents` is set.
    pub(super) fn location_for(&self, path: &str, parents: bool) -> Result<Location, BoxError> {
        if parents && let Some((dir, _)) = path::split(path) {
            self.make_dirs(dir)?;
        }
        self.resolve(path)
    }
}

impl Location {
    /// The status of the entry, without following it.
    pub(super) fn stat(&self) -> Result<Option<Stat>, Errno> {
        match rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The existing file, if the guest may write to it.
    pub(super) fn check_writable(&self, path: &str) -> Result<Option<Stat>, BoxError> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.dir, &self.name, flags, Mode::empty()) {
            Ok(file) => {
                let stat = rustix::fs::fstat(&file).with_path(path)?;
                check_regular(&stat, path)?;
                Ok(Some(stat))
            }
            // A running program cannot be written but may be replaced.
            Err(Errno::TXTBSY) => self.stat().with_path(path),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno).with_path(path),
        }
    }
}

/// Creates or opens a directory. Returns whether it is new.
pub(super) fn make_dir(dir: &OwnedFd, name: &str, mode: u32) -> Result<(OwnedFd, bool), Errno> {
    let is_new = match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | DIR;
    let inner = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    if is_new {
        // The umask must not apply.
        rustix::fs::fchmod(&inner, Mode::from_raw_mode(mode))?;
    }
    Ok((inner, is_new))
}

/// Opens a path beneath a directory, without following any link.
pub(super) fn beneath(dir: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { "." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    lookup(dir, path, flags | OFlags::CLOEXEC, resolve)
}

fn lookup(
    dir: &OwnedFd,
    path: &str,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    for _ in 0..LOOKUP_ATTEMPTS {
        match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            done => return done,
        }
    }
    Err(Errno::AGAIN)
}

/// Returns an error for anything but a regular file.
pub(super) fn check_regular(stat: &Stat, path: &str) -> Result<(), BoxError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Errno::ISDIR).with_path(path),
        FileType::Symlink => Err(Errno::LOOP).with_path(path),
        _ => Err(Errno::NXIO).with_path(path),
    }
}

/// The context of one operation: the guest root and the cancel flag of the call.
#[derive(Debug)]
pub(super) struct Step<'a> {
    pub(super) guest_root: &'a GuestRoot,
    pub(super) cancel: &'a CancelFlag,
}

/// An error about a limit of the agent.
pub(super) fn too_large(what: &str, name: &str, max: usize) -> BoxError {
    BoxError::limit(Code::TooLarge, what, name, max)
}
