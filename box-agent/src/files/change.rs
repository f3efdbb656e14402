//! `file.mkdir`, `file.move` and `file.remove`.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use box_protocol::actions::{
    FileKind, FileMkdirParams, FileMkdirResult, FileMoveParams, FileRemoveParams,
};
use box_rpc::Empty;
use rustix::fs::{AtFlags, Dir, RenameFlags};
use rustix::io::Errno;

use super::copy::copy;
use super::error::PathContext;
use super::guest_root::{Location, Step, too_large};
use super::stat::{AttributeChange, kind};
use super::temp_file::{TEMP_PREFIX, temp_name};
use super::walk::{WalkNext, open_dir, walk};

/// Maximum number of paths in one call.
const PATHS_MAX: usize = 4096;

/// Maximum depth of open directories; deeper directories are hoisted first.
const DEPTH_MAX: usize = 64;

/// Maximum number of remembered hoisted directories.
///
/// Further ones are found when the directory is read again.
const HOISTED_MAX: usize = 1024;

/// Attempts to empty a directory that is being filled meanwhile.
const ATTEMPTS: usize = 64;

/// `file.mkdir`.
pub(super) fn mkdir(
    step: &Step<'_>,
    params: &FileMkdirParams,
) -> Result<FileMkdirResult, BoxError> {
    let path = step.guest_root.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = AttributeChange::new(step.guest_root, params.mode, owner, group)?;
    let (dir, created) = step.guest_root.make_dirs(&path)?;
    if created {
        change
            .apply(step.guest_root, dir.as_fd(), 0o755)
            .with_path(&path)?;
    }
    Ok(FileMkdirResult { created })
}

/// `file.move`.
pub(super) fn move_path(step: &Step<'_>, params: &FileMoveParams) -> Result<Empty, BoxError> {
    let guest_root = step.guest_root;
    let src = guest_root.path(&params.src, params.expand)?;
    let dest = guest_root.path(&params.dest, params.expand)?;
    let from = guest_root.location(&src)?;
    if from.stat().with_path(&src)?.is_none() {
        return Err(Errno::NOENT).with_path(&src);
    }
    if params.parents
        && let Some((dir, _)) = super::path::split(&dest)
    {
        guest_root.make_dirs(dir)?;
    }
    let to = guest_root.location(&dest)?;
    let flags = if params.overwrite {
        RenameFlags::empty()
    } else {
        RenameFlags::NOREPLACE
    };
    if params.keep_source {
        copy(step, &from, &to, flags, &dest)?;
        return Ok(Empty {});
    }
    match rustix::fs::renameat_with(&from.dir, &from.name, &to.dir, &to.name, flags) {
        Ok(()) => {}
        // Source and destination are on two file systems, or Landlock separates them.
        Err(Errno::XDEV) => {
            check_names(step, &from, &src)?;
            copy(step, &from, &to, flags, &dest)?;
            remove_at(step, &from, true, &src)?;
        }
        Err(errno) => return Err(errno).with_path(&dest),
    }
    Ok(Empty {})
}

/// Refuses a tree with names that a copy omits.
///
/// Removing the source would lose them.
fn check_names(step: &Step<'_>, location: &Location, path: &str) -> Result<(), BoxError> {
    let check = |parent: &OwnedFd, name: &str| {
        for entry in Dir::new(open_dir(parent, name).with_path(path)?).with_path(path)? {
            let why = match entry.with_path(path)?.file_name().to_str() {
                Ok(name) if name.starts_with(TEMP_PREFIX) => {
                    format!("that start with {TEMP_PREFIX}")
                }
                Ok(_) => continue,
                Err(_) => "that are not UTF-8".to_owned(),
            };
            let cannot = "which cannot move to another file system; rename them first";
            return Err(BoxError::validation(format!(
                "{path}: contains names {why}, {cannot}"
            )));
        }
        Ok(())
    };
    let found = location.stat().with_path(path)?;
    if found.is_none_or(|found| kind(&found) != FileKind::Directory) {
        return Ok(());
    }
    check(&location.dir, &location.name)?;
    let top = open_dir(&location.dir, &*location.name).with_path(path)?;
    let walked = walk(step, top, path, |entry| {
        if kind(&entry.stat) == FileKind::Directory {
            check(entry.dir, entry.name)?;
        }
        Ok(WalkNext::Enter)
    });
    walked.map(drop)
}

