//! Tries one denied or limited operation and prints the kernel's result.
//!
//! The tests run it in boxes and, as a control, outside. `box-sys-probe NAME [ARGUMENT]` prints `ok
//! VALUE` or `errno NUMBER`; a killed probe prints nothing. Dangerous calls get null pointers, so
//! that they have no effect where they are allowed.

#[path = "probe/disk.rs"]
mod disk;
#[path = "probe/init_access.rs"]
mod init_access;
#[path = "probe/sockets.rs"]
mod sockets;

use std::io;

use libc::{c_int, c_long, c_void};

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    let argument = args.next().unwrap_or_default();
    match probe(&name, &argument) {
        Ok(value) => println!("ok {value}"),
        Err(error) => println!("errno {}", error.raw_os_error().unwrap_or(0)),
    }
}

/// Makes a system call with up to six arguments.
fn call(number: c_long, args: [c_long; 6]) -> io::Result<c_long> {
    // SAFETY: every probe passes integers, null, or pointers to memory that outlives the call.
    let result =
        unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn plain(number: c_long) -> io::Result<c_long> {
    call(number, [0; 6])
}

fn long(value: c_int) -> c_long {
    value.into()
}

fn text(string: &std::ffi::CStr) -> c_long {
    string.as_ptr() as c_long
}

#[allow(clippy::too_many_lines, reason = "one row for each probe")]
fn probe(name: &str, argument: &str) -> io::Result<c_long> {
    let file = std::ffi::CString::new(argument)?;
    let at = long(libc::AT_FDCWD);
    match name {
        "unshare_user" => call(
            libc::SYS_unshare,
            [long(libc::CLONE_NEWUSER), 0, 0, 0, 0, 0],
        ),
        "unshare_net" => call(libc::SYS_unshare, [long(libc::CLONE_NEWNET), 0, 0, 0, 0, 0]),
        "clone_user" => clone_with(libc::CLONE_NEWUSER),
        "clone_plain" => clone_with(0),
        "clone3" => plain(libc::SYS_clone3),
        "mount" => call(
            libc::SYS_mount,
            [text(c"none"), text(c"/tmp"), text(c"tmpfs"), 0, 0, 0],
        ),
        "umount" => call(libc::SYS_umount2, [text(c"/proc/sys"), 0, 0, 0, 0, 0]),
        "fsopen" => call(libc::SYS_fsopen, [text(c"tmpfs"), 0, 0, 0, 0, 0]),
        "open_tree" => call(libc::SYS_open_tree, [at, text(c"/tmp"), 0, 0, 0, 0]),
        "pivot_root" => call(libc::SYS_pivot_root, [text(c"/"), text(c"/"), 0, 0, 0, 0]),
        "chroot" => call(libc::SYS_chroot, [text(c"/"), 0, 0, 0, 0, 0]),
        "setns" => call(libc::SYS_setns, [0, 0, 0, 0, 0, 0]),
        "keyctl" => call(libc::SYS_keyctl, [0, -3, 0, 0, 0, 0]),
        "add_key" => plain(libc::SYS_add_key),
        "request_key" => plain(libc::SYS_request_key),
        "bpf" => plain(libc::SYS_bpf),
        "perf_event_open" => plain(libc::SYS_perf_event_open),
        "io_uring_setup" => plain(libc::SYS_io_uring_setup),
        "userfaultfd" => call(libc::SYS_userfaultfd, [1, 0, 0, 0, 0, 0]),
        "ptrace_init" => call(libc::SYS_ptrace, [0x4206, 1, 0, 0, 0, 0]),
        "ptrace_me" => plain(libc::SYS_ptrace),
        "process_vm_readv" => call(libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]),
        "pidfd_getfd" => plain(libc::SYS_pidfd_getfd),
        "prlimit_init" => call(libc::SYS_prlimit64, [1, 7, 0, 0, 0, 0]),
        "setpriority_init" => call(libc::SYS_setpriority, [0, 1, 10, 0, 0, 0]),
        "setpriority_group" => call(libc::SYS_setpriority, [1, 0, 0, 0, 0, 0]),
        "ioprio_group" => call(libc::SYS_ioprio_set, [2, 0, (2 << 13) | 4, 0, 0, 0]),
        "affinity_init" => call(libc::SYS_sched_setaffinity, [1, 8, 0, 0, 0, 0]),
        "sync" => plain(libc::SYS_sync),
        "syncfs" => call(libc::SYS_syncfs, [-1, 0, 0, 0, 0, 0]),
        "io_setup" => plain(libc::SYS_io_setup),
        "huge_mmap" => call(libc::SYS_mmap, [0, 0, 0, 0x40022, -1, 0]),
        "huge_memory_file" => call(libc::SYS_memfd_create, [text(c"x"), 4, 0, 0, 0, 0]),
        "huge_shared_memory" => call(libc::SYS_shmget, [0, 0, 0o4000, 0, 0, 0]),
        "memfd_secret" => plain(libc::SYS_memfd_secret),
        "seccomp_listener" => call(libc::SYS_seccomp, [1, 8, 0, 0, 0, 0]),
        "attach_filter" => call(libc::SYS_setsockopt, [-1, 1, 26, 0, 0, 0]),
        "read_disk" => disk::direct(argument, false),
        "write_disk" => disk::direct(argument, true),
        "affinity" => init_access::affinity(argument),
        "signal_init" => init_access::signal_init(argument.parse().unwrap_or(0)),
        "backlog" => sockets::backlog(argument.parse().unwrap_or(0)),
        "receive_buffer" => sockets::receive_buffer(),
        "fill_udp_buffers" => sockets::fill_udp_buffers(argument.parse().unwrap_or(0)),
        "fill_tcp_buffers" => sockets::fill_tcp_buffers(argument.parse().unwrap_or(0)),
        "whiteout" => whiteout(argument),
        "stop_new_processes" => Ok(stop_new_processes()),
        "kill_init" => call(libc::SYS_kill, [1, 9, 0, 0, 0, 0]),
        "init_module" => plain(libc::SYS_init_module),
        "kexec_load" => call(libc::SYS_kexec_load, [0, 0, 0, -1, 0, 0]),
        "reboot" => plain(libc::SYS_reboot),
        "swapon" => plain(libc::SYS_swapon),
        "quotactl" => call(libc::SYS_quotactl, [-1, 0, 0, 0, 0, 0]),
        "sethostname" => call(libc::SYS_sethostname, [text(c"x"), -1, 0, 0, 0, 0]),
        "open_by_handle_at" => plain(libc::SYS_open_by_handle_at),
        "personality" => call(libc::SYS_personality, [0x0004_0000, 0, 0, 0, 0, 0]),
        "setuid_root" => call(libc::SYS_setresuid, [0, 0, 0, 0, 0, 0]),
        "setgroups_none" => call(libc::SYS_setgroups, [0, 0, 0, 0, 0, 0]),
        "openat2" => call(libc::SYS_openat2, [0, 0, 0, 0, 0, 0]),
        "unknown" => plain(1000),
        "socket" => call(
            libc::SYS_socket,
            [argument.parse().unwrap_or(-1), 1, 0, 0, 0, 0],
        ),
        "socket_raw" => call(libc::SYS_socket, [2, 3, 1, 0, 0, 0]),
        "netlink" => call(
            libc::SYS_socket,
            [16, 3, argument.parse().unwrap_or(-1), 0, 0, 0],
        ),
        "tiocsti" => call(libc::SYS_ioctl, [0, 0x5412, text(c"x"), 0, 0, 0]),
        "tiocsti_high_bits" => call(libc::SYS_ioctl, [0, 0x1_0000_5412, text(c"x"), 0, 0, 0]),
        "tioclinux" => call(libc::SYS_ioctl, [0, 0x541c, text(c"\x06"), 0, 0, 0]),
        "make_setuid_chmod" => create_file(argument)
            .and_then(|()| call(libc::SYS_fchmodat, [at, text(&file), 0o4755, 0, 0, 0])),
        "make_setuid_fchmodat2" => create_file(argument)
            .and_then(|()| call(libc::SYS_fchmodat2, [at, text(&file), 0o4755, 0, 0, 0])),
        "make_setuid_open" => {
            let flags = long(libc::O_CREAT | libc::O_WRONLY);
            call(libc::SYS_openat, [at, text(&file), flags, 0o6755, 0, 0])
        }
        "make_setuid_mknod" => call(libc::SYS_mknodat, [at, text(&file), 0o104_755, 0, 0, 0]),
        "make_device" => call(libc::SYS_mknodat, [at, text(&file), 0o20_666, 0x103, 0, 0]),
        "fallocate_keep_size" => {
            create_file(argument)?;
            let file = std::fs::OpenOptions::new().write(true).open(argument)?;
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            call(libc::SYS_fallocate, [fd.into(), 1, 0, 1 << 20, 0, 0])
        }
        "reserve_by_ioctl" => reserve(argument),
        "int80" => Ok(int80()),
        "x32" => call(0x4000_0000 + 39, [0; 6]),
        "use_memory" => use_memory(argument.parse().unwrap_or(0)),
        "fork_many" => Ok(fork_many(argument.parse().unwrap_or(0))),
        "spin" => Ok(spin(argument.parse().unwrap_or(0))),
        "fill_bytes" => fill_bytes(argument),
        "fill_inodes" => fill_inodes(argument),
        "non_text_name" => non_text_name(),
        "main_thread_exits" => Ok(main_thread_exits()),
        "fork_chain" => Ok(fork_chain()),
        "connect" => std::net::TcpStream::connect(argument).map(|_| 0),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

fn create_file(path: &str) -> io::Result<()> {
    std::fs::write(path, b"x")
}

fn clone_with(flags: c_int) -> io::Result<c_long> {
    let pid = call(
        libc::SYS_clone,
        [long(flags | libc::SIGCHLD), 0, 0, 0, 0, 0],
    )?;
    if pid == 0 {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) }
    }
    Ok(0)
}

