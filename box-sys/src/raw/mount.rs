//! Attributes of mounts.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

const AT_EMPTY_PATH: u32 = 0x1000;
const AT_RECURSIVE: u32 = 0x8000;

pub(crate) const ATTR_RDONLY: u64 = 0x1;
pub(crate) const ATTR_NOSUID: u64 = 0x2;
pub(crate) const ATTR_NODEV: u64 = 0x4;
pub(crate) const ATTR_NOEXEC: u64 = 0x8;
const ATTR_IDMAP: u64 = 0x10_0000;

/// Sets and clears attributes of a mount or of its whole tree.
pub(crate) fn mount_setattr(
    mount: BorrowedFd<'_>,
    recursive: bool,
    set: u64,
    clear: u64,
) -> io::Result<()> {
    setattr(
        mount,
        recursive,
        &libc::mount_attr {
            attr_set: set,
            attr_clr: clear,
            propagation: 0,
            userns_fd: 0,
        },
    )
}

/// Maps the owners of a tree with a user namespace. The tree must be detached.
pub(crate) fn mount_idmap(mount: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    #[expect(clippy::cast_sign_loss, reason = "an open descriptor is not negative")]
    let userns_fd = map.as_raw_fd() as u64;
    setattr(
        mount,
        false,
        &libc::mount_attr {
            attr_set: ATTR_IDMAP,
            attr_clr: 0,
            propagation: 0,
            userns_fd,
        },
    )
}

/// Sets the propagation of all mounts in this namespace: `slave` or `private`.
pub(crate) fn set_propagation(slave: bool) -> io::Result<()> {
    use rustix::mount::{MountPropagationFlags as Flags, mount_change};
    let kind = if slave {
        Flags::DOWNSTREAM
    } else {
        Flags::PRIVATE
    };
    Ok(mount_change("/", kind | Flags::REC)?)
}

fn setattr(mount: BorrowedFd<'_>, recursive: bool, attr: &libc::mount_attr) -> io::Result<()> {
    let flags = AT_EMPTY_PATH | if recursive { AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string. `attr` has the kernel's layout, and its size is given.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(())
}
