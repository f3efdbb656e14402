//! `file.unpack`: extracts a tar archive.
//!
//! The archive arrives in pieces. The agent validates the complete archive before it extracts anything, so an archive
//! with an invalid entry leaves nothing behind.
//!
//! Everything is created by descriptor beneath the directory and through no link. Neither the order of entries nor a
//! guest that swaps directories leads outside.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};

use box_protocol::BoxError;
use box_protocol::actions::{FileTreeResult, FileUnpackParams};
use box_sys::{ENTRY_NAMES_BYTES, LimitedReader};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use super::error::PathContext;
use super::guest_root::{Location, Step, beneath, make_dir};
use super::pack::Tally;
use super::stat::MODE_BITS;
use super::temp_file::{TempFile, temp_name};
use super::upload::{Outcome, PieceResult};

/// `file.unpack`.
pub(super) fn unpack(
    step: &Step<'_>,
    params: &FileUnpackParams,
) -> Result<FileTreeResult, BoxError> {
    let guest_root = step.guest_root;
    let path = guest_root.path(&params.path, params.expand)?;
    let create = || {
        let (dir, _) = guest_root.make_dirs(&path)?;
        let name = temp_name();
        TempFile::new(Location { dir, name }, &path)
    };
    let uploads = &guest_root.uploads;
    match uploads.add_piece(guest_root, &path, &params.upload, &params.data, create)? {
        PieceResult::Partial(_) => Ok(FileTreeResult::default()),
        PieceResult::Repeated(Outcome::Unpacked(total)) => Ok(total),
        PieceResult::Repeated(Outcome::Written(_)) => Err(BoxError::conflict(
            "upload: the id belongs to a file upload; choose another id",
        )),
        PieceResult::Complete(temp_file) => {
            let total = unpack_complete(step, &temp_file, params, &path)?;
            uploads.record_outcome(&params.upload, path, Outcome::Unpacked(total));
            Ok(total)
        }
    }
}

/// Validates and extracts a complete archive.
///
/// Dropping the temporary file removes it.
fn unpack_complete(
    step: &Step<'_>,
    temp_file: &TempFile,
    params: &FileUnpackParams,
    path: &str,
) -> Result<FileTreeResult, BoxError> {
    let mut archive = File::from(temp_file.file.try_clone().with_path(path)?);
    let tally = Tally::new(params.caps);
    for_each_entry(step, &mut archive, tally, path, |_, _| Ok(()))?;
    extract_all(step, &mut archive, tally, &temp_file.location.dir, path)
}

/// Extracts an archive.
///
/// The temporary file belongs to the guest, which may have changed it since the validation. All checks are therefore
/// repeated.
fn extract_all(
    step: &Step<'_>,
    archive: &mut File,
    tally: Tally,
    root: &OwnedFd,
    path: &str,
) -> Result<FileTreeResult, BoxError> {
    let mut modes = BTreeMap::new();
    let total = for_each_entry(step, archive, tally, path, |info, entry| {
        extract(step, root, info, entry, &mut modes, path)
    })?;
    // Modes are set last: a read-only directory cannot be filled.
    for (dir, mode) in modes.iter().rev() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let dir = beneath(root, dir, flags).with_path(path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(*mode)).with_path(path)?;
    }
    Ok(total)
}

/// Visits every entry after checking it against the rules and limits.
///
/// Returns the totals.
fn for_each_entry(
    step: &Step<'_>,
    archive: &mut File,
    mut tally: Tally,
    path: &str,
    mut visit: impl FnMut(
        EntryInfo,
        &mut Entry<'_, LimitedReader<'_, &mut File>>,
    ) -> Result<(), BoxError>,
) -> Result<FileTreeResult, BoxError> {
    archive.rewind().with_path(path)?;
    let room = &Cell::new(ENTRY_NAMES_BYTES);
    let mut archive = Archive::new(LimitedReader::new(archive, room));
    for entry in archive.entries_with_seek().with_path(path)? {
        step.cancel.check()?;
        let mut entry = entry.with_path(path)?;
        let info = EntryInfo::of(&entry)?;
        step.guest_root.check_size(entry.size())?;
        // A hard link adds no bytes; a regular file adds its stated size.
        tally.add(match info.kind {
            Kind::File => entry.size(),
            Kind::Directory | Kind::Symlink(_) | Kind::Link(_) => 0,
        })?;
        room.set(u64::MAX);
        visit(info, &mut entry)?;
        room.set(ENTRY_NAMES_BYTES);
    }
    Ok(tally.total)
}

/// A valid entry.
#[derive(Debug, PartialEq, Eq)]
struct EntryInfo {
    name: String,
    mode: u32,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    File,
    Directory,
    /// The target is arbitrary: the link is created and never followed here.
    Symlink(Vec<u8>),
    /// A hard link to another entry.
    Link(String),
}

impl EntryInfo {
    fn of<R: Read>(entry: &Entry<'_, R>) -> Result<Self, BoxError> {
        let header = entry.header();
        let mode = header
            .mode()
            .map_err(|_| invalid_archive("an entry has no mode"))?
            & MODE_BITS;
        let target = entry.link_name_bytes();
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Directory => Kind::Directory,
            EntryType::Symlink => {
                let target = target.filter(|target| !target.is_empty());
                Kind::Symlink(
                    target
                        .ok_or_else(|| invalid_archive("a link has no target"))?
                        .into_owned(),
                )
            }
            EntryType::Link => Kind::Link(relative_name(
                &target.ok_or_else(|| invalid_archive("a link has no target"))?,
            )?),
            _ => {
                return Err(invalid_archive("an entry is not a file, directory or link"));
            }
        };
        let name = relative_name(&entry.path_bytes())?;
        if name.is_empty() && kind != Kind::Directory {
            return Err(invalid_archive("an entry has no name"));
        }
        Ok(Self { name, mode, kind })
    }
}

