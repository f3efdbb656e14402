//! Mounts by descriptor.
//!
//! Every mount is created detached, configured, and attached to an open descriptor, never to a
//! path.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

/// Mount attributes: read-only, nosuid, nodev, noexec.
pub(crate) type Attr = u64;

/// Creates a detached file system of this type.
pub(crate) fn new_fs(kind: &str, options: &[(&str, &str)], attr: Attr) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    finish_fs(&fs, options, attr)
}

fn finish_fs(fs: &OwnedFd, options: &[(&str, &str)], attr: Attr) -> io::Result<OwnedFd> {
    for (key, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(fs, *key)?;
        } else {
            rustix::mount::fsconfig_set_string(fs, *key, *value)?;
        }
    }
    rustix::mount::fsconfig_create(fs)?;
    #[expect(clippy::cast_possible_truncation, reason = "the four bits used fit")]
    let attr = MountAttrFlags::from_bits_retain(attr as u32);
    Ok(rustix::mount::fsmount(
        fs,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attr,
    )?)
}

/// Creates an overlay of detached mounts, which the kernel takes by descriptor since 6.15.
pub(crate) fn overlay_of(
    lower: &[BorrowedFd<'_>],
    options: &[(&str, &str)],
    attr: Attr,
) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for layer in lower {
        rustix::mount::fsconfig_set_fd(&fs, "lowerdir+", layer)?;
    }
    finish_fs(&fs, options, attr)
}

/// Clones the mount at a path, detached. An empty path means `at` itself.
pub(crate) fn clone_tree(
    at: impl AsFd,
    path: impl rustix::path::Arg,
    recursive: bool,
) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW
        | OpenTreeFlags::AT_EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(rustix::mount::open_tree(at, path, flags)?)
}

/// Attaches a detached tree to an open descriptor.
pub(crate) fn attach(tree: impl AsFd, onto: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, "", onto, "", flags)?)
}

/// Opens a path below a directory without following links.
pub(crate) fn open_beneath(
    root: impl AsFd,
    path: impl rustix::path::Arg,
    flags: OFlags,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(
        root,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )?)
}

/// Creates the directories of an absolute path below `root` and opens the last one.
///
/// Refuses links.
pub(crate) fn create_dirs(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let mut dir = None;
    for component in path.components() {
        let Component::Normal(name) = component else {
            continue;
        };
        let at = dir.as_ref().map_or(root, AsFd::as_fd);
        match rustix::fs::mkdirat(at, name, Mode::from(0o755)) {
            // The parent may be read-only or have an unmapped owner. That is an error only if the
            // directory does not exist, and then the open fails.
            Ok(()) | Err(Errno::EXIST | Errno::ROFS | Errno::ACCESS | Errno::OVERFLOW) => {}
            Err(error) => return Err(error.into()),
        }
        dir = Some(open_beneath(at, name, OFlags::PATH | OFlags::DIRECTORY)?);
    }
    dir.map_or_else(
        || open_beneath(root, ".", OFlags::PATH | OFlags::DIRECTORY),
        Ok,
    )
}

/// Whether a path leads through a link or a file instead of a directory.
pub(crate) fn is_no_directory(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOTDIR | Errno::LOOP))
}

/// Removes the first part of a path that is not a directory.
pub(crate) fn remove_non_directory(root: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let mut dir = None;
    for component in path.components() {
        let Component::Normal(name) = component else {
            continue;
        };
        let at = dir.as_ref().map_or(root, AsFd::as_fd);
        match open_beneath(at, name, OFlags::PATH | OFlags::DIRECTORY) {
            Err(error) if is_no_directory(&error) => {
                return Ok(rustix::fs::unlinkat(at, name, AtFlags::empty())?);
            }
            next => dir = Some(next?),
        }
    }
    Ok(())
}

/// Creates a mount point: a directory for a directory, otherwise an empty file.
pub(crate) fn create_mount_point(
    root: BorrowedFd<'_>,
    path: &Path,
    tree: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode);
    if kind == FileType::Directory {
        return create_dirs(root, path);
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let parent = create_dirs(root, parent)?;
    create_file(&parent, name, b"")?;
    open_beneath(&parent, name, OFlags::PATH | OFlags::NOFOLLOW)
}

/// Writes a new small file. Does not change an existing one.
pub(crate) fn create_file(
    dir: impl AsFd,
    name: impl rustix::path::Arg,
    content: &[u8],
) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::openat(dir, name, flags, Mode::from(0o644)) {
        Ok(file) => {
            if content.is_empty() {
                Ok(())
            } else {
                io::Write::write_all(&mut std::fs::File::from(file), content)
            }
        }
        Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Changes the owner and group of a file or directory.
pub(crate) fn chown(
    dir: impl AsFd,
    name: impl rustix::path::Arg,
    (user, group): (u32, u32),
) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(group));
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    Ok(rustix::fs::chownat(dir, name, Some(uid), Some(gid), flags)?)
}
