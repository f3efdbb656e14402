//! System calls that rustix has no function for, each behind a safe one.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Flags are given as plain numbers to the raw calls.
pub(crate) const AT_EMPTY_PATH: u32 = 0x1000;
pub(crate) const AT_RECURSIVE: u32 = 0x8000;

pub(crate) const ATTR_RDONLY: u64 = 0x1;
pub(crate) const ATTR_NOSUID: u64 = 0x2;
pub(crate) const ATTR_NODEV: u64 = 0x4;
pub(crate) const ATTR_NOEXEC: u64 = 0x8;
const ATTR_IDMAP: u64 = 0x10_0000;

/// What clone3 reads; the layout of the kernel's version 2 of it.
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

/// Which of the two processes one is after a fork.
#[derive(Debug)]
pub(crate) enum Forked {
    /// The one that called, with the other's pid and pidfd.
    Parent(i32, OwnedFd),
    /// The new one.
    Child,
}

pub(crate) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Of `SOL_SOCKET`; kernel 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A pidfd of a socket's peer.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut length: libc::socklen_t = 4;
    // SAFETY: the kernel writes one descriptor, of four bytes, and their number.
    check(libc::c_long::from(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    }))?;
    // SAFETY: the kernel has just made it, for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Forks into new namespaces, and into a v2 cgroup if one is given.
///
/// # Safety
/// The calling process must have one thread only: the child gets a copy of it and no other, so a lock held elsewhere
/// would stay locked for ever.
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
    // The C library keeps the thread's id in its own memory and trusts it, for instance in `abort`. Its own `fork` has the
    // kernel write the new one there; this one asks the kernel where that is.
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
    // SAFETY: `args` is laid out as the kernel wants, its pointers outlive the call, no stack is given, so the child
    // goes on with a copy of this one; one thread, by this function's contract.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if pid == 0 {
        return Ok(Forked::Child);
    }
    // SAFETY: the kernel wrote a new descriptor there, and nobody else has it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Forked::Parent(i32::try_from(pid).unwrap_or(-1), pidfd))
}

/// Runs a function in a process of its own that shares this one's memory, so that none has to be copied, and gives its pid.
/// What the function returns is its exit.
///
/// # Safety
/// The function must not allocate, nor call what sets `errno`, nor write what this process uses. The stack and what the
/// argument points to must live until the process has been waited for.
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
    // SAFETY: the stack is this function's to use, and grows down from its end; the rest is this function's contract.
    let pid = unsafe { libc::clone(function, end, flags, argument) };
    check(pid.into()).map(|_| pid)
}

/// Sets and clears attributes of the mount a descriptor stands for, or of its whole tree.
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

/// Makes the tree's files belong to other ids, by the map of a user namespace. The tree must not be attached yet.
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

/// Makes the tree at the root of this mount namespace receive (`slave`) or neither give nor take (`private`) mounts.
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
    // SAFETY: the path is an empty C string, `attr` is laid out as the kernel wants and its size is given.
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

/// Enters a namespace of the given kind (a `CLONE_NEW…` bit).
///
/// Safe although it moves the whole thread: descriptors stay what they are, and names are looked up anew each time.
pub(crate) fn setns(namespace: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: takes two numbers.
    check(unsafe { libc::setns(namespace.as_raw_fd(), kind) }.into())?;
    Ok(())
}

/// Leaves namespaces for new ones.
pub(crate) fn unshare(kinds: libc::c_int) -> io::Result<()> {
    // SAFETY: takes a number. No kind passed by this crate takes the descriptor table or the address space away.
    check(unsafe { libc::unshare(kinds) }.into())?;
    Ok(())
}

/// Closes every descriptor from `first` on.
///
/// # Safety
/// No owner of such a descriptor may be used or dropped afterwards.
pub(crate) unsafe fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: the same contract.
    unsafe { close_between(first, RawFd::MAX) }
}

/// Closes the descriptors from `first` to `last`.
///
/// # Safety
/// No owner of such a descriptor may be used or dropped afterwards.
pub(crate) unsafe fn close_between(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: takes numbers; the caller answers for what owned the descriptors.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })?;
    Ok(())
}

/// One `prctl` with a plain number.
pub(crate) fn prctl(option: libc::c_int, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: only options whose arguments are numbers are passed by this crate.
    check(unsafe { libc::prctl(option, value, 0, 0, 0) }.into())?;
    Ok(())
}

/// Sets an option of a socket to a number.
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the pointer is to a number of this length, which outlives the call.
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

/// The mark of a socket.
pub(crate) fn socket_mark(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut mark = 0_u32;
    let mut length: libc::socklen_t = 4;
    // SAFETY: both pointers are to what they say, which outlives the call.
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

/// Loads a seccomp program. It holds for this thread and for all its children, and cannot be taken back.
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

/// Ends this process at once: no destructors, no buffers written twice.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

/// Blocks a signal so that it is read from a descriptor instead, and gives that descriptor.
pub fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(signals);
    // SAFETY: `set` is initialised; the old mask is not asked for.
    let blocked =
        unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    check(blocked.into())?;
    // SAFETY: `set` is initialised; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    let fd = check(fd.into())?;
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Does something while no signal reaches this thread, nor any that it starts.
pub(crate) fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut old = signal_set(&[]);
    let mut all = signal_set(&[]);
    // SAFETY: fills an initialised set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are initialised.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old) };
    let done = work();
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    done
}

