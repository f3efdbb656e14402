//! The tree that the guest sees, and the one way into it: by descriptor, beneath the box's root, through no magic link. A guest
//! that swaps a directory for a link meanwhile gains nothing: what a path leads to is decided once, by the kernel, with the
//! guest's own rights, and from then on it is a descriptor.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use box_sys::Guest;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::error::About;
use super::path::{self, Base};
use super::pool::Wanted;
use super::upload::Uploads;

/// How often a lookup is tried again that the kernel gave up because something on the way was being renamed.
const TRIES: usize = 256;

/// Links at the end of a path that are followed, as many as the kernel follows.
const LINKS: usize = 40;

const DIR: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// What every step on files knows.
#[derive(Debug)]
pub(super) struct Ground {
    root: OwnedFd,
    /// The device of procfs. To the kernel, these threads are the box's first process, whose memory and descriptors are
    /// nobody's to see; so nothing of any process is opened there.
    procfs: Option<u64>,
    pub(super) guest: Guest,
    settings: Mutex<Settings>,
    pub(super) uploads: Uploads,
    /// Held while a file is looked at and replaced, so that of two calls that both expect the old one, one wins.
    turn: Mutex<()>,
}

#[derive(Debug, Default)]
struct Settings {
    base: Base,
    file_bytes: Option<u64>,
}

/// A name in a directory.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) dir: OwnedFd,
    pub(super) name: String,
}

