//! Volumes: file systems in files that outlive boxes.
//!
//! A volume is an ext4 file system in a sparse file, mounted through a loop device, as a disk is
//! (`server/disks.rs`). It has a journal and flushes its data, because it outlives every process.
//!
//! Several boxes can mount a volume, also boxes of an earlier server. All mounts must use one loop
//! device, because two would corrupt the file system. [`mount`] finds the device of the file and
//! locks the file meanwhile. The device detaches itself when the last mount ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::error::{At, Error, Result};
use crate::mounts::{attach, clone_tree, new_fs, open_beneath};
use crate::plan::Caps;
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID};
use crate::server::disks::{self, DISK_BYTES_PER_INODE};

/// How long a mount waits for the end of an earlier one of the same file.
const MOUNT_WAIT: Duration = Duration::from_secs(10);

/// Pause between two attempts to mount.
const MOUNT_PAUSE: Duration = Duration::from_millis(5);

/// Features of a volume beyond those of a disk.
const FEATURES: &str = "has_journal,resize_inode";

/// Creates the file of a volume of this size, and returns when it is on disk.
///
/// The root directory belongs to this user and group of the host. The file must not exist.
pub fn create_volume(path: &Path, bytes: u64, owner: (u32, u32)) -> Result<()> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(path).at("create the file of a volume")?;
    let caps = Caps {
        bytes,
        inodes: bytes / DISK_BYTES_PER_INODE,
    };
    disks::format(file.as_fd(), caps, owner, Some(FEATURES))?;
    file.sync_all().at("sync the file of a volume")
}

/// Changes the size of a volume that no box uses.
///
/// The change happens in a copy, which then replaces the file. A crash leaves the old size or the
/// new one. Files that do not fit into a smaller volume are an error.
pub fn resize_volume(path: &Path, bytes: u64) -> Result<()> {
    let (file, lock) = open_locked(path)?;
    let started = Instant::now();
    // The mounts of a box that has just ended may not have ended yet.
    while attached_device(&file).at("find a loop device")?.is_some() {
        if started.elapsed() > MOUNT_WAIT {
            return Err(io::Error::from_raw_os_error(libc::EBUSY)).at("resize a volume");
        }
        std::thread::sleep(MOUNT_PAUSE);
    }
    let copy_path = path.with_extension(COPY);
    let resized = resize_copy(&file, &copy_path, bytes);
    let resized = resized.and_then(|()| {
        std::fs::rename(&copy_path, path).at("replace the file of a volume")?;
        let directory = path.parent().unwrap_or(path);
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.at("sync the directory of a volume")
    });
    if resized.is_err() {
        let _ = std::fs::remove_file(&copy_path);
    }
    drop(lock);
    resized
}

/// End of the name of a copy that is being resized. It is useless after a crash.
pub const COPY: &str = "new";

fn resize_copy(file: &File, path: &Path, bytes: u64) -> Result<()> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(true);
    let copy = options.mode(0o600).open(path).at("copy a volume")?;
    let before = file.metadata().at("read the size of a volume")?.len();
    disks::copy_sparse(
        &file.try_clone().at("duplicate")?.into(),
        copy.as_fd(),
        before,
    )
    .at("copy a volume")?;
    // A program that corrected the file system returns 1.
    if run(&CHECK, &["-f", "-p"], path, None)? > 1 {
        return Err(io::Error::from(io::ErrorKind::InvalidData)).at("check a volume");
    }
    if bytes > before {
        copy.set_len(bytes).at("enlarge a volume")?;
    }
    if run(&RESIZE, &["-f"], path, Some(bytes))? != 0 {
        let needed = bytes >> 20;
        return Err(Error::Invalid(format!(
            "size_mb: the files of the volume do not fit into {needed} MiB; delete some"
        )));
    }
    copy.set_len(bytes).at("resize a volume")?;
    copy.sync_all().at("sync the file of a volume")
}

/// Paths of the programs that check and resize a file system.
const CHECK: [&str; 3] = ["/usr/sbin/e2fsck", "/sbin/e2fsck", "/usr/bin/e2fsck"];
const RESIZE: [&str; 3] = [
    "/usr/sbin/resize2fs",
    "/sbin/resize2fs",
    "/usr/bin/resize2fs",
];

