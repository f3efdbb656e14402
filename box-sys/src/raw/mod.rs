//! Safe wrappers for system calls that rustix does not provide.

mod confine;
mod mount;
mod process;
mod signal;
mod socket;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

pub(crate) use self::confine::{
    landlock_allow, landlock_create, landlock_restrict, load_filter, new_session_keyring,
    seccomp_action_available, set_file_ids,
};
pub(crate) use self::mount::{
    ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY, mount_idmap, mount_setattr, set_propagation,
};
#[cfg(test)]
pub(crate) use self::process::pause_as;
pub(crate) use self::process::{
    Forked, clone_sharing_memory, exit_now, fork_into, hide_arguments, raise_descriptor_limit,
    try_clone, try_in_child,
};
pub use self::signal::signal_fd;
pub(crate) use self::signal::{reset_signal_handlers, signal_set, with_signals_blocked};
pub(crate) use self::socket::{peer_pidfd, set_option, socket_mark};

pub(crate) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Enters a namespace of a type (a `CLONE_NEW…` flag).
///
/// This is safe although it moves the whole thread: open descriptors stay valid, and paths are
/// resolved on each use.
pub(crate) fn setns(namespace: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: takes two integers.
    check(unsafe { libc::setns(namespace.as_raw_fd(), kind) }.into())?;
    Ok(())
}

/// Enters new namespaces.
pub(crate) fn unshare(kinds: libc::c_int) -> io::Result<()> {
    // SAFETY: takes an integer. This crate passes no flag that unshares descriptors or memory.
    check(unsafe { libc::unshare(kinds) }.into())?;
    Ok(())
}

/// Closes every descriptor from `first` on.
///
/// # Safety
/// The program must not use or drop an owner of such a descriptor afterwards.
pub(crate) unsafe fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: the caller guarantees the same contract.
    unsafe { close_between(first, RawFd::MAX) }
}

/// Closes the descriptors from `first` to `last`.
///
/// # Safety
/// The program must not use or drop an owner of such a descriptor afterwards.
pub(crate) unsafe fn close_between(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: takes integers. The caller is responsible for the owners of the descriptors.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })?;
    Ok(())
}

/// Calls `prctl` with one integer.
pub(crate) fn prctl(option: libc::c_int, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: this crate passes only options with integer arguments.
    check(unsafe { libc::prctl(option, value, 0, 0, 0) }.into())?;
    Ok(())
}

/// Duplicates a descriptor.
pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

/// Takes ownership of a descriptor that a raw call returned.
pub(crate) fn own_fd(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: callers pass a descriptor that a call has just created.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