/// Takes back every handler of this process: those of the standard library, and those that the C library installs with the first
/// thread and lets nobody change, so these are raw calls. What is ignored stays so.
pub(crate) fn reset_signal_handlers() {
    // As the kernel lays it out: the handler, and three words more. Zeroes are the default.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        let mut now = default;
        // SAFETY: fills `now`; the last number is the size of the kernel's sets.
        let asked = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                std::ptr::null::<u64>(),
                &raw mut now,
                8,
            )
        };
        let ignored = now[0] == libc::SIG_IGN as u64;
        if asked == 0 && now[0] != default[0] && !ignored {
            // SAFETY: reads `default`; sets a disposition of this process.
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

/// A set of signals.
pub(crate) fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises what it points to.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the call above.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: `set` is initialised, and a bad number is an error, not harm.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// A Landlock call that makes or asks about a ruleset.
pub(crate) fn landlock_create(attributes: Option<&[u64]>, flags: u32) -> io::Result<libc::c_long> {
    let (pointer, size) =
        attributes.map_or((std::ptr::null(), 0), |a| (a.as_ptr(), size_of_val(a)));
    // SAFETY: the structure is a run of 64-bit words whose size in bytes is given, or null with size 0.
    check(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, pointer, size, flags) })
}

/// Adds "these rights beneath this path" to a ruleset.
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
    // SAFETY: `rule` is laid out as the kernel wants it (packed), and outlives the call.
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

/// Puts this thread and its children under a ruleset.
pub(crate) fn landlock_restrict(ruleset: RawFd) -> io::Result<()> {
    // SAFETY: takes numbers.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) })?;
    Ok(())
}

/// Takes a user's and group's id for this thread's access to files, and makes sure of it: these calls tell no errors.
pub(crate) fn set_file_ids(id: u32) -> io::Result<()> {
    // SAFETY: takes numbers. The raw calls change this thread alone.
    unsafe { libc::syscall(libc::SYS_setfsgid, id) };
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_setfsuid, id) };
    // SAFETY: an id that cannot be changes nothing; the id that is in force is returned.
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

/// Another descriptor for the same thing.
pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

/// Takes ownership of a descriptor that a raw call returned.
pub(crate) fn own_fd(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: callers pass a number that a call has just returned as a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the kernel knows a way for a filter to answer.
pub(crate) fn seccomp_action_available(action: u32) -> bool {
    const GET_ACTION_AVAIL: libc::c_int = 2;
    // SAFETY: reads one word.
    unsafe { libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

/// Forks a child with the given flags that ends at once, to see whether the kernel grants them.
pub(crate) fn try_clone(flags: libc::c_int) -> io::Result<()> {
    #[expect(clippy::cast_sign_loss, reason = "flags are bits")]
    let args = CloneArgs {
        flags: u64::from(flags as u32),
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    // SAFETY: the child of a possibly threaded process does nothing but `_exit`, which needs no lock.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if pid == 0 {
        exit_now(0);
    }
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: waits for the child made above; no status is asked for.
    check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }.into())?;
    Ok(())
}

/// Starts a process of this number, which waits for a signal. Needs root's powers, and a number that no process has.
#[cfg(test)]
pub(crate) fn pause_as(pid: i32) -> io::Result<()> {
    let numbers = [pid];
    let args = CloneArgs {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: numbers.as_ptr() as u64,
        set_tid_size: 1,
        ..CloneArgs::default()
    };
    // SAFETY: `args` is laid out as the kernel wants, its pointer outlives the call, and no stack is given, so the child goes on with
    // a copy of this one. Of a program with threads it has one, and makes one system call only.
    let made =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) })?;
    if made == 0 {
        // SAFETY: waits; no signal is handled in between.
        unsafe { libc::pause() };
        exit_now(1);
    }
    Ok(())
}

/// Whether something works in a process of its own, which ends with it.
pub(crate) fn try_in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: of a program with threads the child has one, and only what the C library has made safe for that is used: memory,
    // which it locks around a fork, and system calls.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        exit_now(i32::from(!work()));
    }
    let mut status = 0;
    // SAFETY: waits for the child made above, if there is one, and writes its status.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    pid > 0 && waited == pid && status == 0
}

/// Overwrites this process's arguments, which every box sees as its first process's and which may hold a path of the machine.
/// To be called by a program with one thread that will not look at its arguments again.
pub(crate) fn hide_arguments() {
    const NAME: &[u8] = b"box";
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in parentheses, may hold spaces; the addresses are the 48th and 49th field, the first after it is the third.
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
    // SAFETY: the kernel says that the arguments' bytes are from `first` to `end`; they are writable, and nobody reads them
    // meanwhile. They stay C strings: what follows the name is zero.
    unsafe { std::ptr::write_bytes(bytes, 0, end - first) };
    // SAFETY: as above, and the name is shorter.
    unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr(), bytes, NAME.len()) };
}

/// Allows this process as many descriptors as it may allow itself.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: before.maximum,
        ..before
    };
    let _ = setrlimit(Resource::Nofile, all);
}

/// Leaves the session keyring of whoever started this process for an empty one. Kernels without keyrings have none to leave.
pub(crate) fn new_session_keyring() {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    // SAFETY: takes a number and a null name.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0) };
}
