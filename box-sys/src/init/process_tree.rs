//! Which processes came of a command, also after double forks and new sessions.
//!
//! With two ids (root's boxes) every command runs with a supplementary group of its own. A process inherits it, and giving it
//! up needs a capability that no guest has: whoever carries the group is the command's, however it got away.
//!
//! With one id there are no groups to give. There a hard limit nobody uses, of message queues' bytes, carries the mark: a process
//! inherits it and can only lower it. One that did is nobody's, and dies with whichever command is killed first. What remains
//! is a guest that lowers it to just the mark of another command of its own box; it ends with that one, or with the box.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Resource, Signal, getrlimit, pidfd_open, pidfd_send_signal,
};

use super::spawn::Command;

/// Groups that mark commands: above every guest's id, within the mapped range. So many commands of one box can be told apart
/// at once.
pub(crate) const MARKS: std::ops::Range<u32> = 61_000..62_000;

/// How long a kill may go on: it keeps init from everything else.
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// The limit that carries marks without groups, and what is added to them: well above what a default queue needs, below
/// the kernel's default.
pub(super) const LIMIT: u32 = libc::RLIMIT_MSGQUEUE;
const LIMIT_BASE: u64 = 700_000;

/// What carries the marks of a box's commands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Carrier {
    Groups,
    /// The limit: the mark and so much more.
    Limit {
        base: u64,
    },
}

impl Carrier {
    /// Where the limit is low already there is less to add: a mark that was cut off by it would be everybody's.
    pub(super) fn choose(two_uids: bool) -> Self {
        if two_uids {
            return Self::Groups;
        }
        let most = getrlimit(Resource::Msgqueue).maximum.unwrap_or(u64::MAX);
        let base = LIMIT_BASE.min(most.saturating_sub(MARKS.end.into()));
        Self::Limit { base }
    }
}

/// A moment in the life of a box, told apart from every other by the processes that were started before it.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// As the kernel counts the begin of processes, which is too coarse to tell a run from the next.
    ticks: u64,
    /// The last process started; the next ones of this tick have higher numbers.
    last: i32,
}

/// A tick of the begin of processes.
const TICK_NANOS: u64 = 10_000_000;

/// The last process that was started in the box of whoever asks. The file is opened once: to open it costs more than to read.
fn last_process() -> Option<i32> {
    static LOAD: OnceLock<Option<fs::File>> = OnceLock::new();
    let load = LOAD.get_or_init(|| fs::File::open("/proc/loadavg").ok());
    let mut text = [0; 128];
    let length = load.as_ref()?.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(text.get(..length)?).ok()?;
    text.split_whitespace().last()?.parse().ok()
}

impl Moment {
    /// This one.
    pub fn now() -> Self {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: fills `now`.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
        let nanos = u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000
            + u64::try_from(now.tv_nsec).unwrap_or(0);
        Self {
            ticks: nanos / TICK_NANOS,
            last: last_process().unwrap_or(0),
        }
    }

    fn precedes_start_of(self, pid: i32) -> bool {
        let stat = read_proc(pid, "stat").unwrap_or_default();
        // The name in brackets may hold anything, also brackets.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let begun = after_name.split_whitespace().nth(19);
        let begun = begun.and_then(|ticks| ticks.parse::<u64>().ok());
        begun.is_some_and(|ticks| ticks > self.ticks || (ticks == self.ticks && pid > self.last))
    }
}

/// The living processes of a command that began after a moment, but its first.
pub(super) fn started_since(command: &Command, since: Moment, by: Carrier) -> Vec<i32> {
    let mut all: Vec<i32> = processes()
        .filter(|pid| liveness_of(command, *pid, by) == Some(Liveness::Alive))
        .collect();
    all.retain(|pid| *pid != command.pid && since.precedes_start_of(*pid));
    all
}

/// Sends `SIGKILL` to every process of a command until a look finds none that was not there before, and gives how many were
/// killed.
///
/// That none is found alive says nothing: a process that forks and ends, again and again, is dead under each number by the time
/// that is looked at. But it leaves its dead behind, for whoever calls this is who buries them, and does not meanwhile. So a new
/// one, living or dead, is what another look is for; and a dead one's number is nobody else's.
pub(super) fn kill(command: &Command, by: Carrier) -> usize {
    let end = Instant::now() + KILL_WITHIN;
    let (mut known, mut killed) = (BTreeSet::new(), 0);
    loop {
        let mut pids: Vec<i32> = processes().filter(|pid| !known.contains(pid)).collect();
        // The youngest first: those are the ones that may be on their way.
        pids.sort_unstable_by_key(|pid| Reverse(*pid));
        let before = known.len();
        for pid in pids {
            // Opened before it is looked at, so that what is killed is what was looked at.
            let handle =
                Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
            let Some((handle, liveness)) = handle.zip(liveness_of(command, pid, by)) else {
                continue;
            };
            known.insert(pid);
            if liveness == Liveness::Alive && pidfd_send_signal(handle, Signal::KILL).is_ok() {
                killed += 1;
            }
        }
        if known.len() == before || Instant::now() > end {
            return killed;
        }
        std::thread::yield_now();
    }
}

/// Whether any process of a command lives.
pub(super) fn is_alive(command: &Command, by: Carrier) -> bool {
    processes().any(|pid| liveness_of(command, pid, by) == Some(Liveness::Alive))
}

/// What a process is to a command, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Liveness {
    Alive,
    Dead,
}

fn liveness_of(command: &Command, pid: i32, by: Carrier) -> Option<Liveness> {
    let (mark, liveness) = mark_of(pid, by)?;
    let ours = match mark {
        Mark::Of(mark) => mark == command.mark,
        Mark::Dropped => true,
    };
    ours.then_some(liveness)
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != 1)
}

/// The marks that living processes carry.
pub(super) fn marks_in_use(by: Carrier) -> BTreeSet<u32> {
    let mark = |pid| match mark_of(pid, by) {
        Some((Mark::Of(mark), Liveness::Alive)) => Some(mark),
        _ => None,
    };
    processes().filter_map(mark).collect()
}

/// What the kernel tells of a process. A process's name is part of it, and may be any bytes.
fn read_proc(pid: i32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whose a process is.
enum Mark {
    Of(u32),
    Dropped,
}

/// The mark of a process, and whether it lives: one whose first thread has ended does as long as another goes on.
fn mark_of(pid: i32, by: Carrier) -> Option<(Mark, Liveness)> {
    let status = read_proc(pid, "status")?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let ended = field("State:")?.trim_start().starts_with(['Z', 'X']);
    let threads: u32 = field("Threads:")?.trim().parse().ok()?;
    let liveness = if ended && threads <= 1 {
        Liveness::Dead
    } else {
        Liveness::Alive
    };
    let Carrier::Limit { base } = by else {
        let mut groups = field("Groups:")?
            .split_whitespace()
            .filter_map(|group| group.parse().ok());
        let mark = groups.find(|group| MARKS.contains(group));
        return mark.map(|mark| (Mark::Of(mark), liveness));
    };
    let limits = read_proc(pid, "limits")?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max msgqueue size"))?;
    let hard: Option<u64> = line
        .split_whitespace()
        .nth(1)
        .and_then(|hard| hard.parse().ok());
    let mark = hard
        .and_then(|hard| hard.checked_sub(base))
        .and_then(|mark| u32::try_from(mark).ok());
    let mark = mark.filter(|mark| MARKS.contains(mark));
    Some((mark.map_or(Mark::Dropped, Mark::Of), liveness))
}
