//! Disks: file systems in files, for boxes with more private files than memory holds.
//!
//! A disk is an ext4 file system in a sparse file, mounted through a loop device. The file has no
//! name until a box uses it, so the kernel frees the disk of a spare box together with that box.
//! The loop device detaches itself when the box's mounts end, also after a crash.
//!
//! Only the kernel writes the file, through the mount. The file system has no journal and does not
//! flush the host's disk, because it ends with its box.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use serde::{Deserialize, Serialize};

use crate::error::{At, Error, Result};
use crate::mounts::{new_fs, open_beneath};
use crate::plan::Caps;
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID};

/// Bytes of a disk for each of its files and directories.
pub const DISK_BYTES_PER_INODE: u64 = 8192;

/// The kind of disk that a fork server gives to boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskKind {
    /// A file system in a file ([`Scratch::FileSystem`](crate::Scratch::FileSystem)).
    FileSystem,
    /// A directory of the host ([`Scratch::Directory`](crate::Scratch::Directory)).
    Directory,
}

/// A file system with less free space counts as full.
const FULL_BYTES: u64 = 4 << 20;

/// Most formatted templates that the server keeps, one for each size.
const TEMPLATES_MAX: usize = 4;

/// Attempts to get a free loop device, which other programs may take first.
const LOOP_ATTEMPTS: usize = 64;

/// Size of the file system that tests whether this host can make disks.
const PROBE: Caps = Caps {
    bytes: 16 << 20,
    inodes: 1024,
};

/// Paths of the program that formats a file system.
const FORMAT: [&str; 3] = ["/usr/sbin/mke2fs", "/sbin/mke2fs", "/usr/bin/mke2fs"];

/// Features of a disk. Without `uninit_bg`, formatting would write all inode tables.
const FEATURES: &str = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,\
                        huge_file,large_file,sparse_super,uninit_bg,64bit";

/// Makes disks in one directory of the host.
#[derive(Debug)]
pub(crate) struct Disks {
    path: Option<PathBuf>,
    /// Opened on first use in the host's mount namespace.
    directory: Option<OwnedFd>,
    kind: Option<DiskKind>,
    /// Formatted files without a name, the last used last.
    templates: Vec<(Caps, OwnedFd)>,
}

/// A mounted disk that no box uses yet.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The detached mount.
    pub(crate) mount: OwnedFd,
    pub(crate) handle: DiskHandle,
}

/// The server's handle of a box's disk.
#[derive(Debug)]
pub(crate) struct DiskHandle {
    /// Root directory of the disk.
    root: OwnedFd,
    /// The file of the disk, until it has its name.
    file: Option<OwnedFd>,
}

