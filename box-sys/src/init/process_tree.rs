//! Finds all processes of a command, including double forks and new sessions.
//!
//! With two user ids (boxes of root), every command runs with a supplementary group of its own. Its
//! descendants inherit the group, and dropping it requires a capability that no guest has.
//!
//! With one user id, Box cannot assign groups. A hard limit that programs do not use, the size of
//! message queues, carries the mark. A process inherits it and can only lower it. A process that
//! lowered it belongs to no command and ends with the first command that is killed. A guest can
//! lower it to the mark of another command of its box; the process then ends with that command or
//! with the box.

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

/// Group ids that mark commands: no ids of guests, within the mapped range.
///
/// A box can distinguish this many commands at once.
pub(crate) const MARKS: std::ops::Range<u32> = 61_000..62_000;

/// Time limit of a kill. Init does nothing else meanwhile.
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// The limit that carries marks without groups, and the offset of the marks.
///
/// The offset is far above the size of a default queue and below the kernel's default limit.
pub(super) const LIMIT: u32 = libc::RLIMIT_MSGQUEUE;
const LIMIT_BASE: u64 = 700_000;

/// What carries the marks of a box's commands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Carrier {
    Groups,
    /// The hard limit is the mark plus `base`.
    Limit {
        base: u64,
    },
}

impl Carrier {
    /// Chooses the carrier.
    ///
    /// A low existing limit reduces `base`, so that no mark exceeds it.
    pub(super) fn choose(two_uids: bool) -> Self {
        if two_uids {
            return Self::Groups;
        }
        let most = getrlimit(Resource::Msgqueue).maximum.unwrap_or(u64::MAX);
        let base = LIMIT_BASE.min(most.saturating_sub(MARKS.end.into()));
        Self::Limit { base }
    }
}

/// A point in time, ordered by the processes that started before it.
#[derive(Debug, Clone, Copy)]
pub struct ProcessTime {
    /// Clock of process start times. It is too coarse to separate two runs.
    ticks: u64,
    /// Last pid. Later processes of the same tick have higher pids.
    last: i32,
}

/// Resolution of process start times.
const TICK_NANOS: u64 = 10_000_000;

/// Last pid of the caller's pid namespace.
///
/// The file stays open, because opening costs more than reading.
fn last_process() -> Option<i32> {
    static LOAD: OnceLock<Option<fs::File>> = OnceLock::new();
    let load = LOAD.get_or_init(|| fs::File::open("/proc/loadavg").ok());
    let mut text = [0; 128];
    let length = load.as_ref()?.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(text.get(..length)?).ok()?;
    text.split_whitespace().last()?.parse().ok()
}

impl ProcessTime {
    /// The current moment.
    pub fn now() -> Self {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: writes `now`.
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
        // The name in parentheses may contain any characters, including parentheses.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let begun = after_name.split_whitespace().nth(19);
        let begun = begun.and_then(|ticks| ticks.parse::<u64>().ok());
        begun.is_some_and(|ticks| ticks > self.ticks || (ticks == self.ticks && pid > self.last))
    }
}

/// Processes of a command that started after a moment, except its first one.
pub(super) fn started_since(command: &Command, since: ProcessTime, by: Carrier) -> Vec<i32> {
    let mut all: Vec<i32> = processes()
        .filter(|pid| liveness_of(command, *pid, by) == Some(Liveness::Alive))
        .collect();
    all.retain(|pid| *pid != command.pid && since.precedes_start_of(*pid));
    all
}

/// Kills all processes of a command and returns their number.
///
/// It repeats until a pass finds no new process. A pass without running processes proves nothing: a
/// process that forks and exits in a loop is dead under each pid by the time of the check. But its
/// zombies remain, because the caller reaps them and does not do so meanwhile. Every new process,
/// running or dead, therefore causes another pass, and the kernel cannot reuse the pid of a zombie.
pub(super) fn kill(command: &Command, by: Carrier) -> usize {
    let end = Instant::now() + KILL_WITHIN;
    let (mut known, mut killed) = (BTreeSet::new(), 0);
    loop {
        let mut pids: Vec<i32> = processes().filter(|pid| !known.contains(pid)).collect();
        let before = known.len();
        if before == 0 {
            // Parents first: a shell that sees its child die would still write about it.
            pids.sort_unstable_by_key(|pid| (*pid != command.pid, *pid));
        } else {
            // Youngest first, because the chain of forks continues there.
            pids.sort_unstable_by_key(|pid| Reverse(*pid));
        }
        for pid in pids {
            // Opened before the check, so that the signal reaches the checked process.
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

/// Whether any process of a command is alive.
pub(super) fn is_alive(command: &Command, by: Carrier) -> bool {
    processes().any(|pid| liveness_of(command, pid, by) == Some(Liveness::Alive))
}

/// State of a process that belongs to a command.
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

/// The marks of running processes.
pub(super) fn marks_in_use(by: Carrier) -> BTreeSet<u32> {
    let mark = |pid| match mark_of(pid, by) {
        Some((Mark::Of(mark), Liveness::Alive)) => Some(mark),
        _ => None,
    };
    processes().filter_map(mark).collect()
}

/// Reads a file of a process in procfs. The process name in it may be any bytes.
fn read_proc(pid: i32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The mark of a process.
enum Mark {
    Of(u32),
    Dropped,
}

/// Mark and state of a process.
///
/// A process with an ended first thread is alive while another thread runs.
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
