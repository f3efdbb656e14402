//! Packs a local directory into an archive.
//!
//! The walk uses descriptors and follows no link. If a guest swaps a name for a link meanwhile, the link or nothing is copied,
//! never its target.

use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow};
use box_sys::walk::{Entry, Found, Next};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use super::PERMISSION_BITS;
use crate::output;

/// Writes the contents of a directory to an archive.
pub(super) fn pack(directory: &OwnedFd, to: impl Write) -> Result<()> {
    let mut archive = Builder::new(to);
    let mut names: Vec<OsString> = Vec::new();
    let walked = box_sys::walk::walk(directory, |found| {
        let Found::Entry(entry) = found else {
            let path: PathBuf = names.iter().collect();
            return ControlFlow::Break(anyhow!(
                "{}: unreadable or nested too deeply",
                path.display()
            ));
        };
        names.truncate(entry.depth);
        names.push(OsStr::from_bytes(entry.name.to_bytes()).to_owned());
        let path: PathBuf = names.iter().collect();
        match add(&mut archive, &entry, &path) {
            Ok(()) => ControlFlow::Continue(Next::Descend),
            Err(error) => ControlFlow::Break(error.context(path.display().to_string())),
        }
    });
    match walked {
        ControlFlow::Break(error) => Err(error),
        ControlFlow::Continue(()) => Ok(archive.into_inner()?.flush()?),
    }
}

fn add(archive: &mut Builder<impl Write>, entry: &Entry<'_>, path: &PathBuf) -> Result<()> {
    match entry.kind() {
        FileType::Directory => {
            let mut header = header(EntryType::Directory, &entry.stat);
            archive.append_data(&mut header, path, io::empty())?;
        }
        FileType::Symlink => {
            let target = match rustix::fs::readlinkat(entry.directory, entry.name, Vec::new()) {
                Err(errno) if has_changed(errno) => return Ok(()),
                target => target?,
            };
            let mut header = header(EntryType::Symlink, &entry.stat);
            let target = OsStr::from_bytes(target.to_bytes());
            archive.append_link(&mut header, path, target)?;
        }
        FileType::RegularFile => {
            let Some((file, stat)) = open(entry)? else {
                return Ok(());
            };
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let mut header = header(EntryType::Regular, &stat);
            header.set_size(size);
            let content = Exactly { file, left: size };
            archive.append_data(&mut header, path, content)?;
        }
        _ => {
            let path = path.display().to_string();
            let path = output::visible(&path);
            output::eprintln(&format!(
                "boxd: {path}: skipped; not a file, directory or symbolic link"
            ));
        }
    }
    Ok(())
}

/// Opens a file; `None` if the name is no longer a file.
fn open(entry: &Entry<'_>) -> Result<Option<(File, Stat)>> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let name: &CStr = entry.name;
    let file = match rustix::fs::openat(entry.directory, name, flags, Mode::empty()) {
        Err(errno) if has_changed(errno) => return Ok(None),
        file => file?,
    };
    let stat = rustix::fs::fstat(&file).context("cannot stat")?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(is_file.then(|| (file.into(), stat)))
}

/// Whether an error means that the name has changed since the walk saw it.
fn has_changed(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::NOENT | Errno::LOOP | Errno::INVAL | Errno::NXIO
    )
}

fn header(kind: EntryType, stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & PERMISSION_BITS);
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}

/// Reads a fixed number of bytes of a file: pads a shorter file with zeros, cuts a longer one.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let buffer = &mut buffer[..most];
        let mut read = self.file.read(buffer)?;
        if read == 0 {
            buffer.fill(0);
            read = most;
        }
        self.left -= read as u64;
        Ok(read)
    }
}
