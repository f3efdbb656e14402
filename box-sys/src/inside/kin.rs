//! Which processes came of a command, also after double forks and new sessions.
//!
//! With two ids (root's boxes) every command runs with a supplementary group of its own. A process inherits it, and giving it
//! up needs a capability that no guest has: whoever carries the group is the command's, however it got away.
//!
//! With one id there are no groups to give. There a hard limit nobody uses, of message queues' bytes, carries the mark: a process
//! inherits it and can only lower it. One that did is nobody's, and dies with whichever command is killed first. What remains
//! is a guest that lowers it to just the mark of another command of its own box; it ends with that one, or with the box.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use super::spawn::Command;

/// Groups that mark commands: above every guest's id, within the mapped range. So many commands of one box can be told apart
/// at once.
pub(crate) const MARKS: std::ops::Range<u32> = 61_000..62_000;

/// Most rounds of a kill.
pub(super) const ROUNDS_MAX: usize = 10_000;

/// The limit that carries marks without groups, and what is added to them: well above what a default queue needs, below
/// the kernel's default.
pub(super) const LIMIT: u32 = libc::RLIMIT_MSGQUEUE;
pub(super) const LIMIT_BASE: u64 = 700_000;

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

    fn is_before(self, pid: i32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in brackets may hold anything, also brackets.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let begun = after_name.split_whitespace().nth(19);
        let begun = begun.and_then(|ticks| ticks.parse::<u64>().ok());
        begun.is_some_and(|ticks| ticks > self.ticks || (ticks == self.ticks && pid > self.last))
    }
}

/// The living processes of a command that began after a moment, but its first.
pub(super) fn younger(command: &Command, than: Moment, two_uids: bool) -> Vec<i32> {
    let mut all = of(command, two_uids);
    all.retain(|pid| *pid != command.pid && than.is_before(*pid));
    all
}

/// The living processes of a command.
pub(super) fn of(command: &Command, two_uids: bool) -> Vec<i32> {
    let ours = |pid: &i32| match mark_of(*pid, two_uids) {
        Some(Mark::Of(mark)) => mark == command.mark,
        Some(Mark::Shed) => true,
        None => false,
    };
    processes().filter(ours).collect()
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != 1)
}

/// The marks that living processes carry.
pub(super) fn marks_in_use(two_uids: bool) -> BTreeSet<u32> {
    let mark = |pid| match mark_of(pid, two_uids) {
        Some(Mark::Of(mark)) => Some(mark),
        _ => None,
    };
    processes().filter_map(mark).collect()
}

/// Whose a process is.
enum Mark {
    Of(u32),
    Shed,
}

/// The mark of a process that is not dead already.
fn mark_of(pid: i32, two_uids: bool) -> Option<Mark> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    if field("State:")?.trim_start().starts_with(['Z', 'X']) {
        return None;
    }
    if two_uids {
        let mut groups = field("Groups:")?
            .split_whitespace()
            .filter_map(|group| group.parse().ok());
        return groups.find(|group| MARKS.contains(group)).map(Mark::Of);
    }
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max msgqueue size"))?;
    let hard: Option<u64> = line
        .split_whitespace()
        .nth(1)
        .and_then(|hard| hard.parse().ok());
    let mark = hard
        .and_then(|hard| hard.checked_sub(LIMIT_BASE))
        .and_then(|mark| u32::try_from(mark).ok());
    Some(
        mark.filter(|mark| MARKS.contains(mark))
            .map_or(Mark::Shed, Mark::Of),
    )
}
