//! Starting a command as the guest: a clone that shares memory and holds init until the command runs, so that its cost does
//! not depend on init's size.

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use super::Init;
use super::process_tree::{self, Carrier, MARKS};
use super::start_watchdog::StartWatchdog;
use crate::raw;

/// A command to start.
#[derive(Debug)]
pub struct SpawnPlan<'a> {
    /// The program and its arguments. A name without `/` is looked for in `PATH` of `env`.
    pub argv: Vec<OsString>,
    /// The whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// Where it starts; entered as the guest.
    pub cwd: PathBuf,
    /// What it reads from and writes to.
    pub stdio: Stdio<'a>,
    /// Limits to lower: resource number and value, as of `setrlimit`.
    pub rlimits: Vec<(u32, u64)>,
}

/// The three standard descriptors of a command.
#[derive(Debug, Clone, Copy)]
pub enum Stdio<'a> {
    /// One for each.
    Fds {
        /// Standard input.
        stdin: BorrowedFd<'a>,
        /// Standard output.
        stdout: BorrowedFd<'a>,
        /// Standard error.
        stderr: BorrowedFd<'a>,
    },
    /// A terminal for all three, which becomes the command's controlling one.
    Terminal(BorrowedFd<'a>),
}

/// A command that runs.
#[derive(Debug)]
pub struct Command {
    /// Its process id inside, also of its session and process group.
    pub pid: i32,
    pub(super) mark: u32,
}

/// Of what the kernel looks for when memory runs out, the most, and what the server is worth.
const GUEST_OOM_SCORE: &[u8] = b"1000";
const INIT_OOM_SCORE: &[u8] = b"500";

/// Most descriptors of a command, and how many it has unless it raises that itself.
///
/// Descriptors on their way between processes are counted for a user, and refused to a sender when they are more than the
/// sender may have open. What commands may have is less than what others of the same user may, so no command fills that up
/// for its agent or for whoever makes boxes.
///
/// Open files are counted for the whole machine (`fs.file-max`). So a box has as many together, and each of its processes a part
/// of them, but never fewer than programs can do with.
const DESCRIPTORS_MAX: u64 = 4096;
const DESCRIPTORS_DEFAULT: u64 = 1024;
const DESCRIPTORS_MIN: u64 = 512;
const DESCRIPTORS_PER_BOX: u64 = 262_144;