/// Runs a program on a file, and returns its exit code.
fn run(program: &[&str], options: &[&str], path: &Path, bytes: Option<u64>) -> Result<i32> {
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

/// Returns the bytes that the files of a volume occupy.
pub fn volume_used(path: &Path) -> Result<u64> {
    let mount = mount(path)?;
    let used = rustix::fs::fstatvfs(&mount).at("read the usage of a volume")?;
    Ok((used.f_blocks - used.f_bfree).saturating_mul(used.f_frsize))
}

/// Opens a directory of a volume without following links.
///
/// With `create`, missing directories are created and belong to the owner of the volume's root.
pub fn open_volume_directory(
    root: impl std::os::fd::AsFd,
    sub_path: &Path,
    create: bool,
) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let owner = rustix::fs::fstat(&root)?;
    let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
    let mut directory = open_beneath(&root, ".", flags)?;
    for component in sub_path.components() {
        let Component::Normal(name) = component else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if create {
            match rustix::fs::mkdirat(&directory, name, Mode::from(0o755)) {
                Ok(()) => {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    rustix::fs::chownat(&directory, name, Some(uid), Some(gid), flags)?;
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        directory = open_beneath(&directory, name, flags)?;
    }
    Ok(directory)
}

/// Returns a detached mount of a volume, or of a directory in it.
///
/// The caller is in a mount namespace with the host's file systems in which it may mount.
pub(crate) fn tree(path: &Path, sub_path: Option<&Path>, writable: bool) -> Result<OwnedFd> {
    let mount = mount(path)?;
    let Some(sub_path) = sub_path else {
        return Ok(mount);
    };
    let parent = path
        .parent()
        .ok_or_else(|| Error::Invalid("volumes: the file of a volume needs a directory".into()))?;
    // Only an attached mount can be cloned (EINVAL before Linux 6.15).
    let place = rustix::fs::open(
        parent,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    attach(&mount, place.at("open the directory of a volume")?).at("attach a volume")?;
    let directory = open_volume_directory(&mount, sub_path, writable);
    let directory = directory.map_err(|error| sub_path_error(sub_path, &error));
    let tree = directory.and_then(|directory| {
        clone_tree(&directory, "", false).at("clone the directory of a volume")
    });
    rustix::mount::unmount(parent, UnmountFlags::DETACH).at("detach a volume")?;
    tree
}

/// The error of a directory of a volume that cannot be opened.
pub fn sub_path_error(sub_path: &Path, error: &io::Error) -> Error {
    let name = sub_path.display();
    let problem = match error.raw_os_error() {
        Some(libc::ENOENT) => "does not exist in the volume; mount it read-write to create it",
        Some(libc::ELOOP) => "contains a symbolic link",
        Some(libc::ENOTDIR) => "is not a directory of the volume",
        Some(libc::ENOSPC | libc::EDQUOT) => "cannot be created; the volume is full",
        _ => "cannot be opened",
    };
    Error::Invalid(format!("sub_path: {name} {problem}"))
}

/// Opens the file of a volume, and locks it until the second result is dropped.
///
/// A loop device keeps its file open, so the lock has a descriptor of its own.
fn open_locked(path: &Path) -> Result<(File, File)> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW);
    loop {
        let lock = options.open(path).at("open the file of a volume")?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).at("lock the file of a volume")?;
        let file = options.open(path).at("open the file of a volume")?;
        let locked = lock.metadata().at("read the file of a volume")?;
        let opened = file.metadata().at("read the file of a volume")?;
        // A resized copy may have replaced the file meanwhile.
        if locked.ino() == opened.ino() {
            return Ok((file, lock));
        }
    }
}

/// Mounts a volume, detached.
fn mount(path: &Path) -> Result<OwnedFd> {
    // Until the mount exists, so that no other process attaches a second device.
    let (file, _lock) = open_locked(path)?;
    let started = Instant::now();
    loop {
        // The device stays attached while it is open.
        let (_device, name) = match attached_device(&file).at("find a loop device")? {
            Some(found) => found,
            None => disks::attach_loop(file.as_fd()).at("attach a loop device")?,
        };
        let options = [
            ("source", name.as_str()),
            // The inode tables of a sparse file are zero already.
            ("noinit_itable", ""),
            // Frees the space of deleted files on the host.
            ("discard", ""),
            ("errors", "remount-ro"),
        ];
        match new_fs("ext4", &options, ATTR_NOSUID | ATTR_NODEV) {
            // An earlier mount of the file is about to end.
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && started.elapsed() < MOUNT_WAIT =>
            {
                std::thread::sleep(MOUNT_PAUSE);
            }
            mount => {
                let mount = mount.at("mount a volume")?;
                // Only tools that repair file systems need it.
                let _ = rustix::fs::unlinkat(&mount, "lost+found", AtFlags::REMOVEDIR);
                return Ok(mount);
            }
        }
    }
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
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
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
