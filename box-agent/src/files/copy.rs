//! Copying a file or a tree, by descriptor. The copy appears when it is whole.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::FileKind;
use rustix::fs::{Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::change::remove_at;
use super::draft::hidden_name;
use super::error::About;
use super::ground::{Spot, Step, beneath, make_dir};
use super::stat::{MODE_BITS, kind, size};
use super::walk::{Next, open_dir, walk};

/// Bytes copied between two looks whether anybody still wants it.
const PIECE: usize = 4 << 20;

/// A copy that is not in its place yet. Dropped before it is, it is removed.
struct Hidden<'a> {
    step: &'a Step<'a>,
    spot: Spot,
    placed: bool,
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        if !self.placed {
            let wanted = super::pool::Wanted::default();
            let step = Step {
                wanted: &wanted,
                ground: self.step.ground,
            };
            let _ = remove_at(&step, &self.spot, true, &self.spot.name);
        }
    }
}

/// Copies what is at a spot to another.
pub(super) fn copy(
    step: &Step<'_>,
    from: &Spot,
    to: &Spot,
    flags: RenameFlags,
    path: &str,
) -> Result<(), BoxError> {
    let Some(stat) = from.stat().about(path)? else {
        return Err(Errno::NOENT).about(path);
    };
    if flags.contains(RenameFlags::NOREPLACE) && to.stat().about(path)?.is_some() {
        return Err(Errno::EXIST).about(path);
    }
    let mut hidden = Hidden {
        step,
        spot: Spot {
            dir: to.dir.try_clone().about(path)?,
            name: hidden_name(),
        },
        placed: false,
    };
    let spot = &hidden.spot;
    match kind(&stat) {
        FileKind::Directory => copy_tree(step, from, spot, &stat, path)?,
        _ => copy_one(
            step, &from.dir, &from.name, &spot.dir, &spot.name, &stat, path,
        )?,
    }
    rustix::fs::renameat_with(&spot.dir, &spot.name, &to.dir, &to.name, flags).about(path)?;
    hidden.placed = true;
    Ok(())
}

fn copy_tree(
    step: &Step<'_>,
    from: &Spot,
    to: &Spot,
    stat: &Stat,
    path: &str,
) -> Result<(), BoxError> {
    let source = open_dir(&from.dir, &*from.name).about(path)?;
    let (root, _) = make_dir(&to.dir, &to.name, 0o700).about(path)?;
    let own = rustix::fs::fstat(&root).about(path)?;
    let mut dirs: Vec<(String, u32)> = Vec::new();
    let whole = walk(step, source, path, |entry| {
        // A copy of a directory into itself holds all but the copy.
        if (entry.stat.st_dev, entry.stat.st_ino) == (own.st_dev, own.st_ino) {
            return Ok(Next::Past);
        }
        let above = entry.path.rsplit_once('/').map_or("", |(above, _)| above);
        let dir = beneath(&root, above, OFlags::PATH | OFlags::DIRECTORY).about(path)?;
        if kind(&entry.stat) == FileKind::Directory {
            make_dir(&dir, entry.name, 0o700).about(path)?;
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
        Ok(Next::Into)
    })?;
    if !whole {
        return Err(BoxError::validation(format!("{path}: too deep a tree")));
    }
    // Last, and the inner ones first: one that may not be written cannot be filled.
    for (dir, mode) in dirs.iter().rev() {
        let dir = beneath(&root, dir, OFlags::RDONLY | OFlags::DIRECTORY).about(path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode & MODE_BITS)).about(path)?;
    }
    rustix::fs::fchmod(&root, Mode::from_raw_mode(stat.st_mode & MODE_BITS)).about(path)
}

/// Copies a file or a link; anything else is refused.
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
            let target = rustix::fs::readlinkat(from, name, Vec::new()).about(path)?;
            return rustix::fs::symlinkat(&target, to, new_name).about(path);
        }
        FileKind::File => {}
        FileKind::Directory | FileKind::Other => return Err(Errno::NXIO).about(path),
    }
    let read = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let source = rustix::fs::openat(from, name, read, Mode::empty()).about(path)?;
    let stat = rustix::fs::fstat(&source).about(path)?;
    super::ground::regular(&stat, path)?;
    step.ground.room(size(&stat))?;
    let write = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let copy = rustix::fs::openat(to, new_name, write, Mode::from_raw_mode(0o600)).about(path)?;
    let mut total = 0;
    loop {
        step.wanted.check()?;
        let copied = piece(&source, &copy).about(path)?;
        if copied == 0 {
            break;
        }
        total += copied as u64;
        step.ground.room(total)?;
    }
    rustix::fs::fchmod(&copy, Mode::from_raw_mode(stat.st_mode & MODE_BITS)).about(path)?;
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
    rustix::fs::futimens(&copy, &times).about(path)
}

fn nanos(nanos: u64) -> i64 {
    i64::try_from(nanos).unwrap_or(0)
}

/// Copies some bytes, in the kernel where it can.
fn piece(from: &OwnedFd, to: &OwnedFd) -> Result<usize, Errno> {
    match rustix::fs::copy_file_range(from, None, to, None, PIECE) {
        // Files of the kernel tell no size, and are not copied this way.
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
