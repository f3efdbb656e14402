//! A local file during a copy. It has no name until it is complete, so that a killed process leaves nothing.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use uuid::Uuid;

use super::PLAIN;
use super::here::{Spot, same};

/// An incomplete file.
#[derive(Debug)]
pub(super) struct Draft {
    directory: OwnedFd,
    pub(super) file: File,
    /// A temporary name, on filesystems without unnamed files.
    hidden: Option<String>,
}

impl Draft {
    /// Creates an empty file with this mode, within the umask, unless it replaces a file.
    pub(super) fn new(spot: &Spot, mode: u32) -> io::Result<Self> {
        let directory = same(&spot.directory)?;
        // A replacement gets the mode of the old file at the end, and is private until then.
        let mode = replaced(spot)?.map_or(mode, |_| 0o600);
        let mode = Mode::from_raw_mode(mode);
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

    /// Names the file and replaces a file or link of that name. Keeps owner and permission bits of a replaced file.
    pub(super) fn place(mut self, spot: &Spot) -> io::Result<()> {
        if let Some(old) = replaced(spot)? {
            // Keep the owner if permitted.
            let _ = std::os::unix::fs::fchown(&self.file, Some(old.st_uid), Some(old.st_gid));
            // A guest wrote the contents, so drop set-id bits.
            let mode = std::fs::Permissions::from_mode(old.st_mode & PLAIN);
            self.file.set_permissions(mode)?;
        }
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

/// The existing file of that name.
fn replaced(spot: &Spot) -> io::Result<Option<Stat>> {
    let old = spot.stat()?;
    Ok(old.filter(|old| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile))
}

fn hidden_name() -> String {
    format!(".boxd-{}.part", Uuid::now_v7().simple())
}