/// `file.remove`.
pub(super) fn remove(step: &Step<'_>, params: &FileRemoveParams) -> Result<Empty, BoxError> {
    if params.paths.len() > PATHS_MAX {
        return Err(too_large("the number of paths", "paths", PATHS_MAX));
    }
    for requested in &params.paths {
        let path = step.guest_root.path(requested, params.expand)?;
        let removed = step
            .guest_root
            .location(&path)
            .and_then(|location| remove_at(step, &location, params.recursive, &path));
        match removed {
            Err(error) if params.missing_ok && error.code() == box_protocol::Code::NotFound => {}
            removed => removed?,
        }
    }
    Ok(Empty {})
}

/// Removes the entry at a location. Symbolic links are not followed.
pub(super) fn remove_at(
    step: &Step<'_>,
    location: &Location,
    recursive: bool,
    path: &str,
) -> Result<(), BoxError> {
    let Some(found) = location.stat().with_path(path)? else {
        return Err(Errno::NOENT).with_path(path);
    };
    if kind(&found) != FileKind::Directory {
        return rustix::fs::unlinkat(&location.dir, &location.name, AtFlags::empty())
            .with_path(path);
    }
    for _ in 0..ATTEMPTS {
        match rustix::fs::unlinkat(&location.dir, &location.name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
            done => return done.with_path(path),
        }
        let dir = open_dir(&location.dir, &*location.name).with_path(path)?;
        remove_contents(step, dir, path)?;
    }
    Err(Errno::NOTEMPTY).with_path(path)
}

/// A directory that is being emptied, and its name in its parent.
struct Level {
    dir: Dir,
    name: CString,
}

/// Removes the contents of a directory while reading it.
///
/// The guest controls how large the directory is. A deep directory is first hoisted to the top one, so that few
/// descriptors are open. Entries missed because the directory changes are found by the next attempt.
fn remove_contents(step: &Step<'_>, top: OwnedFd, path: &str) -> Result<(), BoxError> {
    let level = |dir: OwnedFd, name: CString| -> Result<Level, BoxError> {
        let dir = Dir::new(dir).with_path(path)?;
        Ok(Level { dir, name })
    };
    let mut levels = vec![level(top, CString::default())?];
    let mut hoisted: Vec<CString> = Vec::new();
    loop {
        step.cancel.check()?;
        let depth = levels.len();
        let Some(at) = levels.last_mut() else {
            return Ok(());
        };
        let known = if depth == 1 { hoisted.pop() } else { None };
        let name = if known.is_some() {
            known
        } else {
            let entry = at.dir.read().transpose().with_path(path)?;
            entry.map(|entry| entry.file_name().to_owned())
        };
        let Some(name) = name else {
            let done = levels.pop();
            if let (Some(done), Some(parent)) = (done, levels.last()) {
                let parent = parent.dir.fd().with_path(path)?;
                // If it was filled meanwhile, the parent is not empty and the next attempt finds it.
                let _ = rustix::fs::unlinkat(parent, &done.name, AtFlags::REMOVEDIR);
            }
            continue;
        };
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let dir = at.dir.fd().with_path(path)?;
        match rustix::fs::unlinkat(dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => continue,
            Err(Errno::ISDIR) => {}
            Err(errno) => return Err(errno).with_path(path),
        }
        if depth < DEPTH_MAX {
            let inner = open_dir(dir, &*name).with_path(path)?;
            levels.push(level(inner, name)?);
            continue;
        }
        let temp = CString::new(temp_name()).unwrap_or_default();
        if let [first, .., last] = &levels[..] {
            let (first, last) = (
                first.dir.fd().with_path(path)?,
                last.dir.fd().with_path(path)?,
            );
            rustix::fs::renameat(last, &name, first, &temp).with_path(path)?;
        }
        if hoisted.len() < HOISTED_MAX {
            hoisted.push(temp);
        }
    }
}
