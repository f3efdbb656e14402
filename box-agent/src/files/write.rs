//! `file.write`: at once, in pieces, or at the end of a file.

use box_protocol::BoxError;
use box_protocol::actions::{FileCreate, FileStatInfo, FileWriteParams};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::error::PathContext;
use super::guest_root::{Step, check_regular};
use super::stat::{AttributeChange, created_at, etag, info, size};
use super::temp_file::{TempFile, write_at};
use super::upload::{Outcome, PieceResult};
use super::xattrs;

/// The mode of a new file, the same as for a command.
const NEW_FILE: u32 = 0o644;

/// `file.write`.
pub(super) fn write(step: &Step<'_>, params: &FileWriteParams) -> Result<FileStatInfo, BoxError> {
    let guest_root = step.guest_root;
    let path = guest_root.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = AttributeChange::new(guest_root, params.mode, owner, group)?;
    xattrs::check(&params.xattrs)?;
    let create = || {
        let location = guest_root.location_for(&path, params.parents)?;
        location.check_writable(&path)?;
        TempFile::new(location, &path)
    };
    let Some(piece) = &params.upload else {
        if params.append {
            return append(step, path, params, change);
        }
        guest_root.check_size(params.data.len() as u64)?;
        let temp_file = create()?;
        write_at(&temp_file.file, &params.data, 0).with_path(&path)?;
        return finish(step, temp_file, path, params, change);
    };
    if params.append {
        return Err(BoxError::validation("append: not allowed with upload"));
    }
    match guest_root
        .uploads
        .add_piece(guest_root, &path, piece, &params.data, create)?
    {
        PieceResult::Partial(stat) => Ok(info(&guest_root.guest, path, &stat)),
        PieceResult::Complete(temp_file) => {
            let written = finish(step, temp_file, path.clone(), params, change)?;
            guest_root
                .uploads
                .record_outcome(piece, path, Outcome::Written(written.clone()));
            Ok(written)
        }
        PieceResult::Repeated(Outcome::Written(written)) => Ok(written),
        PieceResult::Repeated(Outcome::Unpacked(_)) => Err(BoxError::conflict(
            "upload: the id belongs to an archive upload; choose another id",
        )),
    }
}

/// Sets the mode of a complete temporary file and moves it to its location.
fn finish(
    step: &Step<'_>,
    temp_file: TempFile,
    path: String,
    params: &FileWriteParams,
    change: AttributeChange,
) -> Result<FileStatInfo, BoxError> {
    step.cancel.check()?;
    let old = temp_file.location.check_writable(&path)?;
    if old.is_some() && params.create == FileCreate::New {
        return Err(Errno::EXIST).with_path(&path);
    }
    let mode = old.map_or(NEW_FILE, |old| old.st_mode);
    change
        .apply(step.guest_root, &temp_file.file, mode)
        .with_path(&path)?;
    xattrs::set(&temp_file.file, &params.xattrs, &path)?;
    let replace = params.create == FileCreate::Any;
    let if_match = params.if_match.as_deref();
    let created_at = created_at(&temp_file.file, "");
    let stat = temp_file.install(step.guest_root, if_match, replace, &path)?;
    Ok(FileStatInfo {
        created_at,
        xattrs: params.xattrs.clone(),
        ..info(&step.guest_root.guest, path, &stat)
    })
}

/// Appends to a file.
///
/// The kernel writes at the end, so concurrent writes are not lost.
fn append(
    step: &Step<'_>,
    path: String,
    params: &FileWriteParams,
    change: AttributeChange,
) -> Result<FileStatInfo, BoxError> {
    const OPEN: OFlags = OFlags::WRONLY
        .union(OFlags::APPEND)
        .union(OFlags::NOFOLLOW)
        .union(OFlags::NONBLOCK)
        .union(OFlags::CLOEXEC);
    let guest_root = step.guest_root;
    let location = guest_root.location_for(&path, params.parents)?;
    let new = Mode::from_raw_mode(NEW_FILE);
    let create = || {
        let made = rustix::fs::openat(
            &location.dir,
            &location.name,
            OPEN | OFlags::CREATE | OFlags::EXCL,
            new,
        )?;
        change.apply(guest_root, &made, NEW_FILE)?;
        Ok(made)
    };
    let open = || rustix::fs::openat(&location.dir, &location.name, OPEN, Mode::empty());
    let file = if params.create == FileCreate::New {
        create()
    } else {
        match open() {
            Err(Errno::NOENT) if params.if_match.is_none() => match create() {
                // Another process has created the file just now.
                Err(Errno::EXIST) => open(),
                made => made,
            },
            opened => opened,
        }
    };
    let file = file.with_path(&path)?;
    let before = rustix::fs::fstat(&file).with_path(&path)?;
    check_regular(&before, &path)?;
    if params
        .if_match
        .as_ref()
        .is_some_and(|expected| *expected != etag(&before))
    {
        return Err(BoxError::conflict(
            "if_match: etag mismatch; read the file again",
        ));
    }
    guest_root.check_size(size(&before).saturating_add(params.data.len() as u64))?;
    let mut rest: &[u8] = &params.data;
    while !rest.is_empty() {
        let written =
            rustix::io::retry_on_intr(|| rustix::io::write(&file, rest)).with_path(&path)?;
        rest = &rest[written..];
    }
    if params.mode.is_some() || changes_owner(params) {
        change
            .apply(guest_root, &file, before.st_mode)
            .with_path(&path)?;
    }
    xattrs::set(&file, &params.xattrs, &path)?;
    let stat = rustix::fs::fstat(&file).with_path(&path)?;
    Ok(FileStatInfo {
        created_at: created_at(&file, ""),
        xattrs: xattrs::read(&file, ""),
        ..info(&guest_root.guest, path, &stat)
    })
}

fn changes_owner(params: &FileWriteParams) -> bool {
    params.owner.is_some() || params.group.is_some()
}
