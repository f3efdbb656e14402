//! What a thread gives up: system calls, paths, ids, keys.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::check;

/// Loads a seccomp filter for this thread and its children. It cannot be removed.
pub(crate) fn load_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let prog = libc::sock_fprog {
        len,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: `prog` points to `len` instructions, which the kernel copies and checks.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const prog,
        )
    })?;
    Ok(())
}

/// Whether the kernel supports a seccomp action.
pub(crate) fn seccomp_action_available(action: u32) -> bool {
    const GET_ACTION_AVAIL: libc::c_int = 2;
    // SAFETY: reads one word.
    unsafe { libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

/// Creates a Landlock ruleset, or queries the version.
pub(crate) fn landlock_create(attributes: Option<&[u64]>, flags: u32) -> io::Result<libc::c_long> {
    let (pointer, size) =
        attributes.map_or((std::ptr::null(), 0), |a| (a.as_ptr(), size_of_val(a)));
    // SAFETY: the structure consists of 64-bit words with the given size, or is null with size 0.
    check(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, pointer, size, flags) })
}

/// Grants rights below a path.
pub(crate) fn landlock_allow(
    ruleset: BorrowedFd<'_>,
    beneath: BorrowedFd<'_>,
    rights: u64,
) -> io::Result<()> {
    const RULE_PATH_BENEATH: libc::c_int = 1;
    #[repr(C, packed)]
    struct PathBeneath {
        allowed: u64,
        parent: i32,
    }
    let rule = PathBeneath {
        allowed: rights,
        parent: beneath.as_raw_fd(),
    };
    // SAFETY: `rule` has the kernel's packed layout and outlives the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const rule,
            0,
        )
    })?;
    Ok(())
}

/// Restricts this thread and its children with a ruleset.
pub(crate) fn landlock_restrict(ruleset: RawFd) -> io::Result<()> {
    // SAFETY: takes integers.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) })?;
    Ok(())
}

/// Sets the user and group id with which this thread accesses files.
///
/// The calls report no errors, so this function reads the ids back.
pub(crate) fn set_file_ids((user_id, group_id): (u32, u32)) -> io::Result<()> {
    // SAFETY: takes an integer. The raw call changes this thread only.
    unsafe { libc::syscall(libc::SYS_setfsgid, group_id) };
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_setfsuid, user_id) };
    // SAFETY: an invalid id changes nothing. The call returns the current id.
    let group = unsafe { libc::syscall(libc::SYS_setfsgid, -1) };
    // SAFETY: as above.
    let user = unsafe { libc::syscall(libc::SYS_setfsuid, -1) };
    if (user, group) == (user_id.into(), group_id.into()) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

/// Joins a new, empty session keyring. Has no effect on a kernel without keyrings.
pub(crate) fn new_session_keyring() {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    // SAFETY: takes an integer and a null name.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0) };
}
