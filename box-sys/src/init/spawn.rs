//! Starts a command as the guest.
//!
//! The clone shares memory and suspends init until the command runs, so its cost does not depend on
//! the size of init.

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::thread::{CapabilitySet, CapabilitySets};

use super::Init;
use super::process_tree::{self, Carrier, MARKS};
use super::start_watchdog::StartWatchdog;
use crate::raw;

/// A command to start.
#[derive(Debug)]
pub struct SpawnPlan<'a> {
    /// The program and its arguments.
    ///
    /// A name without `/` is searched in the `PATH` of `env`.
    pub argv: Vec<OsString>,
    /// The complete environment.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory. The child enters it as the guest.
    pub cwd: PathBuf,
    /// Standard input, output and error.
    pub stdio: Stdio<'a>,
    /// Limits to lower: resource number and value, as for `setrlimit`.
    pub rlimits: Vec<(u32, u64)>,
}

/// The three standard descriptors of a command.
#[derive(Debug, Clone, Copy)]
pub enum Stdio<'a> {
    /// One descriptor for each.
    Fds {
        /// Standard input.
        stdin: BorrowedFd<'a>,
        /// Standard output.
        stdout: BorrowedFd<'a>,
        /// Standard error.
        stderr: BorrowedFd<'a>,
    },
    /// A terminal for all three. It becomes the command's controlling terminal.
    Terminal(BorrowedFd<'a>),
}

/// A running command.
#[derive(Debug)]
pub struct Command {
    /// Pid in the box, also of its session and process group.
    pub pid: i32,
    pub(super) mark: u32,
}

/// `oom_score_adj` of commands, the maximum, and of init and the server.
const GUEST_OOM_SCORE: &[u8] = b"1000";
const INIT_OOM_SCORE: &[u8] = b"500";

/// Descriptor limits of a command: hard, soft, minimum, and total per box.
///
/// The kernel counts descriptors in flight between processes per user. It refuses a sender whose
/// own limit is below that count. The limit of commands is lower than the limit of the user's other
/// processes, so no command can block its agent or the runtime.
///
/// The kernel also limits open files of the whole host (`fs.file-max`). A box therefore has a
/// total, and each process a share of it, but never less than programs need.
const DESCRIPTORS_MAX: u64 = 4096;
const DESCRIPTORS_DEFAULT: u64 = 1024;
const DESCRIPTORS_MIN: u64 = 512;
const DESCRIPTORS_PER_BOX: u64 = 262_144;

/// Stack of the child, which calls few functions.
const STACK: usize = 64 << 10;
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Init {
    /// Starts a command as the guest.
    ///
    /// The command has a new session, only its three descriptors, and no capabilities. If the
    /// program cannot be run, the error is that of `execve`, which distinguishes "not found" from
    /// "not allowed".
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
                // All marks were used once. Processes that outlived their command still carry a
                // mark.
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
        // All allocations happen here, because the child shares this memory and must not change it.
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
            ids: self.two_uids.then_some(GuestIds {
                user: self.plan.guest.id,
                group: self.plan.guest.group,
                mark,
            }),
            landlock: self.landlock.as_ref().map(AsRawFd::as_raw_fd),
            filter: &self.guest_filter,
            init_oom_score: self.oom_score.as_raw_fd(),
            failed: AtomicI32::new(libc::ETIMEDOUT),
        };
        let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
        // The child inherits the score, so that the kernel kills commands before init when memory
        // runs out. The child then restores the score of init.
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

/// Arguments of the child, allocated before the clone and valid until its `execve`.
struct Start<'a> {
    argv: *const *const c_char,
    env: *const *const c_char,
    programs: *const *const c_char,
    cwd: *const c_char,
    stdio: [RawFd; 3],
    terminal: bool,
    rlimits: &'a [(u32, u64)],
    /// Hard limit of descriptors.
    descriptors: u64,
    /// The ids of the command, if init has others.
    ids: Option<GuestIds>,
    landlock: Option<RawFd>,
    filter: &'a [libc::sock_filter],
    /// Open `oom_score_adj` of init.
    init_oom_score: RawFd,
    /// Error number, written by the child; 0 just before `execve`.
    ///
    /// The initial value remains if the child is killed.
    failed: AtomicI32,
}

/// Ids of a command.
#[derive(Debug, Clone, Copy)]
struct GuestIds {
    user: u32,
    group: u32,
    /// Supplementary group that marks the command.
    mark: u32,
}