/// The child's stack; it calls little.
const STACK: usize = 64 << 10;
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Init {
    /// Starts a command as the guest. It is in a session of its own, holds no descriptor but its three, and no capability.
    ///
    /// The error of a program that cannot be run is the error of `execve`, so that "not found" is told from "not allowed".
    pub fn spawn(&mut self, plan: &SpawnPlan<'_>) -> io::Result<Command> {
        if self.watchdog.is_none() {
            self.watchdog = Some(StartWatchdog::start()?);
        }
        let mark = self.new_mark()?;
        let result = self.spawn_marked(plan, mark);
        if result.is_err() {
            self.marks.remove(&mark);
        }
        result
    }

    fn new_mark(&mut self) -> io::Result<u32> {
        for _ in MARKS {
            if !MARKS.contains(&self.next_mark) {
                self.next_mark = MARKS.start;
                // Once around: what an ended command left running still carries its mark.
                self.leftover = process_tree::marks_in_use(self.carrier);
            }
            let mark = self.next_mark;
            self.next_mark += 1;
            if !self.leftover.contains(&mark) && self.marks.insert(mark) {
                return Ok(mark);
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    fn spawn_marked(&self, plan: &SpawnPlan<'_>, mark: u32) -> io::Result<Command> {
        // Everything that allocates happens here: the child shares this memory and must leave it as it is.
        let argv = strings(plan.argv.iter().cloned())?;
        let mut env = Vec::with_capacity(plan.env.len());
        for (key, value) in &plan.env {
            let mut pair = key.clone();
            pair.push("=");
            pair.push(value);
            env.push(pair);
        }
        let mut rlimits = plan.rlimits.clone();
        rlimits.extend(self.rlimits.iter().flatten());
        if let Carrier::Limit { base } = self.carrier {
            rlimits.push((process_tree::LIMIT, base + u64::from(mark)));
        }
        let env = strings(env.into_iter())?;
        let programs = programs(plan)?;
        let cwd = CString::new(plan.cwd.clone().into_os_string().into_vec())?;
        let (stdio, terminal) = match &plan.stdio {
            Stdio::Fds {
                stdin,
                stdout,
                stderr,
            } => (
                [stdin.as_raw_fd(), stdout.as_raw_fd(), stderr.as_raw_fd()],
                false,
            ),
            Stdio::Terminal(fd) => ([fd.as_raw_fd(); 3], true),
        };
        let (argv_pointers, env_pointers) = (pointers(&argv), pointers(&env));
        let program_pointers = pointers(&programs);
        let start = Start {
            argv: argv_pointers.as_ptr(),
            env: env_pointers.as_ptr(),
            programs: program_pointers.as_ptr(),
            cwd: cwd.as_ptr(),
            stdio,
            terminal,
            rlimits: &rlimits,
            descriptors: descriptors(self.plan.limits.pids),
            ids: self.two_uids.then_some((self.plan.guest.id, mark)),
            landlock: self.landlock.as_ref().map(AsRawFd::as_raw_fd),
            filter: &self.guest_filter,
            init_oom_score: self.oom_score.as_raw_fd(),
            failed: AtomicI32::new(libc::ETIMEDOUT),
        };
        let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
        // Inherited: when memory runs out, all that commands have started goes before init does. The child puts init back, so that
        // init is never worth as little as a program that runs.
        let _ = rustix::io::write(&self.oom_score, GUEST_OOM_SCORE);
        let cloned = clone_and_run(&mut stack, &start, self.watchdog.as_ref());
        let failed = start.failed.into_inner();
        if cloned.is_err() || failed != 0 {
            let _ = rustix::io::write(&self.oom_score, INIT_OOM_SCORE);
        }
        let pid = cloned?;
        if failed != 0 {
            let _ = rustix::process::waitpid(
                rustix::process::Pid::from_raw(pid),
                rustix::process::WaitOptions::empty(),
            );
            return Err(io::Error::from_raw_os_error(failed));
        }
        Ok(Command { pid, mark })
    }
}

/// What the child needs, all of it made before and alive until it has gone on.
struct Start<'a> {
    argv: *const *const c_char,
    env: *const *const c_char,
    programs: *const *const c_char,
    cwd: *const c_char,
    stdio: [RawFd; 3],
    terminal: bool,
    rlimits: &'a [(u32, u64)],
    /// Most descriptors that it may have.
    descriptors: u64,
    /// The guest's id and the command's mark, where init is somebody else.
    ids: Option<(u32, u32)>,
    landlock: Option<RawFd>,
    filter: &'a [libc::sock_filter],
    /// Where init's worth is written.
    init_oom_score: RawFd,
    /// The error number of what did not work, written by the child: 0 just before its program. What it is before that stays if
    /// the child is killed.
    failed: AtomicI32,
}

/// No descriptor for the process: init is its parent and reaps it, and each one that is open is copied and closed again by every
/// command that starts later.
fn clone_and_run(
    stack: &mut Vec<u128>,
    start: &Start<'_>,
    watchdog: Option<&StartWatchdog>,
) -> io::Result<i32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
    // SAFETY: the end of the allocation, one past it at most; stacks grow down.
    let top = unsafe { stack.as_mut_ptr().add(stack.capacity()) };
    let no_watchdog = AtomicI32::new(0);
    let child = watchdog.map_or(&no_watchdog, StartWatchdog::begin);
    // No handler of init's may run in the child: it would run on init's memory.
    let pid = raw::with_signals_blocked(|| {
        // SAFETY: the child runs `begin` on a stack of its own, aligned to 16, and shares our memory; we are held (VFORK) until it
        // has called `execve` or `_exit`, so `start` and the stack outlive its use of them, and it touches nothing else of ours.
        // The kernel writes the child's number to `child`.
        let pid = unsafe {
            libc::clone(
                begin,
                top.cast(),
                flags,
                std::ptr::from_ref(start).cast_mut().cast::<c_void>(),
                child.as_ptr(),
            )
        };
        if pid < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(pid)
        }
    });
    watchdog.inspect(|watchdog| watchdog.end());
    pid
}

/// The child's whole life before its program.
extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: the pointer given to `clone`, to a `Start` that outlives this.
    let start = unsafe { &*start.cast::<Start<'_>>() };
    let Err(error) = go(start);
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    start.failed.store(errno, Relaxed);
    raw::exit_now(127)
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn go(start: &Start<'_>) -> io::Result<std::convert::Infallible> {
    default_signals();
    // SAFETY: reads what outlives the call. That of init alone: a child that holds its parent keeps what it was born with.
    unsafe {
        libc::write(
            start.init_oom_score,
            INIT_OOM_SCORE.as_ptr().cast(),
            INIT_OOM_SCORE.len(),
        )
    };
    // SAFETY: takes nothing.
    check(unsafe { libc::setsid() }.into())?;
    for (to, from) in start.stdio.into_iter().enumerate() {
        // Init's own standard descriptors are 0 to 2, so what is handed on is always above.
        let to = c_int::try_from(to).unwrap_or(c_int::MAX);
        // SAFETY: takes numbers; the table of descriptors is the child's own.
        check(unsafe { libc::dup2(from, to) }.into())?;
    }
    if start.terminal {
        // SAFETY: takes a number; 0 does not steal a terminal.
        check(unsafe { libc::ioctl(0, libc::TIOCSCTTY as _, 0) }.into())?;
    }
    limit_descriptors(start.descriptors)?;
    for (resource, value) in start.rlimits {
        lower_limit(*resource, *value)?;
    }
    if let Some((guest, mark)) = start.ids {
        become_guest(guest, mark)?;
    }
    assert_no_capabilities()?;
    if let Some(landlock) = start.landlock {
        raw::landlock_restrict(landlock)?;
    }
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::chdir(start.cwd) }.into())?;
    raw::load_filter(start.filter)?;
    // SAFETY: this table of descriptors is the child's own, and nothing in it is used any more but 0 to 2.
    unsafe { raw::close_from(3) }?;
    // SAFETY: takes a number.
    unsafe { libc::umask(0o022) };
    start.failed.store(0, Relaxed);
    Err(exec(start))
}

