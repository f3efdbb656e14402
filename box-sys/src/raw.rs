//! Safe wrappers for system calls that rustix does not provide.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Flags for raw calls, as plain integers.
pub(crate) const AT_EMPTY_PATH: u32 = 0x1000;
pub(crate) const AT_RECURSIVE: u32 = 0x8000;

pub(crate) const ATTR_RDONLY: u64 = 0x1;
pub(crate) const ATTR_NOSUID: u64 = 0x2;
pub(crate) const ATTR_NODEV: u64 = 0x4;
pub(crate) const ATTR_NOEXEC: u64 = 0x8;
const ATTR_IDMAP: u64 = 0x10_0000;

/// Argument of `clone3`, in version 2 of the kernel's layout.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct CloneArgs {
    pub(crate) flags: u64,
    pub(crate) pidfd: u64,
    pub(crate) child_tid: u64,
    parent_tid: u64,
    pub(crate) exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    pub(crate) cgroup: u64,
}

pub(crate) const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
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

pub(crate) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

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

/// Exits at once, without destructors and without flushing buffers.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

/// Blocks signals and returns a descriptor that reports them.
pub fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(signals);
    // SAFETY: `set` is initialised. The old mask is not requested.
    let blocked =
        unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    check(blocked.into())?;
    // SAFETY: `set` is initialised. -1 requests a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    let fd = check(fd.into())?;
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just created this descriptor. It has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Runs `work` with signals blocked in this thread and in those it starts.
pub(crate) fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut old = signal_set(&[]);
    let mut all = signal_set(&[]);
    // SAFETY: writes an initialised set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are initialised.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old) };
    let done = work();
    // SAFETY: the call above has written `old`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    done
}

/// Resets every signal handler of this process to the default.
///
/// This includes the handlers of the standard library and those that the C library installs with
/// the first thread. The C library does not let programs change the latter, hence the raw calls.
/// Ignored signals stay ignored.
pub(crate) fn reset_signal_handlers() {
    // Kernel layout: the handler and three more words. Zeroes mean the default.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        let mut now = default;
        // SAFETY: writes `now`. The last argument is the size of the kernel's signal set.
        let result = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                std::ptr::null::<u64>(),
                &raw mut now,
                8,
            )
        };
        let ignored = now[0] == libc::SIG_IGN as u64;
        if result == 0 && now[0] != default[0] && !ignored {
            // SAFETY: reads `default` and sets a disposition of this process.
            unsafe {
                libc::syscall(
                    libc::SYS_rt_sigaction,
                    signal,
                    &raw const default,
                    std::ptr::null::<u64>(),
                    8,
                )
            };
        }
    }
}

/// Builds a signal set.
pub(crate) fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises the target of the pointer.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has initialised it.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: `set` is initialised. An invalid number is only an error.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
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
pub(crate) fn set_file_ids(id: u32) -> io::Result<()> {
    // SAFETY: takes an integer. The raw call changes this thread only.
    unsafe { libc::syscall(libc::SYS_setfsgid, id) };
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_setfsuid, id) };
    // SAFETY: an invalid id changes nothing. The call returns the current id.
    let group = unsafe { libc::syscall(libc::SYS_setfsgid, -1) };
    // SAFETY: as above.
    let user = unsafe { libc::syscall(libc::SYS_setfsuid, -1) };
    let id = libc::c_long::from(id);
    if (user, group) == (id, id) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
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

/// Whether the kernel supports a seccomp action.
pub(crate) fn seccomp_action_available(action: u32) -> bool {
    const GET_ACTION_AVAIL: libc::c_int = 2;
    // SAFETY: reads one word.
    unsafe { libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0, &raw const action) == 0 }
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

/// Joins a new, empty session keyring. Has no effect on a kernel without keyrings.
pub(crate) fn new_session_keyring() {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    // SAFETY: takes an integer and a null name.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0) };
}
