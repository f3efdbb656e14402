//! Writes the new view to the directory of the host.
//!
//! # Steps
//! 1. The first walk finds conflicts: files that changed on the host after the box made its own
//!    version (`snapshot/version_times.rs`). So the rule needs no record of the host's files.
//! 2. Without a conflict, or if the caller insists, the second walk writes. Each file is new or old
//!    at any moment. The walk checks each file again, because users of the host continue to work.
//!
//! Equal files are no difference, so an interrupted apply can be repeated.

use std::io;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::compare::{Entry, Found, Views, Walk};
use super::host::{Host, Lookup};
use super::{Applied, ApplyOptions, ChangeKind, shown, split};
use crate::error::{At, Result};

/// Writes the differences to a directory of the host.
///
/// `views` makes the views, once for each walk.
pub(crate) fn apply<'a>(
    views: &dyn Fn() -> Result<Views<'a>>,
    host: &mut Host,
    options: &ApplyOptions,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Applied> {
    let mut applied = Applied::default();
    views()?.walk(None, &mut |found| {
        check(host, found, options, &mut applied);
        Ok(Walk::Continue)
    })?;
    if options.dry_run || (applied.conflicts.count > 0 && !options.force) {
        return Ok(applied);
    }
    let planned = std::mem::take(&mut applied);
    applied.skipped = planned.skipped;
    let mut modes = Vec::new();
    views()?.walk(None, &mut |found| {
        if skip_reason(host, found).is_some() {
            return Ok(Walk::Continue);
        }
        let written = match conflict(host, found) {
            Ok(Some(path)) if !options.force => {
                applied.conflicts.add(&path, "");
                return Ok(Walk::End);
            }
            Ok(_) => write(host, found, &mut modes, is_cancelled),
            Err(error) => Err(error),
        };
        if is_cancelled() {
            return Err(Errno::CANCELED).at("apply the changes");
        }
        match written {
            Ok(()) => count(&mut applied, found.kind),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                applied.failed = Some((shown(found.path), errno));
                return Ok(Walk::End);
            }
        }
        Ok(Walk::Continue)
    })?;
    // The innermost first, because a directory may close those below it.
    for (path, mode) in modes.iter().rev() {
        if let Err(error) = host.finish_directory(path, *mode)
            && applied.failed.is_none()
        {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            applied.failed = Some((shown(path), errno));
        }
    }
    Ok(applied)
}

fn count(applied: &mut Applied, kind: ChangeKind) {
    let number = match kind {
        ChangeKind::Added => &mut applied.added,
        ChangeKind::Changed => &mut applied.changed,
        ChangeKind::Deleted => &mut applied.deleted,
    };
    *number += 1;
}

/// Counts a difference, and finds its conflict.
fn check(host: &Host, found: &Found<'_>, options: &ApplyOptions, applied: &mut Applied) {
    if let Some(why) = skip_reason(host, found) {
        applied.skipped.add(found.path, why);
        return;
    }
    match conflict(host, found) {
        Ok(Some(path)) if !options.force => applied.conflicts.add(&path, ""),
        // The second walk reports the error, if it occurs again.
        Ok(_) | Err(_) => {}
    }
    count(applied, found.kind);
}

/// Why a difference is never applied, if it is not.
fn skip_reason(host: &Host, found: &Found<'_>) -> Option<&'static str> {
    let (_, name) = split(found.path).ok()?;
    if name.as_c_str() == host.temporary() {
        return Some("the name is reserved for temporary files");
    }
    let new = found.new.as_ref()?;
    match new.kind() {
        FileType::RegularFile | FileType::Directory | FileType::Symlink => None,
        FileType::Fifo => Some("a FIFO"),
        FileType::Socket => Some("a socket"),
        _ => Some("a device"),
    }
}

/// The path of a file of the host that changed after the box made its own version.
fn conflict(host: &Host, found: &Found<'_>) -> io::Result<Option<Vec<u8>>> {
    let (parent, name) = split(found.path).map_err(|_| io::ErrorKind::InvalidInput)?;
    let time = found.made_at;
    let Lookup::Found(stat) = host.look(parent, &name)? else {
        return Ok(None);
    };
    if !FileType::from_raw_mode(stat.st_mode).is_dir() {
        let changed = host.changed_after(&stat, time);
        return Ok(changed.then(|| found.path.to_vec()));
    }
    if found.new.as_ref().is_some_and(|new| new.kind().is_dir()) {
        return Ok(None);
    }
    // The directory is about to be removed.
    let below = host.changed_below(parent, &name, time)?;
    Ok(below.map(|below| [found.path, b"/", &below].concat()))
}

/// Writes one difference.
fn write(
    host: &mut Host,
    found: &Found<'_>,
    modes: &mut Vec<(Vec<u8>, u32)>,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<()> {
    let (parent, name) = split(found.path).map_err(|_| io::ErrorKind::InvalidInput)?;
    let Some(new) = &found.new else {
        return host.remove(parent, &name);
    };
    let new = Entry {
        name: &name,
        ..*new
    };
    match new.kind() {
        FileType::Directory => {
            host.put_directory(parent, &new)?;
            if new.stat.st_mode & 0o700 != 0o700 {
                modes.push((found.path.to_vec(), new.stat.st_mode));
            }
            Ok(())
        }
        FileType::RegularFile => host.put_file(parent, &new, &|| !is_cancelled()),
        FileType::Symlink => host.put_link(parent, &new),
        _ => Err(Errno::OPNOTSUPP.into()),
    }
}
