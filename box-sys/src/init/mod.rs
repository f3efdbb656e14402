//! What the first process of a box has once the box is closed: starting commands as the guest, and ending them with all they
//! have started.
//!
//! `spawn.rs` starts a command while `watch.rs` looks that it does start, `kin.rs` finds everything that came of it, `thread.rs` lets a thread touch files as the guest, `rest.rs`
//! gives memory back.

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
pub use process_tree::Moment;
pub use spawn::{Command, SpawnPlan, Stdio};
use start_watchdog::StartWatchdog;

/// What a box's first process is given.
#[derive(Debug)]
pub struct Init {
    /// What the box was asked to be.
    pub plan: SandboxPlan,
    /// The descriptors handed in, in order.
    pub fds: Vec<OwnedFd>,
    /// The namespaces that hold the box's mounts.
    pub outer: OuterNamespaces,
    /// The sockets at the exits of the box's network, for whoever takes the box over; of no use to init.
    pub egress: Vec<OwnedFd>,
    /// Whether init has an id of its own, apart from the guest's.
    pub two_uids: bool,
    /// What this box goes without.
    pub missing: Vec<String>,
    landlock: Option<OwnedFd>,
    /// What init is worth when memory runs out, opened before it hid itself.
    oom_score: OwnedFd,
    /// How many of the box's processes the kernel has killed for memory, where it counts that for boxes.
    oom_events: Option<OwnedFd>,
    guest_filter: Vec<libc::sock_filter>,
    /// Begun with the first command.
    watchdog: Option<StartWatchdog>,
    carrier: process_tree::Carrier,
    marks: BTreeSet<u32>,
    next_mark: u32,
    /// Marks of processes that outlived their command.
    leftover: BTreeSet<u32>,
    /// Limits of each process, standing in for cgroups that this machine does not give.
    rlimits: [Option<(u32, u64)>; 2],
}

/// What a later program needs to mount into this box, handed to it by init over a socket. Of no use to init itself: it has no
/// power over either.
#[derive(Debug)]
pub struct OuterNamespaces {
    /// The user namespace that owns the box's mounts.
    pub user: OwnedFd,
    /// The box's mount namespace.
    pub mounts: OwnedFd,
}

/// How a child of init ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildExit {
    /// Its process id inside.
    pub pid: i32,
    /// The exit code, if it exited.
    pub code: Option<i32>,
    /// The signal, if one ended it.
    pub signal: Option<i32>,
}

impl Init {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is what one step of the making gave"
    )]
    pub(crate) fn new(
        plan: SandboxPlan,
        fds: Vec<OwnedFd>,
        outer: OuterNamespaces,
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

    /// A child that has ended, if there is one. Init is the parent of every orphan of the box, so this must be called until it
    /// gives none each time a `SIGCHLD` comes.
    pub fn reap(&self) -> Option<ChildExit> {
        let (pid, status) = rustix::process::wait(WaitOptions::NOHANG).ok()??;
        Some(ChildExit {
            pid: pid.as_raw_pid(),
            code: status.exit_status(),
            signal: status.terminating_signal(),
        })
    }

    /// How many processes of the box were killed for memory so far, where that is counted.
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

    /// Kills a command and everything it has started, also what has detached itself, and gives how many processes that were.
    /// The ended ones still are to be reaped.
    pub fn kill_tree(&self, command: &Command) -> usize {
        process_tree::kill(command, self.carrier)
    }

    /// Whether a process of a command lives, also one that was killed and has not ended yet: that one still has its ports and files.
    pub fn is_alive(&self, command: &Command) -> bool {
        process_tree::is_alive(command, self.carrier)
    }

    /// Kills every process of the box but this one. Whether there was none, not even one that is still to be reaped.
    pub fn kill_all(&self) -> bool {
        // The group of the first process is, to the kernel, everybody but that process; and nobody is born meanwhile.
        let killed = rustix::process::kill_process_group(Pid::INIT, Signal::KILL);
        killed == Err(rustix::io::Errno::SRCH)
    }

    /// Sends a signal to everything that a command has started since a moment, also what has detached itself, but not to the
    /// command's first process; gives how many processes that were.
    pub fn signal_started_since(&self, command: &Command, since: Moment, signal: i32) -> usize {
        let Some(signal) = Signal::from_named_raw(signal) else {
            return 0;
        };
        let found = process_tree::started_since(command, since, self.carrier);
        let found = found.iter().filter_map(|pid| Pid::from_raw(*pid));
        found
            .filter(|pid| rustix::process::kill_process(*pid, signal).is_ok())
            .count()
    }

    /// Lets commands and threads to come write beneath a place that was mounted since. The guest may be changing names right
    /// now: no link is followed.
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

    /// Gives a command's mark free for another, once it has ended and nothing of it is left or wanted.
    pub fn forget(&mut self, command: &Command) {
        self.marks.remove(&command.mark);
    }
}

/// The number of processes, which the kernel counts per user and user namespace, so per box: also beside a cgroup, which has room for
/// the agent beyond it. And where cgroups are missing the memory of each process, which is less than asked for, and reported so.
fn rlimits(plan: &SandboxPlan, missing: &[String]) -> [Option<(u32, u64)>; 2] {
    let lacks = |name: &str| missing.iter().any(|missing| missing == name);
    let pids = plan.limits.pids;
    let memory = plan.limits.memory.filter(|_| lacks("cgroup.memory"));
    // Data, not address space: programs reserve far more of that than they use.
    [
        pids.map(|pids| (libc::RLIMIT_NPROC, pids)),
        memory.map(|memory| (libc::RLIMIT_DATA, memory)),
    ]
}

/// The rules for commands: write where the plan says, read what is there.
pub(crate) fn ruleset(plan: &SandboxPlan, abi: u32) -> io::Result<Option<OwnedFd>> {
    let fixed = ["/tmp", "/var/tmp"].into_iter().map(Path::new);
    let root = (!plan.read_only_root).then_some(Path::new("/"));
    let mounts = plan
        .mounts
        .iter()
        .filter(|mount| mount.writable)
        .map(|mount| mount.target.as_path());
    // Those in a mount go with it; and names in there are not only ours to give.
    let dirs = plan.dirs.iter().filter(|dir| plan.mount_of(dir).is_none());
    let dirs = dirs.chain([&plan.guest.home]).map(PathBuf::as_path);
    crate::landlock::ruleset(abi, fixed.chain(root).chain(mounts).chain(dirs))
}