impl Ground {
    /// The tree below this directory.
    pub(super) fn new(root: OwnedFd, guest: Guest) -> Self {
        let procfs = rustix::fs::statat(&root, "proc", AtFlags::SYMLINK_NOFOLLOW);
        Self {
            procfs: procfs.ok().map(|stat| stat.st_dev),
            root,
            guest,
            settings: Mutex::default(),
            uploads: Uploads::default(),
            turn: Mutex::default(),
        }
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_base(&self, base: Base) {
        self.settings().base = base;
    }

    /// What every command finds in its environment.
    pub(super) fn env(&self) -> BTreeMap<String, String> {
        self.settings().base.env.clone()
    }

    pub(super) fn set_file_bytes(&self, bytes: u64) {
        self.settings().file_bytes = Some(bytes);
    }

    pub(super) fn file_bytes(&self) -> Option<u64> {
        self.settings().file_bytes
    }

    /// The path that is meant.
    pub(super) fn path(&self, asked: &str, expand: bool) -> Result<String, BoxError> {
        let base = expand.then(|| self.settings().base.clone());
        path::absolute(asked, base.as_ref())
    }

    /// Refuses a file of this size, if it is more than one file may have.
    pub(super) fn room(&self, size: u64) -> Result<(), BoxError> {
        match self.settings().file_bytes {
            Some(max) if size > max => Err(BoxError::capacity(format!(
                "a file may have at most {max} bytes here (file_bytes)"
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

    /// Opens what is there, whatever it is, without waiting for anybody.
    pub(super) fn open(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = if flags.contains(OFlags::PATH) {
            flags | OFlags::CLOEXEC
        } else {
            flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
        };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = lookup(&self.root, path, flags, resolve)?;
        if !flags.contains(OFlags::PATH) && self.is_of_a_process(&found)? {
            return Err(Errno::ACCESS);
        }
        Ok(found)
    }

    /// Whether this is in procfs: then nothing in it is to be opened.
    pub(super) fn is_procfs(&self, stat: &Stat) -> bool {
        self.procfs == Some(stat.st_dev)
    }

    /// Whether something open is a process's, or a directory among which processes are.
    fn is_of_a_process(&self, found: &OwnedFd) -> Result<bool, Errno> {
        let stat = rustix::fs::fstat(found)?;
        if !self.is_procfs(&stat) {
            return Ok(false);
        }
        // Where the kernel says it is: its name may have been reached through links.
        let own = format!("/proc/self/fd/{}", found.as_raw_fd());
        let place = rustix::fs::readlink(own, Vec::new())?;
        let part = place.to_str().ok().and_then(|path| path.split('/').nth(2));
        let is_process =
            part.is_none_or(|part| part.starts_with(|char: char| char.is_ascii_digit()));
        Ok(is_process || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile)
    }

    /// Opens a file to be read; nothing else.
    pub(super) fn open_file(&self, path: &str) -> Result<(OwnedFd, Stat), BoxError> {
        let file = self.open(path, OFlags::RDONLY).about(path)?;
        let stat = rustix::fs::fstat(&file).about(path)?;
        regular(&stat, path)?;
        Ok((file, stat))
    }

    /// Opens a directory to be listed.
    pub(super) fn open_dir(&self, path: &str) -> Result<OwnedFd, BoxError> {
        self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)
            .about(path)
    }

    /// The spot a path names, whatever is there. A link at its end is not followed.
    pub(super) fn spot(&self, path: &str) -> Result<Spot, BoxError> {
        let (dir, name) = path::split(path).ok_or(Errno::INVAL).about(path)?;
        let dir = self.open(dir, OFlags::PATH | DIR).about(path)?;
        if self.is_procfs(&rustix::fs::fstat(&dir).about(path)?) {
            return Err(Errno::ACCESS).about(path);
        }
        let name = name.to_owned();
        Ok(Spot { dir, name })
    }

    /// The spot that a path ends at once its links are followed.
    pub(super) fn settle(&self, path: &str) -> Result<Spot, BoxError> {
        let mut at = path.to_owned();
        for _ in 0..LINKS {
            let spot = self.spot(&at)?;
            let Ok(target) = rustix::fs::readlinkat(&spot.dir, &spot.name, Vec::new()) else {
                return Ok(spot);
            };
            let target = target.to_str().map_err(|_| Errno::INVAL).about(path)?;
            let (dir, _) = path::split(&at).ok_or(Errno::INVAL).about(path)?;
            at = if target.starts_with('/') {
                target.to_owned()
            } else {
                // Not shortened: what `..` leads to is for the kernel to say.
                path::join(dir, target)
            };
        }
        Err(Errno::LOOP).about(path)
    }

    /// Makes the directory, and those above it. Whether the last one is new.
    pub(super) fn make_dirs(&self, path: &str) -> Result<(OwnedFd, bool), BoxError> {
        let mut missing = Vec::new();
        let mut at = path;
        let mut dir = loop {
            match self.open(at, OFlags::RDONLY | DIR) {
                Ok(dir) => break dir,
                Err(Errno::NOENT) => {
                    let (above, name) = path::split(at).ok_or(Errno::NOENT).about(path)?;
                    missing.push(name);
                    at = above;
                }
                // To go through it, reading it is not needed.
                Err(Errno::ACCESS) if !missing.is_empty() => {
                    break self.open(at, OFlags::PATH | DIR).about(path)?;
                }
                Err(Errno::NOTDIR) => return Err(Errno::EXIST).about(path),
                Err(errno) => return Err(errno).about(path),
            }
        };
        let mut made = false;
        for name in missing.into_iter().rev() {
            (dir, made) = make_dir(&dir, name, 0o755).about(path)?;
        }
        Ok((dir, made))
    }

    /// The spot for a file to be written, its directory made if that is asked for.
    pub(super) fn spot_for(&self, path: &str, parents: bool) -> Result<Spot, BoxError> {
        if parents && let Some((dir, _)) = path::split(path) {
            self.make_dirs(dir)?;
        }
        self.settle(path)
    }
}

impl Spot {
    /// What is there, without following it.
    pub(super) fn stat(&self) -> Result<Option<Stat>, Errno> {
        match rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The file that is there, if the guest may write to it.
    pub(super) fn writable(&self, path: &str) -> Result<Option<Stat>, BoxError> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.dir, &self.name, flags, Mode::empty()) {
            Ok(file) => {
                let stat = rustix::fs::fstat(&file).about(path)?;
                regular(&stat, path)?;
                Ok(Some(stat))
            }
            // A program that runs is not written to, but may be replaced.
            Err(Errno::TXTBSY) => self.stat().about(path),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno).about(path),
        }
    }
}

/// Makes a directory, or finds it. Whether it is new.
pub(super) fn make_dir(dir: &OwnedFd, name: &str, mode: u32) -> Result<(OwnedFd, bool), Errno> {
    let is_new = match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | DIR;
    let inner = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    if is_new {
        // Whatever this process's own mask is.
        rustix::fs::fchmod(&inner, Mode::from_raw_mode(mode))?;
    }
    Ok((inner, is_new))
}

/// Opens something beneath a directory, through no link at all.
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
    for _ in 0..TRIES {
        match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            done => return done,
        }
    }
    Err(Errno::AGAIN)
}

/// Refuses pipes, sockets, devices and directories.
pub(super) fn regular(stat: &Stat, path: &str) -> Result<(), BoxError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Errno::ISDIR).about(path),
        FileType::Symlink => Err(Errno::LOOP).about(path),
        _ => Err(Errno::NXIO).about(path),
    }
}

/// One call's view: the ground, and whether the call is still wanted.
#[derive(Debug)]
pub(super) struct Step<'a> {
    pub(super) ground: &'a Ground,
    pub(super) wanted: &'a Wanted,
}

/// An error about a limit of ours.
pub(super) fn too_large(what: &str, name: &str, max: usize) -> BoxError {
    BoxError::limit(Code::TooLarge, what, name, max)
}
