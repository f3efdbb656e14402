//! The interface of a box's first process after the box is complete.
//!
//! It starts commands as the guest and ends them with all their descendants. `spawn.rs` starts a
//! command under the supervision of `start_watchdog.rs`, `process_tree.rs` finds its descendants,
//! `guest_thread.rs` gives a thread the guest's file access, `memory.rs` returns memory.

mod guest_thread;
mod memory;
pub(crate) mod process_tree;
mod spawn;
mod start_watchdog;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions};

use crate::mounts::open_beneath;
use crate::plan::SandboxPlan;
pub use guest_thread::GuestThread;
pub use memory::release_memory;
pub use process_tree::ProcessTime;
pub use spawn::{Command, SpawnPlan, Stdio};
use start_watchdog::StartWatchdog;

/// State of a box's first process.
#[derive(Debug)]
pub struct Init {
    /// The plan of the box.
    pub plan: SandboxPlan,
    /// The client's descriptors, in order.
    pub fds: Vec<OwnedFd>,
    /// Descriptors for a later program.
    pub outer: Outer,
    /// Egress sockets of the box, for a runtime that adopts it. Init does not use them.
    pub egress: Vec<OwnedFd>,
    /// Whether init and guest have different user ids.
    pub two_uids: bool,
    /// Names of the primitives that the box lacks.
    pub missing: Vec<String>,
    landlock: Option<OwnedFd>,
    /// `oom_score_adj` of init, opened before init became non-dumpable.
    oom_score: OwnedFd,
    /// OOM events of the box's cgroup, if the kernel counts them.
    oom_events: Option<OwnedFd>,
    guest_filter: Vec<libc::sock_filter>,
    /// Started with the first command.
    watchdog: Option<StartWatchdog>,
    carrier: process_tree::Carrier,
    marks: BTreeSet<u32>,
    next_mark: u32,
    /// Marks of processes that outlived their command.
    leftover: BTreeSet<u32>,
    /// Per-process limits in place of missing cgroup controllers.
    rlimits: [Option<(u32, u64)>; 2],
}

/// Descriptors with which a later program can mount into the box and copy its files.
///
/// Init sends them over a socket. It has no privileges over them itself.
#[derive(Debug)]
pub struct Outer {
    /// The user namespace that owns the box's mounts.
    pub user: OwnedFd,
    /// The box's mount namespace.
    pub mounts: OwnedFd,
    /// The directory of the private files.
    pub upper: OwnedFd,
}

/// How a child of init ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildExit {
    /// Pid in the box.
    pub pid: i32,
    /// Exit code, if the child exited.
    pub code: Option<i32>,
    /// Signal, if one ended the child.
    pub signal: Option<i32>,
}

