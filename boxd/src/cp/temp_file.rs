//! A local file during a copy. It has no name until it is complete, so that a killed process leaves nothing.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use uuid::Uuid;

use super::PERMISSION_BITS;
use super::local::{DirEntry, reopen};

/// An incomplete file.
#[derive(Debug)]
pub(super) struct TempFile {
    directory: OwnedFd,
    pub(super) file: File,
    /// A temporary name, on filesystems without unnamed files.
    temp_name: Option<String>,
}

impl TempFile {
    /// Creates an empty file with this mode, within the umask, unless it replaces a file.
    pub(super) fn new(entry: &DirEntry, mode: u32) -> io::Result<Self> {
        let directory = reopen(&entry.directory)?;
        // A replacement gets the mode of the old file at the end, and is private until then.
        let mode = replaced(entry)?.map_or(mode, |_| 0o600);
        let mode = Mode::from_raw_mode(mode);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(&directory, c".", flags | OFlags::TMPFILE, mode) {
            Ok(file) => Ok(Self {
                directory,
                file: file.into(),
                temp_name: None,
            }),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let temp_name = new_temp_name();
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let file = rustix::fs::openat(&directory, &temp_name, flags, mode)?;
                Ok(Self {
                    directory,
                    file: file.into(),
                    temp_name: Some(temp_name),
                })
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Names the file and replaces a file or link of that name. Keeps owner and permission bits of a replaced file.
    pub(super) fn persist(mut self, entry: &DirEntry) -> io::Result<()> {
        if let Some(old) = replaced(entry)? {
            // Keep the owner if permitted.
            let _ = std::os::unix::fs::fchown(&self.file, Some(old.st_uid), Some(old.st_gid));
            // A guest wrote the contents, so drop set-id bits.
            let mode = std::fs::Permissions::from_mode(old.st_mode & PERMISSION_BITS);
            self.file.set_permissions(mode)?;
        }
        if self.temp_name.is_none() {
            match self.link(&entry.name) {
                Err(Errno::EXIST) => {}
                linked => return Ok(linked?),
            }
            let temp_name = new_temp_name();
            self.link(OsStr::new(&temp_name))?;
            self.temp_name = Some(temp_name);
        }
        if let Some(temp_name) = &self.temp_name {
            rustix::fs::renameat(&self.directory, temp_name, &entry.directory, &entry.name)?;
            self.temp_name = None;
        }
        Ok(())
    }

    fn link(&self, name: &OsStr) -> Result<(), Errno> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, own, &self.directory, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if let Some(temp_name) = &self.temp_name {
            let _ = rustix::fs::unlinkat(&self.directory, temp_name, AtFlags::empty());
        }
    }
}

/// The existing file of that name.
fn replaced(entry: &DirEntry) -> io::Result<Option<Stat>> {
    let old = entry.stat()?;
    Ok(old.filter(|old| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile))
}

fn new_temp_name() -> String {
    format!(".boxd-{}.part", Uuid::now_v7().simple())
}
