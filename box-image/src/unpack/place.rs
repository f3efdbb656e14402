//! Opens and removes entries beneath a directory, without following any link.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Directory of an image, and the directory of its last entry.
#[derive(Debug)]
pub(super) struct Place {
    root: OwnedFd,
    /// Entries of one directory follow each other.
    last: RefCell<Option<(Vec<u8>, OwnedFd)>>,
}

impl Place {
    pub(super) fn new(root: OwnedFd) -> Self {
        let last = RefCell::new(None);
        Self { root, last }
    }

    pub(super) fn root(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(&self.root, 0)
    }

    /// Opens a directory by its path.
    pub(super) fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        open(&self.root, if path.is_empty() { b"." } else { path }, flags)
    }

    /// Opens the directory of an entry.
    pub(super) fn parent(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let mut last = self.last.borrow_mut();
        match &*last {
            Some((known, directory)) if known == path => {
                rustix::io::fcntl_dupfd_cloexec(directory, 0)
            }
            _ => {
                let directory = self.open(path, OFlags::PATH)?;
                let copy = rustix::io::fcntl_dupfd_cloexec(&directory, 0)?;
                *last = Some((path.to_vec(), copy));
                Ok(directory)
            }
        }
    }

    /// Opens a directory in a directory.
    #[expect(clippy::unused_self, reason = "the same form as its neighbours")]
    pub(super) fn step(&self, directory: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
        open(directory, name, OFlags::PATH)
    }

    /// Makes a directory; `false` if something else is there.
    #[expect(clippy::unused_self, reason = "the same form as its neighbours")]
    pub(super) fn make_directory(&self, directory: &OwnedFd, name: &[u8]) -> Result<bool, Errno> {
        match rustix::fs::mkdirat(directory, name, Mode::RWXU) {
            Err(Errno::EXIST) => {
                let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
            }
            made => made.map(|()| true),
        }
    }

    /// Removes an entry with everything below it; returns whether it was a directory.
    pub(super) fn remove(&self, directory: &OwnedFd, name: &[u8]) -> Result<bool, Errno> {
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(false),
            // Which of them a directory gives depends on the file system.
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error),
        }
        self.last.replace(None);
        remove_tree(directory, name)?;
        Ok(true)
    }
}

fn open(directory: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        match rustix::fs::openat2(&directory, path, flags, Mode::empty(), resolve) {
            // A rename elsewhere disturbed the walk.
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
}

/// Returns the names in a directory.
pub(super) fn names(directory: impl AsFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

/// Removes a directory with everything below it, also if its modes forbid it.
///
/// The depth is limited by that of paths in images.
pub(crate) fn remove_tree(directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    let below = match open(directory, name, OFlags::RDONLY) {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(directory, name, Mode::RWXU, AtFlags::empty())?;
            open(directory, name, OFlags::RDONLY)?
        }
        Err(Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    let mut writable = false;
    for entry in names(&below)? {
        loop {
            match rustix::fs::unlinkat(&below, &entry[..], AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => break,
                Err(Errno::ISDIR | Errno::PERM) => {
                    remove_tree(&below, &entry)?;
                    break;
                }
                // An ordinary user's own directory without write permission.
                Err(Errno::ACCESS) if !writable => {
                    rustix::fs::fchmod(&below, Mode::RWXU)?;
                    writable = true;
                }
                Err(error) => return Err(error),
            }
        }
    }
    match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}