/// Replaces a file by a whiteout device, then removes both.
fn whiteout(path: &str) -> io::Result<c_long> {
    const RENAME_WHITEOUT: c_long = 4;
    create_file(path)?;
    let moved = format!("{path}.moved");
    let (from, to) = (
        std::ffi::CString::new(path)?,
        std::ffi::CString::new(moved.clone())?,
    );
    let at = long(libc::AT_FDCWD);
    let args = [at, text(&from), at, text(&to), RENAME_WHITEOUT, 0];
    let left = call(libc::SYS_renameat2, args);
    for path in [path, &moved] {
        let _ = std::fs::remove_file(path);
    }
    left
}

/// Stops each new process repeatedly until it ends, and prints a line for it.
fn stop_new_processes() -> c_long {
    let end = std::time::Instant::now() + RUN_TIME;
    let stop = |pid: c_long| call(libc::SYS_kill, [pid, long(libc::SIGSTOP), 0, 0, 0, 0]).is_ok();
    let mut last = c_long::from(std::process::id());
    println!("ready");
    while std::time::Instant::now() < end {
        if let Some(new) = (last + 1..last + 50).find(|pid| stop(*pid)) {
            println!("stopped");
            while stop(new) && std::time::Instant::now() < end {}
            last = new;
        }
    }
    0
}

