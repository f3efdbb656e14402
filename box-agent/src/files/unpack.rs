//! A tree from a tar archive. The archive comes in pieces, is looked through when it is whole, and only then unpacked: one with
//! a hostile entry leaves nothing. What is made is made by descriptor beneath the directory, through no link, so that no
//! order of entries and no guest that swaps directories leads out of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek as _};
use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use box_protocol::actions::{FileTreeResult, FileUnpackParams};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use super::draft::{Draft, hidden_name};
use super::error::About;
use super::ground::{Spot, Step, beneath, make_dir};
use super::pack::Tally;
use super::stat::MODE_BITS;
use super::upload::{Outcome, Piece};

/// The longest name, or set of extra attributes, of one entry.
const EXTRA_BYTES: u64 = 64 << 10;

/// `file.unpack`.
pub(super) fn unpack(
    step: &Step<'_>,
    params: &FileUnpackParams,
) -> Result<FileTreeResult, BoxError> {
    let ground = step.ground;
    let path = ground.path(&params.path, params.expand)?;
    let begin = || {
        let (dir, _) = ground.make_dirs(&path)?;
        let name = hidden_name();
        Draft::new(Spot { dir, name }, &path)
    };
    let uploads = &ground.uploads;
    match uploads.take(ground, &path, &params.upload, &params.data, begin)? {
        Piece::More(_) => Ok(FileTreeResult::default()),
        Piece::Again(Outcome::Unpacked(total)) => Ok(total),
        Piece::Again(Outcome::Written(_)) => Err(BoxError::conflict("upload: it was of a file")),
        Piece::Last(draft) => {
            let total = whole(step, &draft, params, &path)?;
            uploads.finished(&params.upload, path, Outcome::Unpacked(total));
            Ok(total)
        }
    }
}

/// Unpacks an archive that is all there. Dropping the draft removes it.
fn whole(
    step: &Step<'_>,
    draft: &Draft,
    params: &FileUnpackParams,
    path: &str,
) -> Result<FileTreeResult, BoxError> {
    let mut archive = File::from(draft.file.try_clone().about(path)?);
    let mut tally = Tally::new(params.caps);
    look_at_sizes(step, &mut archive, path)?;
    each(step, &mut archive, path, |entry| {
        let what = What::of(entry)?;
        step.ground.room(entry.size())?;
        // A hard link makes no bytes, a plain file as many as it says.
        tally.add(match what.kind {
            Kind::File => entry.size(),
            Kind::Directory | Kind::Symlink(_) | Kind::Link(_) => 0,
        })
    })?;
    let mut modes = BTreeMap::new();
    each(step, &mut archive, path, |entry| {
        make(
            step,
            &draft.spot.dir,
            What::of(entry)?,
            entry,
            &mut modes,
            path,
        )
    })?;
    // Last: a directory that may not be written cannot be filled.
    for (dir, mode) in modes.iter().rev() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let dir = beneath(&draft.spot.dir, dir, flags).about(path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(*mode)).about(path)?;
    }
    Ok(tally.total)
}

/// Refuses names and attributes that would have to be held in memory and are too long for that.
fn look_at_sizes(step: &Step<'_>, archive: &mut File, path: &str) -> Result<(), BoxError> {
    archive.rewind().about(path)?;
    let mut archive = Archive::new(archive);
    let entries = archive.entries_with_seek().about(path)?.raw(true);
    for entry in entries {
        step.wanted.check()?;
        let entry = entry.about(path)?;
        let header = entry.header();
        let extra = matches!(
            header.entry_type(),
            EntryType::GNULongName
                | EntryType::GNULongLink
                | EntryType::XHeader
                | EntryType::XGlobalHeader
        );
        if extra && header.entry_size().about(path)? > EXTRA_BYTES {
            return Err(hostile("a name or attribute is too long"));
        }
    }
    Ok(())
}

type Packed<'a, 'b> = Entry<'a, &'b mut File>;

fn each(
    step: &Step<'_>,
    archive: &mut File,
    path: &str,
    mut visit: impl FnMut(&mut Packed<'_, '_>) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    archive.rewind().about(path)?;
    let mut archive = Archive::new(archive);
    for entry in archive.entries_with_seek().about(path)? {
        step.wanted.check()?;
        visit(&mut entry.about(path)?)?;
    }
    Ok(())
}

/// An entry that may be unpacked.
#[derive(Debug, PartialEq, Eq)]
struct What {
    name: String,
    mode: u32,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    File,
    Directory,
    /// Leading wherever it says: it is made, and never followed here.
    Symlink(Vec<u8>),
    /// To another entry.
    Link(String),
}

