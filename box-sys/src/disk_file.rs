//! Files with a file system: volumes, and the disks of ended boxes.
//!
//! Several boxes can use a file, also boxes of an earlier server. All mounts must use one loop
//! device, because two would corrupt the file system. [`mount`] finds the device of the file and
//! locks the file meanwhile. The device detaches itself when the last mount ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::mount::UnmountFlags;

use crate::error::{At, Error, Result};
use crate::mounts::{attach, clone_tree, new_fs};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use crate::server::disks;

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// What a file is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// A volume, which several boxes may write.
    Volume,
    /// A layer, which several boxes read.
    Layer,
    /// The private files of one box.
    Upper,
}

impl Use {
    fn options(self) -> &'static [(&'static str, &'static str)] {
        match self {
            // The inode tables of a sparse file are zero already. A discard frees the space of
            // deleted files on the host.
            Self::Volume => &[
                ("noinit_itable", ""),
                ("discard", ""),
                ("errors", "remount-ro"),
            ],
            Self::Layer => &[("ro", "")],
            // The runtime flushes the file after the end of the box.
            Self::Upper => &[
                ("noinit_itable", ""),
                ("nobarrier", ""),
                ("errors", "remount-ro"),
            ],
        }
    }

    fn attributes(self) -> u64 {
        match self {
            Self::Layer => ATTR_NOSUID | ATTR_NODEV | ATTR_RDONLY,
            Self::Volume | Self::Upper => ATTR_NOSUID | ATTR_NODEV,
        }
    }
}

/// Opens a file, and locks it until the second result is dropped.
///
/// A loop device keeps its file open, so the lock has a descriptor of its own.
pub(crate) fn open_locked(path: &Path, writable: bool) -> Result<(File, File)> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(writable)
        .custom_flags(libc::O_NOFOLLOW);
    loop {
        let lock = options.open(path).at("open the file with a file system")?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).at("lock a file system")?;
        let file = options.open(path).at("open the file with a file system")?;
        let locked = lock.metadata().at("read the metadata of a file")?;
        let opened = file.metadata().at("read the metadata of a file")?;
        // A resized copy may have replaced the file meanwhile.
        if locked.ino() == opened.ino() {
            return Ok((file, lock));
        }
    }
}

/// Mounts the file system of a file, detached.
///
/// Waits for the end of earlier mounts that the use does not permit.
pub(crate) fn mount(path: &Path, of: Use, wait: Duration) -> Result<OwnedFd> {
    // Until the mount exists, so that no other process attaches a second device.
    let (file, _lock) = open_locked(path, of != Use::Layer)?;
    if of == Use::Upper {
        wait_detached(&file, wait).at("mount a disk that another box uses")?;
    }
    let started = Instant::now();
    loop {
        // The device stays attached while it is open.
        let (_device, name) = match attached_device(&file).at("find a loop device")? {
            Some(found) => found,
            None => disks::attach_loop(file.as_fd()).at("attach a loop device")?,
        };
        let options = [("source", name.as_str())];
        let options = [options.as_slice(), of.options()].concat();
        match new_fs("ext4", &options, of.attributes()) {
            // An earlier mount of the file is about to end.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && started.elapsed() < wait => {
                std::thread::sleep(PAUSE);
            }
            mount => return mount.at("mount a file system in a file"),
        }
    }
}

/// Clones a directory of a detached mount, detached.
///
/// The directory of the file is the place of the mount for a moment. The caller is in a mount
/// namespace with the host's file systems in which it may mount.
pub(crate) fn subtree(
    mount: &OwnedFd,
    file: &Path,
    open: impl FnOnce() -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    let parent = file
        .parent()
        .ok_or_else(|| Error::Invalid("a file system in a file needs a directory".into()))?;
    // Only an attached mount can be cloned (EINVAL before Linux 6.15).
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place = rustix::fs::open(parent, flags, Mode::empty());
    let place = place.at("open the directory of a file system")?;
    attach(mount, place).at("attach a file system")?;
    let tree = open().and_then(|directory| {
        clone_tree(&directory, "", false).at("clone a directory of a file system")
    });
    rustix::mount::unmount(parent, UnmountFlags::DETACH).at("detach a file system")?;
    tree
}