/// Validates a name. It stays within the directory; empty means the directory.
fn relative_name(bytes: &[u8]) -> Result<String, BoxError> {
    let name = std::str::from_utf8(bytes).map_err(|_| invalid_archive("a name is not UTF-8"))?;
    if name.starts_with('/') || name.contains('\0') {
        return Err(invalid_archive("a name is absolute"));
    }
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(invalid_archive("a name leads outside the directory")),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

fn invalid_archive(why: &str) -> BoxError {
    BoxError::validation(format!("archive: {why}"))
}

fn extract(
    step: &Step<'_>,
    root: &OwnedFd,
    info: EntryInfo,
    entry: &mut impl Read,
    modes: &mut BTreeMap<String, u32>,
    path: &str,
) -> Result<(), BoxError> {
    let (parent_path, name) = info.name.rsplit_once('/').unwrap_or(("", &info.name));
    if name.is_empty() {
        return Ok(());
    }
    let dir = parent(root, parent_path).with_path(path)?;
    // Created under a temporary name and renamed, over anything that an earlier entry or the guest has put there.
    let temp = temp_name();
    match info.kind {
        Kind::Directory => {
            make_dir(&dir, name, 0o700).with_path(path)?;
            modes.insert(info.name, info.mode);
            return Ok(());
        }
        Kind::Symlink(target) => {
            rustix::fs::symlinkat(&*target, &dir, &*temp).with_path(path)?;
        }
        Kind::Link(target) => {
            let (parent_path, source) = target.rsplit_once('/').unwrap_or(("", &target));
            let from =
                beneath(root, parent_path, OFlags::PATH | OFlags::DIRECTORY).with_path(path)?;
            rustix::fs::linkat(&from, source, &dir, &*temp, AtFlags::empty()).with_path(path)?;
        }
        Kind::File => {
            let name = name.to_owned();
            let temp_file = TempFile::new(Location { dir, name }, path)?;
            write_contents(step, &temp_file.file, entry, info.mode)?;
            return temp_file.rename(true).map(drop).with_path(path);
        }
    }
    let renamed = rustix::fs::renameat_with(&dir, &*temp, &dir, name, RenameFlags::empty());
    // Renaming one name of a file over another leaves both, so the temporary name is always removed.
    let _ = rustix::fs::unlinkat(&dir, &*temp, AtFlags::empty());
    renamed.with_path(path)
}

fn write_contents(
    step: &Step<'_>,
    file: &OwnedFd,
    entry: &mut impl Read,
    mode: u32,
) -> Result<(), BoxError> {
    let mut buffer = vec![0; 128 << 10];
    loop {
        step.cancel.check()?;
        let read = entry.read(&mut buffer).with_path("archive")?;
        if read == 0 {
            break;
        }
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(file, rest));
            rest = &rest[written.with_path("archive")?..];
        }
    }
    rustix::fs::fchmod(file.as_fd(), Mode::from_raw_mode(mode)).with_path("archive")
}

/// The directory of an entry. An archive may omit its directories.
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
    fn names_stay_within_the_directory() {
        for (name, inner) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("./", ""),
            ("a/./b", "a/b"),
            ("..a/b..", "..a/b.."),
        ] {
            assert_eq!(relative_name(name.as_bytes()).unwrap(), inner);
        }
        for name in ["/a", "../a", "a/../../b", "a/..", "//a", "a\0b"] {
            assert!(relative_name(name.as_bytes()).is_err(), "{name}");
        }
        assert!(relative_name(&[b'a', 0xff]).is_err());
    }

    fn extracted(archive: &mut File, caps: TreeCaps) -> (Result<FileTreeResult, BoxError>, usize) {
        let root = tempfile::tempdir().unwrap();
        let files = super::super::tests::files_in(root.path());
        let dir = files.guest_root.open_dir("/").unwrap();
        let result = super::super::tests::step(&files.guest_root, |step| {
            extract_all(step, archive, Tally::new(caps), &dir, "/t")
        });
        (result, std::fs::read_dir(root.path()).unwrap().count())
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

    /// Simulates a guest that has replaced the archive after the validation.
    #[test]
    fn limits_apply_to_extraction_independently_of_validation() {
        let caps = |entries, bytes| TreeCaps { entries, bytes };
        let (done, files) = extracted(&mut packed(&["a", "b", "c"]), caps(None, None));
        assert_eq!((done.unwrap().bytes, files), (12, 3));
        for caps in [caps(Some(2), None), caps(None, Some(8))] {
            let (refused, files) = extracted(&mut packed(&["a", "b", "c"]), caps);
            assert_eq!(refused.unwrap_err().code(), box_protocol::Code::TooLarge);
            assert_eq!(files, 2);
        }
        let (done, _) = extracted(&mut packed(&[&"n".repeat(150)]), caps(None, None));
        assert_eq!(done.unwrap().entries, 1, "a long name is accepted");
    }

    #[test]
    fn a_name_of_a_terabyte_is_not_read() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let mut archive = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut archive, header.as_bytes()).unwrap();
        archive.set_len(1 << 41).unwrap();
        let (refused, _) = extracted(&mut archive, TreeCaps::default());
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), box_protocol::Code::Validation);
        assert!(refused.message().contains("too long"), "{refused:?}");
    }
}
