//! Options of sockets.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::check;

/// Option of `SOL_SOCKET` since kernel 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// Pidfd of a socket's peer.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut length: libc::socklen_t = 4;
    // SAFETY: the kernel writes one descriptor of four bytes, and their number.
    check(libc::c_long::from(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    }))?;
    // SAFETY: the kernel has just created this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets a socket option to an integer.
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the pointer is valid for four bytes and outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            4,
        )
    };
    check(set.into())?;
    Ok(())
}

/// The mark of a socket (`SO_MARK`).
pub(crate) fn socket_mark(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut mark = 0_u32;
    let mut length: libc::socklen_t = 4;
    // SAFETY: both pointers are valid and outlive the call.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            (&raw mut mark).cast(),
            &raw mut length,
        )
    };
    check(got.into())?;
    Ok(mark)
}