impl What {
    fn of<R: Read>(entry: &Entry<'_, R>) -> Result<Self, BoxError> {
        let header = entry.header();
        let mode = header.mode().map_err(|_| hostile("no mode"))? & MODE_BITS;
        let target = entry.link_name_bytes();
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Directory => Kind::Directory,
            EntryType::Symlink => {
                let target = target.filter(|target| !target.is_empty());
                Kind::Symlink(
                    target
                        .ok_or_else(|| hostile("a link to nothing"))?
                        .into_owned(),
                )
            }
            EntryType::Link => Kind::Link(inner_name(
                &target.ok_or_else(|| hostile("a link to nothing"))?,
            )?),
            _ => return Err(hostile("neither a file, nor a directory, nor a link")),
        };
        let name = inner_name(&entry.path_bytes())?;
        if name.is_empty() && kind != Kind::Directory {
            return Err(hostile("no name"));
        }
        Ok(Self { name, mode, kind })
    }
}

/// A name that stays within the directory; empty for the directory itself.
fn inner_name(bytes: &[u8]) -> Result<String, BoxError> {
    let name = std::str::from_utf8(bytes).map_err(|_| hostile("a name that is no text"))?;
    if name.starts_with('/') || name.contains('\0') {
        return Err(hostile("an absolute name"));
    }
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(hostile("a name that leads out")),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

fn hostile(why: &str) -> BoxError {
    BoxError::validation(format!("archive: {why}"))
}

fn make(
    step: &Step<'_>,
    root: &OwnedFd,
    what: What,
    entry: &mut impl Read,
    modes: &mut BTreeMap<String, u32>,
    path: &str,
) -> Result<(), BoxError> {
    let (above, name) = what.name.rsplit_once('/').unwrap_or(("", &what.name));
    if name.is_empty() {
        return Ok(());
    }
    let dir = parent(root, above).about(path)?;
    // Made under a hidden name and put in place whole, over whatever an earlier entry or the guest has put there.
    let hidden = hidden_name();
    match what.kind {
        Kind::Directory => {
            make_dir(&dir, name, 0o700).about(path)?;
            modes.insert(what.name, what.mode);
            return Ok(());
        }
        Kind::Symlink(target) => {
            rustix::fs::symlinkat(&*target, &dir, &*hidden).about(path)?;
        }
        Kind::Link(target) => {
            let (above, source) = target.rsplit_once('/').unwrap_or(("", &target));
            let from = beneath(root, above, OFlags::PATH | OFlags::DIRECTORY).about(path)?;
            rustix::fs::linkat(&from, source, &dir, &*hidden, AtFlags::empty()).about(path)?;
        }
        Kind::File => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(0o600);
            let file = rustix::fs::openat(&dir, &*hidden, flags, mode).about(path)?;
            let filled = fill(step, &file, entry, what.mode);
            if let Err(error) = filled {
                let _ = rustix::fs::unlinkat(&dir, &*hidden, AtFlags::empty());
                return Err(error);
            }
        }
    }
    let placed = rustix::fs::renameat_with(&dir, &*hidden, &dir, name, RenameFlags::empty());
    // Two names of one file stay two, so the hidden one goes in any case.
    let _ = rustix::fs::unlinkat(&dir, &*hidden, AtFlags::empty());
    placed.about(path)
}

fn fill(step: &Step<'_>, file: &OwnedFd, entry: &mut impl Read, mode: u32) -> Result<(), BoxError> {
    let mut buffer = vec![0; 128 << 10];
    loop {
        step.wanted.check()?;
        let read = entry.read(&mut buffer).about("archive")?;
        if read == 0 {
            break;
        }
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(file, rest));
            rest = &rest[written.about("archive")?..];
        }
    }
    rustix::fs::fchmod(file.as_fd(), Mode::from_raw_mode(mode)).about("archive")
}

/// The directory of an entry; archives may leave theirs out.
fn parent(root: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    match beneath(root, path, flags) {
        Err(Errno::NOENT) => {}
        found => return found,
    }
    let mut dir = beneath(root, "", flags)?;
    for part in path.split('/') {
        dir = make_dir(&dir, part, 0o755)?.0;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        for (name, inner) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("./", ""),
            ("a/./b", "a/b"),
            ("..a/b..", "..a/b.."),
        ] {
            assert_eq!(inner_name(name.as_bytes()).unwrap(), inner);
        }
        for name in ["/a", "../a", "a/../../b", "a/..", "//a", "a\0b"] {
            assert!(inner_name(name.as_bytes()).is_err(), "{name}");
        }
        assert!(inner_name(&[b'a', 0xff]).is_err());
    }
}