impl Disks {
    /// Disks in this directory. Without one, the server makes none.
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            directory: None,
            kind: None,
            templates: Vec::new(),
        }
    }

    /// The kind of disk on this host. The first call makes a small disk.
    ///
    /// The caller is in the host's mount namespace.
    pub(crate) fn kind(&mut self, privileged: bool) -> DiskKind {
        if let Some(kind) = self.kind {
            return kind;
        }
        let made = privileged.then(|| self.make(PROBE)).and_then(Result::ok);
        let kind = match made {
            Some(disk) => {
                disk.handle.discard();
                DiskKind::FileSystem
            }
            None => DiskKind::Directory,
        };
        self.kind = Some(kind);
        kind
    }

    /// Makes a disk with these limits.
    ///
    /// The caller is in the host's mount namespace.
    pub(crate) fn make(&mut self, caps: Caps) -> Result<Disk> {
        let directory = self.directory()?;
        let file = new_file(directory.as_fd()).at("create the file of a disk")?;
        let template = self.template(caps, directory.as_fd())?;
        copy_sparse(template, file.as_fd(), caps.bytes).at("copy the template of a disk")?;
        let device = attach_loop(file.as_fd()).at("attach a loop device")?;
        let options = [
            ("source", device.1.as_str()),
            // The inode tables of a sparse file are zero already.
            ("noinit_itable", ""),
            ("nobarrier", ""),
            ("errors", "remount-ro"),
        ];
        let mount = new_fs("ext4", &options, ATTR_NOSUID | ATTR_NODEV).at("mount a disk")?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let root = open_beneath(&mount, ".", flags).at("open a disk")?;
        Ok(Disk {
            mount,
            handle: DiskHandle {
                root,
                file: Some(file),
            },
        })
    }

    /// Gives the file of a disk its name below the directory.
    pub(crate) fn name(&mut self, disk: &mut DiskHandle, name: &Path) -> Result<()> {
        let Some(file) = &disk.file else {
            return Ok(());
        };
        let directory = self.directory()?;
        let parent = name
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = match parent {
            Some(parent) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY;
                open_beneath(&directory, parent, flags).at("open the directory of a disk")?
            }
            None => directory,
        };
        let file_name = name
            .file_name()
            .ok_or_else(|| Error::Invalid("scratch: the file of a disk needs a name".into()))?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let linked = rustix::fs::linkat(CWD, path, &parent, file_name, AtFlags::SYMLINK_FOLLOW);
        linked.at("name the file of a disk")?;
        disk.file = None;
        Ok(())
    }

    fn directory(&mut self) -> Result<OwnedFd> {
        if self.directory.is_none() {
            let path = self.path.as_ref();
            let path = path.ok_or_else(|| Error::Unavailable("disks".into()))?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = rustix::fs::open(path, flags, Mode::empty());
            self.directory = Some(opened.at("open the directory of disks")?);
        }
        let directory = self.directory.as_ref().map(|fd| raw::duplicate(fd.as_fd()));
        directory
            .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
            .at("duplicate")
    }

    /// The formatted template of a size.
    fn template(&mut self, caps: Caps, directory: BorrowedFd<'_>) -> Result<&OwnedFd> {
        let known = self.templates.iter().position(|(known, _)| *known == caps);
        let template = if let Some(at) = known {
            self.templates.remove(at)
        } else {
            let file = new_file(directory).at("create the template of a disk")?;
            format(file.as_fd(), caps, (0, 0), None)?;
            (caps, file)
        };
        if self.templates.len() == TEMPLATES_MAX {
            self.templates.remove(0);
        }
        self.templates.push(template);
        Ok(&self.templates[self.templates.len() - 1].1)
    }
}

impl DiskHandle {
    /// Ends the file system of a box that has ended.
    ///
    /// The kernel would otherwise write all of its data to a file that is about to be removed.
    pub(crate) fn discard(self) {
        /// `EXT4_IOC_SHUTDOWN`, and its flag for not writing anything.
        const SHUTDOWN: Opcode = opcode::read::<u32>(b'X', 125);
        const WITHOUT_FLUSH: u32 = 2;
        // SAFETY: the opcode belongs to a request that reads one number.
        let shutdown = unsafe { Setter::<SHUTDOWN, u32>::new(WITHOUT_FLUSH) };
        // SAFETY: as above. Failure costs only time.
        let _ = unsafe { ioctl(&self.root, shutdown) };
    }
}

/// Creates a file without a name.
fn new_file(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(
        directory,
        ".",
        flags,
        Mode::from(0o600),
    )?)
}