/// Reserves space with the old ioctl, which allocates like `fallocate`.
fn reserve(path: &str) -> io::Result<c_long> {
    create_file(path)?;
    let file = std::fs::OpenOptions::new().write(true).open(path)?;
    let mut request = [0_u8; 48];
    request[16..24].copy_from_slice(&(1_u64 << 20).to_ne_bytes());
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    call(
        libc::SYS_ioctl,
        [
            fd.into(),
            0x4030_582a,
            request.as_mut_ptr().cast::<c_void>() as c_long,
            0,
            0,
            0,
        ],
    )
}

#[cfg(target_arch = "x86_64")]
fn int80() -> c_long {
    let result: i64;
    // SAFETY: the 32-bit `getpid`, which takes no arguments and changes only the result.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") 20_i64 => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    };
    result
}

#[cfg(not(target_arch = "x86_64"))]
fn int80() -> c_long {
    -1
}

/// Writes to this many megabytes of memory.
fn use_memory(megabytes: usize) -> io::Result<c_long> {
    let mut all = Vec::new();
    for _ in 0..megabytes {
        all.push(vec![1_u8; 1 << 20]);
    }
    c_long::try_from(all.len()).map_err(io::Error::other)
}

/// Forks waiting children and returns their number.
fn fork_many(most: c_long) -> c_long {
    for made in 0..most {
        match call(libc::SYS_clone, [long(libc::SIGCHLD), 0, 0, 0, 0, 0]) {
            Ok(0) => {
                // SAFETY: sleeps until killed.
                unsafe { libc::pause() };
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) }
            }
            Ok(_) => {}
            Err(_) => return made,
        }
    }
    most
}

/// Waits under a process name that is not UTF-8.
fn non_text_name() -> io::Result<c_long> {
    let set = text(c"\xff\xfe");
    call(libc::SYS_prctl, [long(libc::PR_SET_NAME), set, 0, 0, 0, 0])?;
    std::thread::sleep(RUN_TIME);
    Ok(0)
}

/// Waits in a second thread; the main thread exits.
fn main_thread_exits() -> c_long {
    std::thread::spawn(|| std::thread::sleep(RUN_TIME));
    // SAFETY: ends this thread only. The other thread does not use its data.
    unsafe { libc::syscall(libc::SYS_exit, 0) }
}

/// Detaches, then forks and exits in a loop, so that its pid keeps changing.
fn fork_chain() -> c_long {
    let end = std::time::Instant::now() + RUN_TIME;
    let fork = || call(libc::SYS_clone, [long(libc::SIGCHLD), 0, 0, 0, 0, 0]);
    if !matches!(fork(), Ok(0)) {
        std::thread::sleep(RUN_TIME);
        return 0;
    }
    let _ = call(libc::SYS_setsid, [0; 6]);
    while std::time::Instant::now() < end {
        if matches!(fork(), Ok(1..)) {
            break;
        }
    }
    // SAFETY: ends this process.
    unsafe { libc::_exit(0) }
}

/// Longer than any test. The probe then exits by itself.
const RUN_TIME: std::time::Duration = std::time::Duration::from_mins(1);

/// Uses the CPU for this many milliseconds of wall time and returns the CPU time.
fn spin(milliseconds: u64) -> c_long {
    let start = std::time::Instant::now();
    while start.elapsed().as_millis() < u128::from(milliseconds) {
        std::hint::spin_loop();
    }
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: writes `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec * 1000 + time.tv_nsec / 1_000_000
}

/// Writes 64 MiB, or until an error.
fn fill_bytes(path: &str) -> io::Result<c_long> {
    let mut file = std::fs::File::create(path)?;
    for _ in 0..64 {
        io::Write::write_all(&mut file, &vec![1_u8; 1 << 20])?;
    }
    Ok(64)
}

/// Creates 20,000 empty files, or until an error.
fn fill_inodes(dir: &str) -> io::Result<c_long> {
    for n in 0..20_000 {
        std::fs::File::create(format!("{dir}/f{n}"))?;
    }
    Ok(20_000)
}
