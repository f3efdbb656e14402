//! Usage and freezing of a box's cgroup, and removal of cgroups of ended servers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::{CgroupFeature, Cgroups, open_dir, read, write};

/// Resource usage of a box. `None` if this host does not measure it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time.
    pub cpu: Option<Duration>,
    /// Current memory in bytes.
    pub memory: Option<u64>,
    /// Part of the current memory that holds cached files, in bytes.
    pub memory_cache: Option<u64>,
    /// Memory limit in bytes, if any.
    pub memory_limit: Option<u64>,
    /// Peak memory in bytes.
    pub memory_peak: Option<u64>,
    /// Number of processes that the kernel killed for lack of memory.
    pub oom_kills: Option<u64>,
    /// Current number of processes and threads.
    pub pids: Option<u64>,
}

/// Cgroup version 1 reports at least this value for no limit.
///
/// Version 2 reports no number.
const NO_LIMIT: u64 = 1 << 62;

impl Cgroups {
    fn dir(&self, name: &str, ability: CgroupFeature) -> Option<(OwnedFd, bool)> {
        let hierarchy = self.with(ability)?;
        Some((open_dir(&hierarchy.parent, name).ok()?, hierarchy.v2))
    }

    /// Resource usage of the box in this cgroup.
    pub(crate) fn usage(&self, name: &str) -> Usage {
        let mut usage = Usage::default();
        if let Some((dir, v2)) = self.dir(name, CgroupFeature::CpuUsage) {
            usage.cpu = if v2 {
                field(&dir, "cpu.stat", "usage_usec").map(Duration::from_micros)
            } else {
                number(&dir, "cpuacct.usage").map(Duration::from_nanos)
            };
        }
        if let Some((dir, v2)) = self.dir(name, CgroupFeature::Memory) {
            let [now, peak, limit] = if v2 {
                ["memory.current", "memory.peak", "memory.max"]
            } else {
                [
                    "memory.usage_in_bytes",
                    "memory.max_usage_in_bytes",
                    "memory.limit_in_bytes",
                ]
            };
            usage.memory = number(&dir, now);
            let cache = if v2 { "file" } else { "total_cache" };
            usage.memory_cache = field(&dir, "memory.stat", cache);
            usage.memory_peak = number(&dir, peak);
            usage.memory_limit = number(&dir, limit).filter(|limit| *limit < NO_LIMIT);
            usage.oom_kills = oom_kills(&dir, v2);
        }
        if let Some((dir, _)) = self.dir(name, CgroupFeature::Pids) {
            usage.pids = number(&dir, "pids.current");
        }
        usage
    }

    /// The file with the number of OOM kills, for init to read.
    pub(crate) fn oom_file(&self, name: &str) -> Option<OwnedFd> {
        let (dir, v2) = self.dir(name, CgroupFeature::Memory)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&dir, oom_name(v2), flags, Mode::empty()).ok()
    }

    /// Resumes a frozen box. A frozen box does not answer requests.
    pub fn thaw(&self, name: &str) -> io::Result<()> {
        self.freeze(name, false)
    }

    /// Freezes (`true`) or resumes (`false`) all processes of the cgroup.
    ///
    /// With version 1, a kill takes effect only after the process is resumed.
    pub(crate) fn freeze(&self, name: &str, frozen: bool) -> io::Result<()> {
        let Some((dir, v2)) = self.dir(name, CgroupFeature::Freeze) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if v2 {
            write(&dir, "cgroup.freeze", if frozen { "1" } else { "0" })
        } else {
            write(
                &dir,
                "freezer.state",
                if frozen { "FROZEN" } else { "THAWED" },
            )
        }
    }

    /// Whether all processes of a frozen cgroup have stopped.
    pub(crate) fn is_frozen(&self, name: &str) -> bool {
        match self.dir(name, CgroupFeature::Freeze) {
            Some((dir, true)) => field(&dir, "cgroup.events", "frozen") == Some(1),
            Some((dir, false)) => {
                read(&dir, "freezer.state").is_ok_and(|state| state.trim() == "FROZEN")
            }
            None => false,
        }
    }

    /// Removes empty cgroups of ended fork servers and returns their number.
    ///
    /// A name starts with the pid and start time of its server, so a reused pid does not match.
    /// Cgroups of running boxes and servers stay.
    pub fn sweep(&self) -> usize {
        let mut removed = 0;
        for hierarchy in &self.hierarchies {
            let Ok(list) = rustix::fs::Dir::read_from(&hierarchy.parent) else {
                continue;
            };
            let names = list
                .flatten()
                .filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
            for name in names {
                let Some(owner) = Owner::of(&name) else {
                    continue;
                };
                if !owner.is_alive()
                    && rustix::fs::unlinkat(&hierarchy.parent, &*name, AtFlags::REMOVEDIR).is_ok()
                {
                    removed += 1;
                }
            }
        }
        removed
    }
}

/// The fork server that created a cgroup.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pid: u32,
    started: u64,
}

impl Owner {
    /// This process.
    pub(crate) fn this() -> Option<Self> {
        let pid = std::process::id();
        Some(Self {
            pid,
            started: start_time(pid)?,
        })
    }

    /// A new, unique cgroup name of this process.
    pub(crate) fn new_group(&self) -> String {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let n = MADE.fetch_add(1, Ordering::Relaxed);
        format!("b{}-{}-{n}", self.pid, self.started)
    }

    fn of(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix('b')?.split('-');
        let owner = Self {
            pid: parts.next()?.parse().ok()?,
            started: parts.next()?.parse().ok()?,
        };
        parts.next()?.parse::<u64>().ok()?;
        parts.next().is_none().then_some(owner)
    }

    fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }
}

/// Start time of a running process, in ticks since boot.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    read_start_time(pid).ok().flatten()
}

/// Start time of a process.
///
/// `None` only if the process has ended or procfs hides it from this user.
pub(crate) fn read_start_time(pid: u32) -> io::Result<Option<u64>> {
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        stat => stat?,
    };
    Ok(started_of(&stat))
}

fn started_of(stat: &str) -> Option<u64> {
    // The name is in parentheses and may itself contain spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A zombie has ended.
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn oom_kills(dir: &OwnedFd, v2: bool) -> Option<u64> {
    field(dir, oom_name(v2), OOM_KILLS)
}

/// The kernel's name of the number of OOM kills.
pub(crate) const OOM_KILLS: &str = "oom_kill";

fn oom_name(v2: bool) -> &'static str {
    if v2 {
        "memory.events"
    } else {
        "memory.oom_control"
    }
}

fn number(dir: &OwnedFd, file: &str) -> Option<u64> {
    read(dir, file).ok()?.trim().parse().ok()
}

fn field(dir: &OwnedFd, file: &str, name: &str) -> Option<u64> {
    field_of(&read(dir, file).ok()?, name)
}

/// The number after a name in a text with one name per line.
pub(crate) fn field_of(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        line.strip_prefix(name)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_name_identifies_its_server() {
        let this = Owner::this().unwrap();
        assert!(this.is_alive());
        assert_eq!(Owner::of(&this.new_group()), Some(this));
        assert_eq!(Owner::of("other-group"), None);
        assert!(
            !Owner {
                pid: 1,
                started: u64::MAX
            }
            .is_alive()
        );
    }
}