/// Formats a file.
///
/// The root directory belongs to `owner`, and `more` names further features.
pub(crate) fn format(
    file: BorrowedFd<'_>,
    caps: Caps,
    (user, group): (u32, u32),
    more: Option<&str>,
) -> Result<()> {
    rustix::fs::ftruncate(file, caps.bytes).at("set the size of a disk")?;
    let missing = || Error::Unavailable("mke2fs".into());
    let program = FORMAT.iter().find(|path| Path::new(path).exists());
    let input = file.try_clone_to_owned().at("duplicate")?;
    let features = [FEATURES].into_iter().chain(more);
    let features = features.collect::<Vec<_>>().join(",");
    let options = format!(
        "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner={user}:{group},\
         packed_meta_blocks=1"
    );
    let formatted = Command::new(program.ok_or_else(missing)?)
        .args([
            "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0",
        ])
        .args(["-N", &caps.inodes.to_string(), "-O", &features])
        .args(["-E", &options])
        .arg("/proc/self/fd/0")
        .env_clear()
        // Without the host's settings, so that every disk is the same.
        .env("MKE2FS_CONFIG", "/dev/null")
        .stdin(Stdio::from(File::from(input)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .at("run mke2fs")?;
    if formatted.success() {
        return Ok(());
    }
    // The program tells only by its text why it failed.
    let room = rustix::fs::fstatvfs(file).at("measure the room for a disk")?;
    let is_full = room.f_bavail.saturating_mul(room.f_frsize) < FULL_BYTES;
    let error = if is_full { Errno::NOSPC } else { Errno::IO };
    Err(error).at("format a disk")
}

/// Copies the data of a file without its holes.
pub(crate) fn copy_sparse(from: &OwnedFd, to: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    rustix::fs::ftruncate(to, size)?;
    let mut at = 0;
    loop {
        at = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(at) => at,
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(at))?;
        let mut target = at;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX);
            let copied =
                rustix::fs::copy_file_range(from, Some(&mut at), to, Some(&mut target), length)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Argument of `LOOP_CONFIGURE` (`struct loop_config`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    places: [u64; 5],
    numbers: [u32; 3],
    flags: u32,
    names: [u8; 160],
    init: [u64; 2],
    reserved: [u64; 8],
}

/// Attaches a file to a free loop device. Returns the device and its path.
///
/// The device detaches when its last user ends.
pub(crate) fn attach_loop(file: BorrowedFd<'_>) -> io::Result<(OwnedFd, String)> {
    /// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE`.
    const GET_FREE: libc::c_ulong = 0x4C82;
    const CONFIGURE: libc::c_ulong = 0x4C0A;
    /// `LO_FLAGS_AUTOCLEAR`, and `LO_FLAGS_DIRECT_IO`, so that no page is cached twice.
    const FLAGS: u32 = 4 | 16;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let control = rustix::fs::open("/dev/loop-control", flags, Mode::empty())?;
    #[expect(clippy::cast_sign_loss, reason = "an open descriptor is not negative")]
    let config = LoopConfig {
        fd: file.as_raw_fd() as u32,
        block_size: 4096,
        places: [0; 5],
        numbers: [0; 3],
        flags: FLAGS,
        names: [0; 160],
        init: [0; 2],
        reserved: [0; 8],
    };
    for _ in 0..LOOP_ATTEMPTS {
        // SAFETY: the request takes no argument and returns a number.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), GET_FREE) };
        let number = raw::check(number.into())?;
        let path = format!("/dev/loop{number}");
        let device = rustix::fs::open(&path, flags, Mode::empty())?;
        // SAFETY: the request reads one structure of this layout, which outlives the call.
        let configured = unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) };
        match raw::check(configured.into()) {
            Ok(_) => return Ok((device, path)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_configuration_has_the_kernels_layout() {
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(std::mem::offset_of!(LoopConfig, flags), 60);
    }

    #[test]
    fn only_data_is_copied() {
        use std::os::unix::fs::{FileExt as _, MetadataExt as _};
        let directory = tempfile::tempdir().unwrap();
        let path = File::open(directory.path()).unwrap();
        let (from, to) = (
            new_file(path.as_fd()).unwrap(),
            new_file(path.as_fd()).unwrap(),
        );
        let size = 1 << 30;
        rustix::fs::ftruncate(&from, size).unwrap();
        let from_file = File::from(from.try_clone().unwrap());
        from_file.write_all_at(b"first", 4096).unwrap();
        from_file.write_all_at(b"last", size - 4).unwrap();
        copy_sparse(&from, to.as_fd(), size).unwrap();
        let to = File::from(to);
        let metadata = to.metadata().unwrap();
        assert_eq!(metadata.len(), size);
        assert!(metadata.blocks() * 512 < 1 << 20, "{metadata:?}");
        let mut read = [0; 5];
        to.read_exact_at(&mut read, 4096).unwrap();
        assert_eq!(&read, b"first");
        to.read_exact_at(&mut read[..4], size - 4).unwrap();
        assert_eq!(&read[..4], b"last");
    }
}
