//! A file that is being written here. It has no name until it is whole, so that nothing is left of it, however this process ends.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use uuid::Uuid;

use super::here::{Spot, same};

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Draft {
    directory: OwnedFd,
    pub(super) file: File,
    /// Where the file system knows no files without a name.
    hidden: Option<String>,
}

impl Draft {
    /// An empty one, in the file system of this directory.
    pub(super) fn new(directory: &OwnedFd) -> io::Result<Self> {
        let directory = same(directory)?;
        let mode = Mode::from_raw_mode(0o600);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(&directory, c".", flags | OFlags::TMPFILE, mode) {
            Ok(file) => Ok(Self {
                directory,
                file: file.into(),
                hidden: None,
            }),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let hidden = hidden_name();
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let file = rustix::fs::openat(&directory, &hidden, flags, mode)?;
                Ok(Self {
                    directory,
                    file: file.into(),
                    hidden: Some(hidden),
                })
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives it its name, in the place of a file or a link of that name. A file keeps its mode and its owner.
    pub(super) fn place(mut self, spot: &Spot, mode: u32) -> io::Result<()> {
        let old = spot.stat()?;
        let old = old.filter(|old| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile);
        let mode = old.map_or(mode, |old| old.st_mode & 0o7777);
        if let Some(old) = old {
            // Whose it was, where that may be said.
            let _ = std::os::unix::fs::fchown(&self.file, Some(old.st_uid), Some(old.st_gid));
        }
        self.file
            .set_permissions(std::fs::Permissions::from_mode(mode))?;
        if self.hidden.is_none() {
            match self.link(&spot.name) {
                Err(Errno::EXIST) => {}
                linked => return Ok(linked?),
            }
            let hidden = hidden_name();
            self.link(OsStr::new(&hidden))?;
            self.hidden = Some(hidden);
        }
        if let Some(hidden) = &self.hidden {
            rustix::fs::renameat(&self.directory, hidden, &spot.directory, &spot.name)?;
            self.hidden = None;
        }
        Ok(())
    }

    fn link(&self, name: &OsStr) -> Result<(), Errno> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, own, &self.directory, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(hidden) = &self.hidden {
            let _ = rustix::fs::unlinkat(&self.directory, hidden, AtFlags::empty());
        }
    }
}

fn hidden_name() -> String {
    format!(".boxd-{}.part", Uuid::now_v7().simple())
}
