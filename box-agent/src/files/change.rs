//! Directories made, things moved, copied and removed.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use box_protocol::actions::{FileKind, FileMkdirParams, FileMoveParams, FileRemoveParams};
use box_rpc::Empty;
use rustix::fs::{AtFlags, Dir, RenameFlags};
use rustix::io::Errno;

use super::copy::copy;
use super::draft::{HIDDEN, hidden_name};
use super::error::About;
use super::ground::{Spot, Step, too_large};
use super::stat::{Change, kind};
use super::walk::{Next, open_dir, walk};

/// Paths that one call may remove.
const PATHS: usize = 4096;

/// Directories within each other that are entered; deeper ones are brought up first.
const DEPTH: usize = 64;

/// Of those that were brought up, how many are remembered; the others are found.
const RAISED: usize = 1024;

/// How often a directory is emptied that is being filled meanwhile.
const ROUNDS: usize = 64;

/// `file.mkdir`.
pub(super) fn mkdir(step: &Step<'_>, params: &FileMkdirParams) -> Result<Empty, BoxError> {
    let path = step.ground.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = Change::new(step.ground, params.mode, owner, group)?;
    let (dir, made) = step.ground.make_dirs(&path)?;
    if made {
        change.apply(step.ground, dir.as_fd(), 0o755).about(&path)?;
    }
    Ok(Empty {})
}

/// `file.move`.
pub(super) fn transfer(step: &Step<'_>, params: &FileMoveParams) -> Result<Empty, BoxError> {
    let ground = step.ground;
    let src = ground.path(&params.src, params.expand)?;
    let dest = ground.path(&params.dest, params.expand)?;
    let from = ground.spot(&src)?;
    if from.stat().about(&src)?.is_none() {
        return Err(Errno::NOENT).about(&src);
    }
    if params.parents
        && let Some((dir, _)) = super::path::split(&dest)
    {
        ground.make_dirs(dir)?;
    }
    let to = ground.spot(&dest)?;
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
        // Two file systems, or two trees that Landlock keeps apart.
        Err(Errno::XDEV) => {
            check_names(step, &from, &src)?;
            copy(step, &from, &to, flags, &dest)?;
            remove_at(step, &from, true, &src)?;
        }
        Err(errno) => return Err(errno).about(&dest),
    }
    Ok(Empty {})
}

/// Refuses a tree with names that a copy leaves out: they would go with what was copied.
fn check_names(step: &Step<'_>, spot: &Spot, path: &str) -> Result<(), BoxError> {
    let check = |above: &OwnedFd, name: &str| {
        for entry in Dir::new(open_dir(above, name).about(path)?).about(path)? {
            let why = match entry.about(path)?.file_name().to_str() {
                Ok(name) if name.starts_with(HIDDEN) => format!("that begin with {HIDDEN}"),
                Ok(_) => continue,
                Err(_) => "that are not UTF-8".to_owned(),
            };
            let cannot = "which cannot be moved to another file system";
            return Err(BoxError::validation(format!(
                "{path}: holds names {why}, {cannot}"
            )));
        }
        Ok(())
    };
    let found = spot.stat().about(path)?;
    if found.is_none_or(|found| kind(&found) != FileKind::Directory) {
        return Ok(());
    }
    check(&spot.dir, &spot.name)?;
    let top = open_dir(&spot.dir, &*spot.name).about(path)?;
    let walked = walk(step, top, path, |entry| {
        if kind(&entry.stat) == FileKind::Directory {
            check(entry.dir, entry.name)?;
        }
        Ok(Next::Into)
    });
    walked.map(drop)
}

/// `file.remove`.
pub(super) fn remove(step: &Step<'_>, params: &FileRemoveParams) -> Result<Empty, BoxError> {
    if params.paths.len() > PATHS {
        return Err(too_large("paths", "paths", PATHS));
    }
    for asked in &params.paths {
        let path = step.ground.path(asked, params.expand)?;
        let removed = step
            .ground
            .spot(&path)
            .and_then(|spot| remove_at(step, &spot, params.recursive, &path));
        match removed {
            Err(error) if params.missing_ok && error.code() == box_protocol::Code::NotFound => {}
            removed => removed?,
        }
    }
    Ok(Empty {})
}

/// Removes what is at a spot, never what it leads to.
pub(super) fn remove_at(
    step: &Step<'_>,
    spot: &Spot,
    recursive: bool,
    path: &str,
) -> Result<(), BoxError> {
    let Some(found) = spot.stat().about(path)? else {
        return Err(Errno::NOENT).about(path);
    };
    if kind(&found) != FileKind::Directory {
        return rustix::fs::unlinkat(&spot.dir, &spot.name, AtFlags::empty()).about(path);
    }
    for _ in 0..ROUNDS {
        match rustix::fs::unlinkat(&spot.dir, &spot.name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
            done => return done.about(path),
        }
        let dir = open_dir(&spot.dir, &*spot.name).about(path)?;
        empty(step, dir, path)?;
    }
    Err(Errno::NOTEMPTY).about(path)
}

/// A directory that is being emptied, as it is read, and its own name in the one above.
struct Level {
    dir: Dir,
    name: CString,
}

/// Removes all that is in a directory, as it is read: how much that is, is the guest's to say. One deep inside is brought up to
/// the first one, so that few are open at once. What a directory does not tell because it changes is found when it is not
/// empty.
fn empty(step: &Step<'_>, top: OwnedFd, path: &str) -> Result<(), BoxError> {
    let level = |dir: OwnedFd, name: CString| -> Result<Level, BoxError> {
        let dir = Dir::new(dir).about(path)?;
        Ok(Level { dir, name })
    };
    let mut levels = vec![level(top, CString::default())?];
    let mut raised: Vec<CString> = Vec::new();
    loop {
        step.wanted.check()?;
        let depth = levels.len();
        let Some(at) = levels.last_mut() else {
            return Ok(());
        };
        let brought_up = if depth == 1 { raised.pop() } else { None };
        let name = if brought_up.is_some() {
            brought_up
        } else {
            let entry = at.dir.read().transpose().about(path)?;
            entry.map(|entry| entry.file_name().to_owned())
        };
        let Some(name) = name else {
            let done = levels.pop();
            if let (Some(done), Some(above)) = (done, levels.last()) {
                let above = above.dir.fd().about(path)?;
                // Filled meanwhile: found again when the one above is not empty.
                let _ = rustix::fs::unlinkat(above, &done.name, AtFlags::REMOVEDIR);
            }
            continue;
        };
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let dir = at.dir.fd().about(path)?;
        match rustix::fs::unlinkat(dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => continue,
            Err(Errno::ISDIR) => {}
            Err(errno) => return Err(errno).about(path),
        }
        if depth < DEPTH {
            let inner = open_dir(dir, &*name).about(path)?;
            levels.push(level(inner, name)?);
            continue;
        }
        let up = CString::new(hidden_name()).unwrap_or_default();
        if let [first, .., last] = &levels[..] {
            let (first, last) = (first.dir.fd().about(path)?, last.dir.fd().about(path)?);
            rustix::fs::renameat(last, &name, first, &up).about(path)?;
        }
        if raised.len() < RAISED {
            raised.push(up);
        }
    }
}
