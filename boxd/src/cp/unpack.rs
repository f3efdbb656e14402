//! Unpacks an archive of a guest into a local directory.
//!
//! The guest chooses the archive, and may change the directory meanwhile. So everything is created by descriptor and follows no
//! link, and a link in the place of a copied file is replaced. Files get only permission bits.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use box_sys::{ENTRY_NAMES_BYTES, LimitedReader};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use tar::{Archive, Entry, EntryType};

use super::PERMISSION_BITS;
use super::local::{DirEntry, reopen};
use super::temp_file::TempFile;

/// Unpacks an archive into a directory.
pub(super) fn unpack(archive: impl Read, root: &OwnedFd) -> Result<()> {
    let mut modes = BTreeMap::new();
    let allowance = &Cell::new(ENTRY_NAMES_BYTES);
    let mut archive = Archive::new(LimitedReader::new(archive, allowance));
    for entry in archive.entries()? {
        let mut entry = entry?;
        allowance.set(u64::MAX);
        unpack_entry(&mut entry, root, &mut modes)?;
        allowance.set(ENTRY_NAMES_BYTES);
    }
    // Set modes last, because a read-only directory cannot be filled.
    for (path, mode) in modes.iter().rev() {
        let Ok(directory) = beneath(root, path, OFlags::RDONLY) else {
            continue;
        };
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(*mode))
            .with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Creates the file, directory or link of an entry.
fn unpack_entry(
    entry: &mut Entry<'_, impl Read>,
    root: &OwnedFd,
    modes: &mut BTreeMap<PathBuf, u32>,
) -> Result<()> {
    let path = relative_path(&entry.path()?)?;
    let Some(name) = path.file_name() else {
        return Ok(());
    };
    let display = || path.display().to_string();
    let mode = entry.header().mode()? & PERMISSION_BITS;
    let above = path.parent().unwrap_or(Path::new(""));
    let target = DirEntry {
        directory: directory(root, above).with_context(display)?,
        name: name.to_owned(),
    };
    match entry.header().entry_type() {
        EntryType::Directory => {
            target.make_directory().with_context(display)?;
            modes.insert(path.clone(), mode);
        }
        EntryType::Regular | EntryType::Continuous => {
            let mut temp_file = TempFile::new(&target, mode).with_context(display)?;
            io::copy(entry, &mut temp_file.file).with_context(display)?;
            temp_file.persist(&target).with_context(display)?;
        }
        EntryType::Symlink => {
            let link = entry
                .link_name_bytes()
                .context("symbolic link without a target")?;
            target.make_link(&link).with_context(display)?;
        }
        _ => bail!("{}: unsupported file type", path.display()),
    }
    Ok(())
}

/// Checks that a path stays within the directory; empty for the directory itself.
fn relative_path(path: &Path) -> Result<PathBuf> {
    let mut relative = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => relative.push(part),
            Component::CurDir => {}
            _ => bail!("{}: points outside the target directory", path.display()),
        }
    }
    Ok(relative)
}

/// Opens the directory of an entry, and creates it if missing.
fn directory(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    if let Ok(found) = beneath(root, path, OFlags::RDONLY) {
        return Ok(found);
    }
    let mut directory = reopen(root)?;
    for part in path.components() {
        let name: &OsStr = part.as_os_str();
        let name = name.to_owned();
        directory = DirEntry { directory, name }.make_directory()?;
    }
    Ok(directory)
}

fn beneath(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path == Path::new("") {
        Path::new(".")
    } else {
        path
    };
    let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(
        root,
        path,
        flags,
        Mode::empty(),
        resolve,
    )?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::local::directory as opened;
    use super::*;

    /// An archive with one entry of this kind and mode.
    fn archive(path: &str, kind: EntryType, mode: u32) -> Vec<u8> {
        let mut header = tar::Header::new_ustar();
        // The library refuses to write such names.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(0);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }

    #[test]
    fn a_malicious_archive_is_refused_or_harmless() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        std::fs::create_dir(&to).unwrap();
        let root = opened(&to);
        let unpacked = |path: &str, kind, mode| unpack(archive(path, kind, mode).as_slice(), &root);
        for (path, kind) in [
            ("../x", EntryType::Regular),
            ("/x", EntryType::Regular),
            ("x", EntryType::Char),
            ("x", EntryType::Fifo),
            ("x", EntryType::Link),
        ] {
            assert!(unpacked(path, kind, 0o644).is_err(), "{path} {kind:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        unpacked("set", EntryType::Regular, 0o4755).unwrap();
        let mode = std::fs::metadata(to.join("set"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755, "{mode:o}");
        // A replaced file keeps its mode without set-id bits.
        std::fs::set_permissions(to.join("set"), std::fs::Permissions::from_mode(0o4710)).unwrap();
        unpacked("set", EntryType::Regular, 0o4755).unwrap();
        let mode = std::fs::metadata(to.join("set"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o710, "{mode:o}");
    }

    #[test]
    fn a_link_at_the_target_is_replaced_and_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (to, outside) = (dir.path().join("to"), dir.path().join("outside"));
        std::fs::create_dir(&to).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("f"), "mine").unwrap();
        std::os::unix::fs::symlink(outside.join("f"), to.join("file")).unwrap();
        for name in ["directory", "above"] {
            std::os::unix::fs::symlink(&outside, to.join(name)).unwrap();
        }
        let root = opened(&to);
        for (path, kind) in [
            ("file", EntryType::Regular),
            ("directory/", EntryType::Directory),
            ("above/f", EntryType::Regular),
        ] {
            unpack(archive(path, kind, 0o755).as_slice(), &root).unwrap();
        }
        assert_eq!(std::fs::read_to_string(outside.join("f")).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        for name in ["file", "directory", "above"] {
            assert!(!to.join(name).is_symlink(), "{name}");
        }
        assert!(to.join("above/f").is_file());
        assert_eq!(std::fs::read_dir(&to).unwrap().count(), 3, "nothing hidden");
    }
}