/// Clones the child and waits until it has called `execve` or exited.
///
/// It returns no pidfd: init is the parent and reaps the child, and every later command would copy
/// and close an open descriptor.
fn clone_and_run(
    stack: &mut Vec<u128>,
    start: &Start<'_>,
    watchdog: Option<&StartWatchdog>,
) -> io::Result<i32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
    // SAFETY: at most one past the end of the allocation. Stacks grow down.
    let top = unsafe { stack.as_mut_ptr().add(stack.capacity()) };
    let no_watchdog = AtomicI32::new(0);
    let child = watchdog.map_or(&no_watchdog, StartWatchdog::begin);
    // No signal handler of init may run in the child, because it would use init's memory.
    let pid = raw::with_signals_blocked(|| {
        // SAFETY: the child runs `child_main` on a separate stack, aligned to 16, and shares this
        // memory. This process is suspended (VFORK) until the child calls `execve` or `_exit`, so
        // `start` and the stack stay valid. The child changes nothing else. The kernel writes the
        // child's pid to `child`.
        let pid = unsafe {
            libc::clone(
                child_main,
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

/// Code of the child before its program.
extern "C" fn child_main(start: *mut c_void) -> c_int {
    // SAFETY: the pointer passed to `clone`, to a `Start` that outlives this call.
    let start = unsafe { &*start.cast::<Start<'_>>() };
    let Err(error) = prepare_and_exec(start);
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

fn prepare_and_exec(start: &Start<'_>) -> io::Result<std::convert::Infallible> {
    default_signals();
    // SAFETY: reads data that outlives the call. The write affects init only, because a vfork child
    // keeps the score that it inherited.
    unsafe {
        libc::write(
            start.init_oom_score,
            INIT_OOM_SCORE.as_ptr().cast(),
            INIT_OOM_SCORE.len(),
        )
    };
    // SAFETY: takes no arguments.
    check(unsafe { libc::setsid() }.into())?;
    for (to, from) in start.stdio.into_iter().enumerate() {
        // Init's own standard descriptors are 0 to 2, so the passed ones are always above.
        let to = c_int::try_from(to).unwrap_or(c_int::MAX);
        // SAFETY: takes integers. The child has its own descriptor table.
        check(unsafe { libc::dup2(from, to) }.into())?;
    }
    if start.terminal {
        // SAFETY: takes an integer. 0 does not steal a terminal.
        check(unsafe { libc::ioctl(0, libc::TIOCSCTTY as _, 0) }.into())?;
    }
    limit_descriptors(start.descriptors)?;
    for (resource, value) in start.rlimits {
        lower_limit(*resource, *value)?;
        if *resource == libc::RLIMIT_FSIZE {
            // The write fails and the program can report it. The signal would end it without a word.
            // SAFETY: sets a disposition in the child's own table.
            unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        }
    }
    if let Some(ids) = start.ids {
        become_guest(ids)?;
    }
    assert_no_capabilities()?;
    if let Some(landlock) = start.landlock {
        raw::landlock_restrict(landlock)?;
    }
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::chdir(start.cwd) }.into())?;
    raw::load_filter(start.filter)?;
    // SAFETY: the child has its own descriptor table, and uses only 0 to 2 from now on.
    unsafe { raw::close_from(3) }?;
    // SAFETY: takes an integer.
    unsafe { libc::umask(0o022) };
    start.failed.store(0, Relaxed);
    Err(exec(start))
}

/// Tries each candidate path.
///
/// It ignores "not found", and reports "not allowed" if no other candidate runs.
fn exec(start: &Start<'_>) -> io::Error {
    let mut denied = false;
    let mut at = start.programs;
    loop {
        // SAFETY: `programs` ends with a null pointer, at which this loop ends.
        let program = unsafe { *at };
        if program.is_null() {
            return io::Error::from_raw_os_error(if denied { libc::EACCES } else { libc::ENOENT });
        }
        // SAFETY: C strings and null-terminated arrays of them, valid until the program replaces
        // this process.
        unsafe { libc::execve(program, start.argv, start.env) };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            Some(libc::EACCES) => denied = true,
            _ => return error,
        }
        // SAFETY: the null pointer was checked above, so this does not pass it.
        at = unsafe { at.add(1) };
    }
}

/// Resets ignored and blocked signals to the defaults.
fn default_signals() {
    for signal in 1..=64 {
        // SAFETY: sets a disposition in the child's own table. Invalid numbers return an error.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let none = raw::signal_set(&[]);
    // SAFETY: the set is initialised.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// Lowers a limit. A lower limit stays.
fn lower_limit(resource: u32, value: u64) -> io::Result<()> {
    let value = value.min(limit_of(resource)?.rlim_max);
    set_limit(resource, value, value)
}

/// Descriptor limit of a process in a box with this process limit.
fn descriptors(pids: Option<u64>) -> u64 {
    let part = pids.map(|pids| DESCRIPTORS_PER_BOX / pids.saturating_sub(1).max(1));
    part.unwrap_or(DESCRIPTORS_MIN)
        .clamp(DESCRIPTORS_MIN, DESCRIPTORS_MAX)
}

/// Sets the descriptor limits. If the hard limit is low, commands get half of it.
fn limit_descriptors(most: u64) -> io::Result<()> {
    let most = most.min(limit_of(libc::RLIMIT_NOFILE)?.rlim_max / 2);
    set_limit(libc::RLIMIT_NOFILE, DESCRIPTORS_DEFAULT.min(most), most)
}

fn limit_of(resource: u32) -> io::Result<libc::rlimit> {
    let mut now = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes `now`.
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

/// Switches to the guest's ids.
///
/// It uses raw calls, because those of the C library would also change init's other threads.
fn become_guest(ids: GuestIds) -> io::Result<()> {
    let GuestIds { user, group, mark } = ids;
    // SAFETY: reads one group, which outlives the call.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 1, &raw const mark) })?;
    // SAFETY: takes integers.
    check(unsafe { libc::syscall(libc::SYS_setresgid, group, group, group) })?;
    // SAFETY: takes integers. The change from 0 to another id clears every capability.
    check(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })?;
    if user == 0 {
        // The change from another id to 0 clears none. The secure bits keep `execve` from giving
        // any back.
        let none = CapabilitySet::empty();
        let sets = CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        };
        rustix::thread::set_capabilities(None, sets)?;
    }
    Ok(())
}

/// Fails if the process still has a capability.
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

/// Candidate paths of the program.
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