impl Init {
    #[expect(
        clippy::too_many_arguments,
        reason = "one result of each creation step"
    )]
    pub(crate) fn new(
        plan: SandboxPlan,
        fds: Vec<OwnedFd>,
        outer: Outer,
        egress: Vec<OwnedFd>,
        two_uids: bool,
        missing: Vec<String>,
        landlock: Option<OwnedFd>,
        oom_score: OwnedFd,
        oom_events: Option<OwnedFd>,
    ) -> Self {
        let guest_filter = crate::seccomp::guest_program(two_uids);
        let rlimits = rlimits(&plan, &missing);
        Self {
            plan,
            fds,
            outer,
            egress,
            two_uids,
            missing,
            landlock,
            oom_score,
            oom_events,
            guest_filter,
            watchdog: None,
            carrier: process_tree::Carrier::choose(two_uids),
            marks: BTreeSet::new(),
            next_mark: process_tree::MARKS.start,
            leftover: BTreeSet::new(),
            rlimits,
        }
    }

    /// Reaps one ended child, if any.
    ///
    /// Init is the parent of every orphan of the box. After each `SIGCHLD`, the caller repeats this
    /// until it returns `None`.
    pub fn reap(&self) -> Option<ChildExit> {
        let (pid, status) = rustix::process::wait(WaitOptions::NOHANG).ok()??;
        Some(ChildExit {
            pid: pid.as_raw_pid(),
            code: status.exit_status(),
            signal: status.terminating_signal(),
        })
    }

    /// Number of OOM kills in the box, if the kernel counts them.
    pub fn oom_kills(&self) -> Option<u64> {
        let mut buffer = [0; 512];
        let length = rustix::io::pread(self.oom_events.as_ref()?, &mut buffer, 0).ok()?;
        let text = std::str::from_utf8(buffer.get(..length)?).ok()?;
        crate::cgroup::field_of(text, crate::cgroup::OOM_KILLS)
    }

    /// Sends a signal to a command's process group.
    pub fn signal(&self, command: &Command, signal: i32) -> io::Result<()> {
        let (Some(pid), Some(signal)) =
            (Pid::from_raw(command.pid), Signal::from_named_raw(signal))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        Ok(rustix::process::kill_process_group(pid, signal)?)
    }

    /// Kills a command and all its descendants, and returns their number.
    ///
    /// This includes detached processes. The caller still has to reap them.
    pub fn kill_tree(&self, command: &Command) -> usize {
        process_tree::kill(command, self.carrier)
    }

    /// Whether a process of a command is alive.
    ///
    /// A killed process counts until it has ended, because it still holds its ports and files.
    pub fn is_alive(&self, command: &Command) -> bool {
        process_tree::is_alive(command, self.carrier)
    }

    /// Kills all other processes of the box.
    ///
    /// Returns whether no process existed, not even a zombie.
    pub fn kill_all(&self) -> bool {
        // For the kernel, the process group of pid 1 is every other process. No process can fork
        // meanwhile.
        let killed = rustix::process::kill_process_group(Pid::INIT, Signal::KILL);
        killed == Err(rustix::io::Errno::SRCH)
    }

    /// Sends a signal to all processes that a command has started since a moment.
    ///
    /// This includes detached processes, but not the command's first process. Returns their number.
    pub fn signal_started_since(
        &self,
        command: &Command,
        since: ProcessTime,
        signal: i32,
    ) -> usize {
        let Some(signal) = Signal::from_named_raw(signal) else {
            return 0;
        };
        let found = process_tree::started_since(command, since, self.carrier);
        let found = found.iter().filter_map(|pid| Pid::from_raw(*pid));
        found
            .filter(|pid| rustix::process::kill_process(*pid, signal).is_ok())
            .count()
    }

    /// Allows later commands and threads to write below a new mount.
    ///
    /// The guest may change names at the same time, so no link is followed.
    pub fn allow_writing(&self, path: &Path) -> io::Result<()> {
        let Some(landlock) = &self.landlock else {
            return Ok(());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty())?;
        let within = path.strip_prefix("/").unwrap_or(path);
        let place = open_beneath(&root, within, OFlags::PATH)?;
        crate::landlock::add_writable(landlock, &place)
    }

    /// Releases the mark of an ended command for reuse.
    pub fn release_mark(&mut self, command: &Command) {
        self.marks.remove(&command.mark);
    }
}

/// Resource limits of each process.
///
/// The kernel counts processes per user and user namespace, hence per box. This limit also applies
/// beside a cgroup, which has a reserve for the agent. Without a memory cgroup, each process gets a
/// memory limit, which is weaker and is reported as missing.
fn rlimits(plan: &SandboxPlan, missing: &[String]) -> [Option<(u32, u64)>; 2] {
    let lacks = |name: &str| missing.iter().any(|missing| missing == name);
    let pids = plan.limits.pids;
    let memory = plan.limits.memory.filter(|_| lacks("cgroup.memory"));
    // Data, not address space: programs reserve far more address space than they use.
    [
        pids.map(|pids| (libc::RLIMIT_NPROC, pids)),
        memory.map(|memory| (libc::RLIMIT_DATA, memory)),
    ]
}

/// Landlock rules for commands: write where the plan allows it, read everything.
pub(crate) fn ruleset(plan: &SandboxPlan, abi: u32) -> io::Result<Option<OwnedFd>> {
    let fixed = ["/tmp", "/var/tmp"].into_iter().map(Path::new);
    let root = (!plan.read_only_root).then_some(Path::new("/"));
    let mounts = plan
        .mounts
        .iter()
        .filter(|mount| mount.writable)
        .map(|mount| mount.target.as_path());
    // Directories in a mount have the rule of the mount. The guest may control names there.
    let dirs = plan.dirs.iter().filter(|dir| plan.mount_of(dir).is_none());
    let dirs = dirs.chain([&plan.guest.home]).map(PathBuf::as_path);
    crate::landlock::ruleset(abi, fixed.chain(root).chain(mounts).chain(dirs))
}