/// Tries each candidate. Not being found in one place says nothing; not being allowed is remembered.
fn exec(start: &Start<'_>) -> io::Error {
    let mut denied = false;
    let mut at = start.programs;
    loop {
        // SAFETY: `programs` ends with a null pointer, at which this loop ends.
        let program = unsafe { *at };
        if program.is_null() {
            return io::Error::from_raw_os_error(if denied { libc::EACCES } else { libc::ENOENT });
        }
        // SAFETY: C strings and null-terminated arrays of them, alive until this process has become the program.
        unsafe { libc::execve(program, start.argv, start.env) };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            Some(libc::EACCES) => denied = true,
            _ => return error,
        }
        // SAFETY: not past the null pointer, which was checked for.
        at = unsafe { at.add(1) };
    }
}

/// What init ignores or blocks is no business of a command's.
fn default_signals() {
    for signal in 1..=64 {
        // SAFETY: sets a disposition of the child's own table; numbers that cannot be set answer an error.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let none = raw::signal_set(&[]);
    // SAFETY: an initialised set.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// Lowers a limit; where it is lower already it stays. Raising is nobody's right here.
fn lower_limit(resource: u32, value: u64) -> io::Result<()> {
    let value = value.min(limit_of(resource)?.rlim_max);
    set_limit(resource, value, value)
}

/// A process's part of the descriptors of a box with so many processes, one of which is init.
fn descriptors(pids: Option<u64>) -> u64 {
    let part = pids.map(|pids| DESCRIPTORS_PER_BOX / pids.saturating_sub(1).max(1));
    part.unwrap_or(DESCRIPTORS_MIN)
        .clamp(DESCRIPTORS_MIN, DESCRIPTORS_MAX)
}

/// Half of what there is at most, where there is little.
fn limit_descriptors(most: u64) -> io::Result<()> {
    let most = most.min(limit_of(libc::RLIMIT_NOFILE)?.rlim_max / 2);
    set_limit(libc::RLIMIT_NOFILE, DESCRIPTORS_DEFAULT.min(most), most)
}

fn limit_of(resource: u32) -> io::Result<libc::rlimit> {
    let mut now = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: fills `now`.
    check(unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, 0, &raw mut now) })?;
    Ok(now)
}

fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let new = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: reads `new`.
    check(unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const new, 0) })
}

/// The raw calls: the C library's would try to take init's other threads along.
fn become_guest(guest: u32, mark: u32) -> io::Result<()> {
    // SAFETY: one group, which outlives the call.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 1, &raw const mark) })?;
    // SAFETY: takes numbers.
    check(unsafe { libc::syscall(libc::SYS_setresgid, guest, guest, guest) })?;
    // SAFETY: takes numbers. Going from 0 to another id clears every capability.
    check(unsafe { libc::syscall(libc::SYS_setresuid, guest, guest, guest) })
}

/// No command starts with a capability left, whatever went wrong before.
fn assert_no_capabilities() -> io::Result<()> {
    let sets = rustix::thread::capabilities(None)?;
    let all = sets.effective | sets.permitted | sets.inheritable;
    if all.is_empty() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

fn strings(all: impl Iterator<Item = OsString>) -> io::Result<Vec<CString>> {
    all.map(|one| CString::new(one.into_vec()).map_err(io::Error::from))
        .collect()
}

fn pointers(all: &[CString]) -> Vec<*const c_char> {
    all.iter()
        .map(|one| one.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// Where the program may be.
fn programs(plan: &SpawnPlan<'_>) -> io::Result<Vec<CString>> {
    let Some(name) = plan.argv.first().filter(|name| !name.is_empty()) else {
        return Err(io::Error::from_raw_os_error(libc::ENOENT));
    };
    let bytes = name.clone().into_vec();
    if bytes.contains(&b'/') {
        return strings([name.clone()].into_iter());
    }
    let path = plan
        .env
        .iter()
        .find(|(key, _)| key == "PATH")
        .map_or_else(|| PATH_DEFAULT.into(), |(_, value)| value.clone());
    let dirs = std::env::split_paths(&path).collect::<Vec<_>>();
    strings(dirs.into_iter().map(|dir| dir.join(name).into_os_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_the_descriptors_of_their_box() {
        let of = |processes: u64| descriptors(Some(processes + 1));
        assert_eq!((of(1), of(64)), (4096, 4096));
        assert_eq!((of(128), of(256)), (2048, 1024));
        assert_eq!((of(100_000), descriptors(None)), (512, 512));
        assert_eq!(
            (descriptors(Some(0)), descriptors(Some(u64::MAX))),
            (4096, 512)
        );
    }
}
