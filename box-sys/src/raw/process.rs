//! Forks and clones, and the process as it appears to others.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::check;

/// Argument of `clone3`, in version 2 of the kernel's layout.
#[repr(C)]
#[derive(Debug, Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_CHILD_SETTID: u64 = 0x0100_0000;
const CLONE_CHILD_CLEARTID: u64 = 0x0020_0000;

/// Result of a fork, in each of the two processes.
#[derive(Debug)]
pub(crate) enum Forked {
    /// The calling process, with the child's pid and pidfd.
    Parent(i32, OwnedFd),
    /// The child.
    Child,
}

/// Forks into new namespaces, and into a v2 cgroup if one is given.
///
/// # Safety
/// The calling process must have a single thread. The child gets a copy of that thread only, so a
/// lock of another thread would stay locked forever.
pub(crate) unsafe fn fork_into(
    namespaces: libc::c_int,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Forked> {
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        #[expect(clippy::cast_sign_loss, reason = "flags are bits")]
        flags: u64::from(namespaces as u32) | CLONE_PIDFD,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    // The C library caches the thread id and uses it, for example in `abort`. Its own `fork` lets
    // the kernel update the cache. This code asks the kernel for the address and does the same.
    if let Ok(Some(address)) = rustix::thread::get_clear_child_tid_address() {
        args.child_tid = address.as_ptr() as u64;
        args.flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
    }
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        #[expect(clippy::cast_sign_loss, reason = "an open descriptor is not negative")]
        {
            args.cgroup = cgroup.as_raw_fd() as u64;
        }
    }
    // SAFETY: `args` has the kernel's layout and its pointers outlive the call. Without a stack,
    // the child continues on a copy of this one. The caller guarantees a single thread.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if pid == 0 {
        return Ok(Forked::Child);
    }
    // SAFETY: the kernel has just written a new descriptor there. It has no other owner.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Forked::Parent(i32::try_from(pid).unwrap_or(-1), pidfd))
}

/// Runs a function in a new process that shares this process's memory.
///
/// Returns the pid. The result of the function is the exit status.
///
/// # Safety
/// The function must not allocate, must not call code that sets `errno`, and must not write data of
/// this process. The stack and the target of `argument` must outlive the process.
pub(crate) unsafe fn clone_sharing_memory(
    namespaces: libc::c_int,
    stack: &mut [u8],
    function: extern "C" fn(*mut libc::c_void) -> libc::c_int,
    argument: *mut libc::c_void,
) -> io::Result<i32> {
    const ALIGNED: usize = 16;
    let end = stack.as_mut_ptr_range().end;
    let end = end.wrapping_sub(end.addr() % ALIGNED).cast();
    let flags = namespaces | libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: the caller lends the stack, which grows down from its end. The caller guarantees the
    // rest.
    let pid = unsafe { libc::clone(function, end, flags, argument) };
    check(pid.into()).map(|_| pid)
}

/// Clones a child that exits at once, to test whether the kernel grants the flags.
pub(crate) fn try_clone(flags: libc::c_int) -> io::Result<()> {
    #[expect(clippy::cast_sign_loss, reason = "flags are bits")]
    let args = CloneArgs {
        flags: u64::from(flags as u32),
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    // SAFETY: the child of a possibly threaded process only calls `_exit`, which needs no lock.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if pid == 0 {
        exit_now(0);
    }
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: waits for the child from above. No status is requested.
    check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }.into())?;
    Ok(())
}

/// Starts a process with this pid that waits for a signal.
///
/// Requires root and an unused pid.
#[cfg(test)]
pub(crate) fn pause_as(pid: i32) -> io::Result<()> {
    let numbers = [pid];
    let args = CloneArgs {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: numbers.as_ptr() as u64,
        set_tid_size: 1,
        ..CloneArgs::default()
    };
    // SAFETY: `args` has the kernel's layout and its pointer outlives the call. Without a stack,
    // the child continues on a copy of this one. It has one thread and makes one system call.
    let made =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if made == 0 {
        // SAFETY: waits. This process handles no signal.
        unsafe { libc::pause() };
        exit_now(1);
    }
    Ok(())
}

/// Whether `work` succeeds in a forked child.
pub(crate) fn try_in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has a single thread. It uses only system calls and memory allocation, which
    // the C library makes safe after a fork.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        exit_now(i32::from(!work()));
    }
    let mut status = 0;
    // SAFETY: waits for the child from above, if any, and writes its status.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    pid > 0 && waited == pid && status == 0
}

/// Exits at once, without destructors and without flushing buffers.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

/// Overwrites this process's arguments, which every box can read from its init.
///
/// They may contain a path of the host. The caller has a single thread and does not read its
/// arguments again.
pub(crate) fn hide_arguments() {
    const NAME: &[u8] = b"box";
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name is in parentheses and may contain spaces. The first field after it is field 3, and
    // the addresses are fields 48 and 49.
    let mut fields = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .skip(45);
    let mut address = || {
        fields
            .next()
            .and_then(|field| field.parse::<usize>().ok())
            .unwrap_or(0)
    };
    let (first, end) = (address(), address());
    if first == 0 || end <= first + NAME.len() {
        return;
    }
    let bytes = std::ptr::with_exposed_provenance_mut::<u8>(first);
    // SAFETY: the kernel reports that the arguments are at `first` to `end`. They are writable, and
    // no other code reads them now. They stay C strings, because zeroes follow the name.
    unsafe { std::ptr::write_bytes(bytes, 0, end - first) };
    // SAFETY: as above, and the name is shorter.
    unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr(), bytes, NAME.len()) };
}

/// Raises the descriptor limit of this process to its maximum.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: before.maximum,
        ..before
    };
    let _ = setrlimit(Resource::Nofile, all);
}
