//! A file that is being written here. It has no name until it is whole, so that nothing is left of it, however this process ends.

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

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Draft {
    directory: OwnedFd,
    pub(super) file: File,
    /// Where the file system knows no files without a name.
    hidden: Option<String>,
}

impl Draft {
    /// An empty one for this place. It has this mode, as far as the umask allows, unless it will replace a file.
    pub(super) fn new(spot: &Spot, mode: u32) -> io::Result<Self> {
        let directory = same(&spot.directory)?;
        // What replaces a file gets that one's mode in the end, and is private until then.
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

    /// Gives it its name, in the place of a file or a link of that name. A file keeps the plain part of its mode, and its owner.
    pub(super) fn place(mut self, spot: &Spot) -> io::Result<()> {
        if let Some(old) = replaced(spot)? {
            // Whose it was, where that may be said.
            let _ = std::os::unix::fs::fchown(&self.file, Some(old.st_uid), Some(old.st_gid));
            // The bytes are a guest's: they get no set-id bit.
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

/// The file that is there now, if one is.
fn replaced(spot: &Spot) -> io::Result<Option<Stat>> {
    let old = spot.stat()?;
    Ok(old.filter(|old| FileType::from_raw_mode(old.st_mode) == FileType::RegularFile))
}

fn hidden_name() -> String {
    format!(".boxd-{}.part", Uuid::now_v7().simple())
}
