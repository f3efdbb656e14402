//! A tree from a tar archive. The archive comes in pieces, is looked through when it is whole, and only then unpacked: one with
//! a hostile entry leaves nothing. What is made is made by descriptor beneath the directory, through no link, so that no
//! order of entries and no guest that swaps directories leads out of it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
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

/// Bytes that an entry's names, attributes and headers may take.
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
    let tally = Tally::new(params.caps);
    each(step, &mut archive, tally, path, |_, _| Ok(()))?;
    make_all(step, &mut archive, tally, &draft.spot.dir, path)
}

/// Makes what an archive holds. The draft is a file of the guest's, who may have changed it since it was looked through: all
/// that was looked at then is looked at again.
fn make_all(
    step: &Step<'_>,
    archive: &mut File,
    tally: Tally,
    root: &OwnedFd,
    path: &str,
) -> Result<FileTreeResult, BoxError> {
    let mut modes = BTreeMap::new();
    let total = each(step, archive, tally, path, |what, entry| {
        make(step, root, what, entry, &mut modes, path)
    })?;
    // Last: a directory that may not be written cannot be filled.
    for (dir, mode) in modes.iter().rev() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let dir = beneath(root, dir, flags).about(path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(*mode)).about(path)?;
    }
    Ok(total)
}

/// An archive, and how much of it may still be read to find the next entry: names and attributes are held in memory.
struct Metered<'a> {
    archive: &'a mut File,
    room: &'a Cell<u64>,
}

impl Read for Metered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.room.get()).unwrap_or(usize::MAX);
        if room == 0 {
            return Err(io::Error::other("a name or attribute is too long"));
        }
        let most = buffer.len().min(room);
        let read = self.archive.read(&mut buffer[..most])?;
        self.room.set(self.room.get() - read as u64);
        Ok(read)
    }
}

impl Seek for Metered<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.archive.seek(to)
    }
}

/// Visits every entry, if it is one that may be unpacked and there is room for it. What they come to.
fn each(
    step: &Step<'_>,
    archive: &mut File,
    mut tally: Tally,
    path: &str,
    mut visit: impl FnMut(What, &mut Entry<'_, Metered<'_>>) -> Result<(), BoxError>,
) -> Result<FileTreeResult, BoxError> {
    archive.rewind().about(path)?;
    let room = &Cell::new(EXTRA_BYTES);
    let mut archive = Archive::new(Metered { archive, room });
    for entry in archive.entries_with_seek().about(path)? {
        step.wanted.check()?;
        let mut entry = entry.about(path)?;
        let what = What::of(&entry)?;
        step.ground.room(entry.size())?;
        // A hard link makes no bytes, a plain file as many as it says.
        tally.add(match what.kind {
            Kind::File => entry.size(),
            Kind::Directory | Kind::Symlink(_) | Kind::Link(_) => 0,
        })?;
        room.set(u64::MAX);
        visit(what, &mut entry)?;
        room.set(EXTRA_BYTES);
    }
    Ok(tally.total)
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
            let name = name.to_owned();
            let draft = Draft::new(Spot { dir, name }, path)?;
            fill(step, &draft.file, entry, what.mode)?;
            return draft.put(true).map(drop).about(path);
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
    use box_protocol::actions::TreeCaps;

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

    fn made(archive: &mut File, caps: TreeCaps) -> (Result<FileTreeResult, BoxError>, usize) {
        let root = tempfile::tempdir().unwrap();
        let files = super::super::tests::ground(root.path());
        let dir = files.ground.open_dir("/").unwrap();
        let made = super::super::tests::step(&files.ground, |step| {
            make_all(step, archive, Tally::new(caps), &dir, "/t")
        });
        (made, std::fs::read_dir(root.path()).unwrap().count())
    }

    fn packed(names: &[&str]) -> File {
        let mut archive = tar::Builder::new(tempfile::tempfile().unwrap());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(4);
            archive
                .append_data(&mut header, name, &b"1234"[..])
                .unwrap();
        }
        archive.into_inner().unwrap()
    }

    /// What an archive is when its guest has put another one in the place of what was looked through.
    #[test]
    fn what_is_unpacked_is_held_to_its_limits_whatever_was_looked_at() {
        let caps = |entries, bytes| TreeCaps { entries, bytes };
        let (done, files) = made(&mut packed(&["a", "b", "c"]), caps(None, None));
        assert_eq!((done.unwrap().bytes, files), (12, 3));
        for caps in [caps(Some(2), None), caps(None, Some(8))] {
            let (refused, files) = made(&mut packed(&["a", "b", "c"]), caps);
            assert_eq!(refused.unwrap_err().code(), box_protocol::Code::TooLarge);
            assert_eq!(files, 2);
        }
        let (done, _) = made(&mut packed(&[&"n".repeat(150)]), caps(None, None));
        assert_eq!(done.unwrap().entries, 1, "a long name is fine");
    }

    #[test]
    fn a_name_of_a_terabyte_is_not_read() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let mut archive = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut archive, header.as_bytes()).unwrap();
        archive.set_len(1 << 41).unwrap();
        let (refused, _) = made(&mut archive, TreeCaps::default());
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), box_protocol::Code::Validation);
        assert!(refused.message().contains("too long"), "{refused:?}");
    }
}
