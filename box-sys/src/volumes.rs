//! Volumes: file systems in files that outlive boxes.
//!
//! A volume is an ext4 file system in a sparse file, mounted through a loop device, as a disk is
//! (`server/disks.rs`). It has a journal and flushes its data, because it outlives every process.
//!
//! Several boxes can mount a volume, also boxes of an earlier server. All mounts must use one loop
//! device, because two would corrupt the file system (`disk_file.rs`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path};
use std::time::Duration;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::disk_file::{self, CHECK, Use, open_locked};
use crate::error::{At, Error, Result};
use crate::mounts::open_beneath;
use crate::plan::Caps;
use crate::server::disks::{self, DISK_BYTES_PER_INODE};

/// How long a mount waits for the end of an earlier one of the same file.
const MOUNT_WAIT: Duration = Duration::from_secs(10);

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
    let (file, lock) = open_locked(path, true)?;
    // The mounts of a box that has just ended may not have ended yet.
    disk_file::wait_detached(&file, MOUNT_WAIT).at("resize a volume")?;
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
    if disk_file::run(&CHECK, &["-f", "-p"], path, None)? > 1 {
        return Err(io::Error::from(io::ErrorKind::InvalidData)).at("check a volume");
    }
    if bytes > before {
        copy.set_len(bytes).at("enlarge a volume")?;
    }
    if disk_file::run(&RESIZE, &["-f"], path, Some(bytes))? != 0 {
        let needed = bytes >> 20;
        return Err(Error::Invalid(format!(
            "size_mb: the files of the volume do not fit into {needed} MiB; delete some"
        )));
    }
    copy.set_len(bytes).at("resize a volume")?;
    copy.sync_all().at("sync the file of a volume")
}

/// Paths of the program that resizes a file system.
const RESIZE: [&str; 3] = [
    "/usr/sbin/resize2fs",
    "/sbin/resize2fs",
    "/usr/bin/resize2fs",
];

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
    disk_file::subtree(&mount, path, || {
        let directory = open_volume_directory(&mount, sub_path, writable);
        directory.map_err(|error| sub_path_error(sub_path, &error))
    })
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

/// Mounts a volume, detached.
fn mount(path: &Path) -> Result<OwnedFd> {
    let mount = disk_file::mount(path, Use::Volume, MOUNT_WAIT)?;
    // Only tools that repair file systems need it.
    let _ = rustix::fs::unlinkat(&mount, "lost+found", AtFlags::REMOVEDIR);
    Ok(mount)
}
