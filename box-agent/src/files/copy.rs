//! Copies of files and trees by descriptor.
//!
//! A copy appears only when it is complete.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::FileKind;
use rustix::fs::{Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::change::remove_at;
use super::error::PathContext;
use super::guest_root::{Location, Step, beneath, make_dir};
use super::stat::{MODE_BITS, kind, size};
use super::temp_file::temp_name;
use super::walk::{DEPTH_MAX, WalkNext, open_dir, walk};

/// Bytes copied between two checks for cancellation.
const COPY_BYTES: usize = 4 << 20;

/// An incomplete copy. Dropping it removes the copy.
struct TempCopy<'a> {
    step: &'a Step<'a>,
    location: Location,
    installed: bool,
}

impl Drop for TempCopy<'_> {
    fn drop(&mut self) {
        if !self.installed {
            let cancel = super::pool::CancelFlag::default();
            let step = Step {
                cancel: &cancel,
                guest_root: self.step.guest_root,
            };
            let _ = remove_at(&step, &self.location, true, &self.location.name);
        }
    }
}

/// Copies the entry at one location to another.
pub(super) fn copy(
    step: &Step<'_>,
    from: &Location,
    to: &Location,
    flags: RenameFlags,
    path: &str,
) -> Result<(), BoxError> {
    let Some(stat) = from.stat().with_path(path)? else {
        return Err(Errno::NOENT).with_path(path);
    };
    if flags.contains(RenameFlags::NOREPLACE) && to.stat().with_path(path)?.is_some() {
        return Err(Errno::EXIST).with_path(path);
    }
    let mut temp_copy = TempCopy {
        step,
        location: Location {
            dir: to.dir.try_clone().with_path(path)?,
            name: temp_name(),
        },
        installed: false,
    };
    let location = &temp_copy.location;
    match kind(&stat) {
        FileKind::Directory => copy_tree(step, from, location, &stat, path)?,
        _ => copy_one(
            step,
            &from.dir,
            &from.name,
            &location.dir,
            &location.name,
            &stat,
            path,
        )?,
    }
    rustix::fs::renameat_with(&location.dir, &location.name, &to.dir, &to.name, flags)
        .with_path(path)?;
    temp_copy.installed = true;
    Ok(())
}

fn copy_tree(
    step: &Step<'_>,
    from: &Location,
    to: &Location,
    stat: &Stat,
    path: &str,
) -> Result<(), BoxError> {
    let source = open_dir(&from.dir, &*from.name).with_path(path)?;
    let (root, _) = make_dir(&to.dir, &to.name, 0o700).with_path(path)?;
    let root_stat = rustix::fs::fstat(&root).with_path(path)?;
    let mut dirs: Vec<(String, u32)> = Vec::new();
    let complete = walk(step, source, path, |entry| {
        // A copy of a directory into itself contains everything but the copy.
        if (entry.stat.st_dev, entry.stat.st_ino) == (root_stat.st_dev, root_stat.st_ino) {
            return Ok(WalkNext::Skip);
        }
        let parent = entry.path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let dir = beneath(&root, parent, OFlags::PATH | OFlags::DIRECTORY).with_path(path)?;
        if kind(&entry.stat) == FileKind::Directory {
            make_dir(&dir, entry.name, 0o700).with_path(path)?;
            dirs.push((entry.path.clone(), entry.stat.st_mode));
        } else {
            copy_one(
                step,
                entry.dir,
                entry.name,
                &dir,
                entry.name,
                &entry.stat,
                path,
            )?;
        }
        Ok(WalkNext::Enter)
    })?;
    if !complete {
        return Err(BoxError::validation(format!(
            "{path}: the tree is deeper than {DEPTH_MAX} directories"
        )));
    }
    // Modes are set last and inner directories first: a read-only directory cannot be filled.
    for (dir, mode) in dirs.iter().rev() {
        let dir = beneath(&root, dir, OFlags::RDONLY | OFlags::DIRECTORY).with_path(path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode & MODE_BITS)).with_path(path)?;
    }
    rustix::fs::fchmod(&root, Mode::from_raw_mode(stat.st_mode & MODE_BITS)).with_path(path)
}

/// Copies a file or a symbolic link; refuses anything else.
fn copy_one(
    step: &Step<'_>,
    from: &OwnedFd,
    name: &str,
    to: &OwnedFd,
    new_name: &str,
    stat: &Stat,
    path: &str,
) -> Result<(), BoxError> {
    match kind(stat) {
        FileKind::Symlink => {
            let target = rustix::fs::readlinkat(from, name, Vec::new()).with_path(path)?;
            return rustix::fs::symlinkat(&target, to, new_name).with_path(path);
        }
        FileKind::File => {}
        FileKind::Directory | FileKind::Other => return Err(Errno::NXIO).with_path(path),
    }
    let read = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let source = rustix::fs::openat(from, name, read, Mode::empty()).with_path(path)?;
    let stat = rustix::fs::fstat(&source).with_path(path)?;
    super::guest_root::check_regular(&stat, path)?;
    step.guest_root.check_size(size(&stat))?;
    let write = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let copy =
        rustix::fs::openat(to, new_name, write, Mode::from_raw_mode(0o600)).with_path(path)?;
    let mut total = 0;
    loop {
        step.cancel.check()?;
        let copied = copy_some(&source, &copy).with_path(path)?;
        if copied == 0 {
            break;
        }
        total += copied as u64;
        step.guest_root.check_size(total)?;
    }
    rustix::fs::fchmod(&copy, Mode::from_raw_mode(stat.st_mode & MODE_BITS)).with_path(path)?;
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec {
            tv_sec: stat.st_atime,
            tv_nsec: nanos(stat.st_atime_nsec),
        },
        last_modification: rustix::fs::Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: nanos(stat.st_mtime_nsec),
        },
    };
    rustix::fs::futimens(&copy, &times).with_path(path)
}

fn nanos(nanos: u64) -> i64 {
    i64::try_from(nanos).unwrap_or(0)
}

/// Copies some bytes, in the kernel where possible.
fn copy_some(from: &OwnedFd, to: &OwnedFd) -> Result<usize, Errno> {
    match rustix::fs::copy_file_range(from, None, to, None, COPY_BYTES) {
        // Kernel files report no size and cannot be copied this way.
        Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) | Ok(0) => {}
        done => return done,
    }
    let mut buffer = vec![0; 128 << 10];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(from, &mut *buffer))?;
    let mut rest = &buffer[..read];
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(to, rest))?;
        rest = &rest[written..];
    }
    Ok(read)
}