/// Waits until no loop device uses a file, so that no mount of it is left.
pub(crate) fn wait_detached(file: &File, limit: Duration) -> io::Result<()> {
    let started = Instant::now();
    while attached_device(file)?.is_some() {
        if started.elapsed() > limit {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Completes the disk of an ended box, so that later boxes can use it.
///
/// `path` is the file of a [`Scratch::FileSystem`](crate::Scratch::FileSystem). The call waits for
/// the end of its mounts, checks the file system if the machine has failed meanwhile, and flushes
/// the file.
pub fn settle_disk(path: &Path, limit: Duration) -> Result<()> {
    let (file, _lock) = open_locked(path, true)?;
    wait_detached(&file, limit).at("wait for the end of a disk's mounts")?;
    repair(&file, path)?;
    file.sync_all().at("flush a disk")
}

/// Corrects a disk that was in use when the machine failed.
///
/// The path is the file of a [`Scratch::FileSystem`](crate::Scratch::FileSystem). A disk in use is
/// left alone.
pub fn repair_disk(path: &Path) -> Result<()> {
    let (file, _lock) = open_locked(path, true)?;
    if attached_device(&file).at("find a loop device")?.is_some() {
        return Ok(());
    }
    repair(&file, path)
}

fn repair(file: &File, path: &Path) -> Result<()> {
    if is_clean(file).at("read the state of a disk")? {
        return Ok(());
    }
    // A program that corrected the file system returns 1.
    if run(&CHECK, &["-f", "-p"], path, None)? > 1 {
        return Err(io::Error::from(io::ErrorKind::InvalidData)).at("check a disk");
    }
    Ok(())
}

/// Whether the last mount of an ext4 file system ended in order.
fn is_clean(file: &File) -> io::Result<bool> {
    /// Place of `s_state` and `s_feature_incompat`, and their bits: unmounted in order, and a
    /// journal to replay.
    const STATE: u64 = 1024 + 0x3A;
    const CLEAN: u16 = 1;
    const INCOMPATIBLE: u64 = 1024 + 0x60;
    const RECOVER: u32 = 4;
    let (mut state, mut features) = ([0; 2], [0; 4]);
    file.read_exact_at(&mut state, STATE)?;
    file.read_exact_at(&mut features, INCOMPATIBLE)?;
    let is_clean = u16::from_le_bytes(state) & CLEAN != 0;
    Ok(is_clean && u32::from_le_bytes(features) & RECOVER == 0)
}

/// Paths of the program that checks a file system.
pub(crate) const CHECK: [&str; 3] = ["/usr/sbin/e2fsck", "/sbin/e2fsck", "/usr/bin/e2fsck"];

/// Runs a program on a file, and returns its exit code.
pub(crate) fn run(
    program: &[&str],
    options: &[&str],
    path: &Path,
    bytes: Option<u64>,
) -> Result<i32> {
    let found = program.iter().find(|path| Path::new(path).exists());
    let found = found.ok_or_else(|| Error::Unavailable("e2fsck and resize2fs".into()))?;
    let size = bytes.map(|bytes| format!("{}K", bytes >> 10));
    let status = Command::new(found)
        .args(options)
        .arg(path)
        .args(size)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    Ok(status
        .at("run a program of e2fsprogs")?
        .code()
        .unwrap_or(-1))
}

/// Start of `struct loop_info64`, and its size in 64-bit words.
const INFO_WORDS: usize = 29;

/// Finds the loop device of a file, which stays attached while the result is open.
fn attached_device(file: &File) -> io::Result<Option<(OwnedFd, String)>> {
    /// `LOOP_GET_STATUS64`.
    const GET_STATUS: libc::c_ulong = 0x4C05;
    let file = file.metadata()?;
    for entry in std::fs::read_dir("/dev")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("loop"));
        let Some(number) = number.and_then(|number| number.parse::<u32>().ok()) else {
            continue;
        };
        let path = format!("/dev/loop{number}");
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(device) = rustix::fs::open(&path, flags, Mode::empty()) else {
            continue;
        };
        let mut info = [0_u64; INFO_WORDS];
        // SAFETY: the request writes one structure of this size, which outlives the call.
        let status = unsafe { libc::ioctl(device.as_raw_fd(), GET_STATUS, info.as_mut_ptr()) };
        // A device without a file has no status.
        if raw::check(status.into()).is_ok() && (info[0], info[1]) == (file.dev(), file.ino()) {
            return Ok(Some((device, path)));
        }
    }
    Ok(None)
}
