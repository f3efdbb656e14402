//! Writing a file: at once, in pieces, or at its end.

use box_protocol::BoxError;
use box_protocol::actions::{FileCreate, FileStatInfo, FileWriteParams};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::draft::{Draft, write_at};
use super::error::About;
use super::ground::{Step, regular};
use super::stat::{Change, etag, info, size};
use super::upload::{Outcome, Piece};

/// The mode of a new file, as a command's would be.
const NEW_FILE: u32 = 0o644;

/// `file.write`.
pub(super) fn write(step: &Step<'_>, params: &FileWriteParams) -> Result<FileStatInfo, BoxError> {
    let ground = step.ground;
    let path = ground.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = Change::new(ground, params.mode, owner, group)?;
    let begin = || {
        let spot = ground.spot_for(&path, params.parents)?;
        spot.writable(&path)?;
        Draft::new(spot, &path)
    };
    let Some(piece) = &params.upload else {
        if params.append {
            return append(step, path, params, change);
        }
        ground.room(params.data.len() as u64)?;
        let draft = begin()?;
        write_at(&draft.file, &params.data, 0).about(&path)?;
        return finish(step, draft, path, params, change);
    };
    if params.append {
        return Err(BoxError::validation("append: not in pieces"));
    }
    match ground
        .uploads
        .take(ground, &path, piece, &params.data, begin)?
    {
        Piece::More(stat) => Ok(info(&ground.guest, path, &stat)),
        Piece::Last(draft) => {
            let written = finish(step, draft, path.clone(), params, change)?;
            ground
                .uploads
                .finished(piece, path, Outcome::Written(written.clone()));
            Ok(written)
        }
        Piece::Again(Outcome::Written(written)) => Ok(written),
        Piece::Again(Outcome::Unpacked(_)) => {
            Err(BoxError::conflict("upload: it was of an archive"))
        }
    }
}

/// Gives a whole draft its mode, and its place.
fn finish(
    step: &Step<'_>,
    draft: Draft,
    path: String,
    params: &FileWriteParams,
    change: Change,
) -> Result<FileStatInfo, BoxError> {
    step.wanted.check()?;
    let old = draft.spot.writable(&path)?;
    if old.is_some() && params.create == FileCreate::New {
        return Err(Errno::EXIST).about(&path);
    }
    let mode = old.map_or(NEW_FILE, |old| old.st_mode);
    change.apply(step.ground, &draft.file, mode).about(&path)?;
    let replace = params.create == FileCreate::Any;
    let if_match = params.if_match.as_deref();
    let stat = draft.place(step.ground, if_match, replace, &path)?;
    Ok(info(&step.ground.guest, path, &stat))
}

/// Adds to a file. The kernel puts each write at the end, so that nobody's is lost.
fn append(
    step: &Step<'_>,
    path: String,
    params: &FileWriteParams,
    change: Change,
) -> Result<FileStatInfo, BoxError> {
    const OPEN: OFlags = OFlags::WRONLY
        .union(OFlags::APPEND)
        .union(OFlags::NOFOLLOW)
        .union(OFlags::NONBLOCK)
        .union(OFlags::CLOEXEC);
    let ground = step.ground;
    let spot = ground.spot_for(&path, params.parents)?;
    let new = Mode::from_raw_mode(NEW_FILE);
    let create = || {
        let made = rustix::fs::openat(
            &spot.dir,
            &spot.name,
            OPEN | OFlags::CREATE | OFlags::EXCL,
            new,
        )?;
        change.apply(ground, &made, NEW_FILE)?;
        Ok(made)
    };
    let found = || rustix::fs::openat(&spot.dir, &spot.name, OPEN, Mode::empty());
    let file = if params.create == FileCreate::New {
        create()
    } else {
        match found() {
            Err(Errno::NOENT) if params.if_match.is_none() => match create() {
                // Somebody else has made it just now.
                Err(Errno::EXIST) => found(),
                made => made,
            },
            found => found,
        }
    };
    let file = file.about(&path)?;
    let before = rustix::fs::fstat(&file).about(&path)?;
    regular(&before, &path)?;
    if params
        .if_match
        .as_ref()
        .is_some_and(|expected| *expected != etag(&before))
    {
        return Err(BoxError::conflict("if_match: the file is another one"));
    }
    ground.room(size(&before).saturating_add(params.data.len() as u64))?;
    let mut rest: &[u8] = &params.data;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&file, rest)).about(&path)?;
        rest = &rest[written..];
    }
    if params.mode.is_some() || owned(params) {
        change.apply(ground, &file, before.st_mode).about(&path)?;
    }
    let stat = rustix::fs::fstat(&file).about(&path)?;
    Ok(info(&ground.guest, path, &stat))
}

fn owned(params: &FileWriteParams) -> bool {
    params.owner.is_some() || params.group.is_some()
}
