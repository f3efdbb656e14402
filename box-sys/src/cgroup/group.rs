//! A box's own group in every hierarchy: made ahead of time, limited when it is given out, removed or used again at the end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};

use super::{Ability, Cgroups, Hierarchy, open_dir, read, write};
use crate::plan::Limits;

/// Length of the period processor time is counted in, the kernel's own default.
const PERIOD_US: u64 = 100_000;

/// How often the removal of a group is tried that its last process has just left.
const REMOVALS: usize = 50;

/// Room for init and its threads, and for commands that it has just begun, beyond what the guest may have. The guest's own
/// processes are limited as those of one user, too, so that the guest does not get to it.
const AGENT_TASKS: u64 = 16;

/// A group of the same name in each hierarchy.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// Processor time counted for boxes that had this group before.
    pub(crate) cpu_before: Duration,
    /// Per version 1 hierarchy: the directory, and its `tasks` opened for writing. The kernel asks for the rights of
    /// whoever opened it, so a process that has none may still put itself in.
    v1: Vec<(OwnedFd, OwnedFd)>,
    /// The version 2 directory, to be born into.
    v2: Option<OwnedFd>,
}

impl Group {
    fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            cpu_before: Duration::ZERO,
            v1: Vec::new(),
            v2: None,
        }
    }

    /// The version 2 group, for `CLONE_INTO_CGROUP`.
    pub(crate) fn v2(&self) -> Option<BorrowedFd<'_>> {
        self.v2.as_ref().map(AsFd::as_fd)
    }

    /// Puts the calling, single-threaded process in. Writing `0` to `tasks` from inside has a flat cost; writing a pid to
    /// `cgroup.procs` from outside waits for a grace period now and then (p95 6.7 ms instead of 1.2).
    pub(crate) fn enter(&self) -> io::Result<()> {
        for (_, tasks) in &self.v1 {
            rustix::io::write(tasks, b"0")?;
        }
        Ok(())
    }
}

impl Cgroups {
    /// Makes a group in each hierarchy, or none.
    pub(crate) fn make(&self, name: &str) -> io::Result<Group> {
        let mut group = Group::named(name);
        for hierarchy in &self.hierarchies {
            let made = hierarchy
                .make(&mut group)
                .and_then(|()| self.limit_disks(hierarchy, &group));
            if let Err(error) = made {
                let _ = self.remove(name);
                return Err(error);
            }
        }
        Ok(group)
    }

    /// Of the group last made in a hierarchy.
    fn limit_disks(&self, hierarchy: &Hierarchy, group: &Group) -> io::Result<()> {
        let dir = if hierarchy.v2 {
            group.v2.as_ref()
        } else {
            group.v1.last().map(|(dir, _)| dir)
        };
        match (&self.disks, dir) {
            (Some(disks), Some(dir)) if hierarchy.abilities.contains(&Ability::Disk) => {
                disks.limit(dir, hierarchy.v2)
            }
            _ => Ok(()),
        }
    }

    /// Opens a group that was made before.
    pub(crate) fn reopen(&self, name: &str) -> io::Result<Group> {
        let mut group = Group::named(name);
        for hierarchy in &self.hierarchies {
            hierarchy.open_group(&mut group)?;
        }
        Ok(group)
    }

    /// Removes a group that holds no process any more. One that is gone already is no error.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        let mut result = Ok(());
        for hierarchy in &self.hierarchies {
            match rustix::fs::unlinkat(&hierarchy.parent, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => result = Err(error.into()),
            }
        }
        result
    }

    /// Removes the group of a box that has ended, and the common parents if nothing else is in them.
    pub fn remove_last(&self, name: &str) {
        for _ in 0..REMOVALS {
            if self.remove(name).is_ok() {
                break;
            }
            // The kernel lets go of the last process of a group shortly after that has ended.
            std::thread::sleep(Duration::from_millis(1));
        }
        self.close();
    }

    /// Sets the limits of a group, whatever they were before.
    pub(crate) fn limit(&self, group: &Group, limits: &Limits) -> io::Result<()> {
        let mut v1 = group.v1.iter();
        for hierarchy in &self.hierarchies {
            let dir = if hierarchy.v2 {
                group.v2.as_ref()
            } else {
                v1.next().map(|(dir, _)| dir)
            };
            let Some(dir) = dir else { continue };
            for ability in &hierarchy.abilities {
                match (ability, hierarchy.v2) {
                    (Ability::Cpu, false) => cpu_v1(dir, limits.cpus)?,
                    (Ability::Cpu, true) => write(
                        dir,
                        "cpu.max",
                        &format!("{} {PERIOD_US}", quota(limits.cpus, "max")),
                    )?,
                    (Ability::Memory, false) => memory_v1(dir, limits.memory)?,
                    (Ability::Memory, true) => memory_v2(dir, limits.memory)?,
                    (Ability::Pids, _) => {
                        let pids = limits.pids.map(|pids| pids.saturating_add(AGENT_TASKS));
                        write(dir, "pids.max", &or(pids, "max"))?;
                    }
                    (Ability::CpuUsage | Ability::Freeze | Ability::Disk, _) => {}
                }
            }
        }
        Ok(())
    }

    /// Makes an emptied group as good as new, or says that it cannot be: a box that ran into a limit leaves counters that
    /// nothing resets, and what it left in memory stays charged.
    pub(crate) fn reset(&self, group: &Group) -> bool {
        // Its last box may have been killed while frozen; the next would be born frozen.
        if self
            .freeze(&group.name, false)
            .is_err_and(|error| error.kind() != io::ErrorKind::Unsupported)
        {
            return false;
        }
        let mut v1 = group.v1.iter();
        for hierarchy in &self.hierarchies {
            if hierarchy.v2 {
                continue;
            }
            let Some((dir, _)) = v1.next() else {
                return false;
            };
            let clean = hierarchy.abilities.iter().all(|ability| match ability {
                Ability::Memory => {
                    let killed = read(dir, "memory.oom_control")
                        .is_ok_and(|text| !text.contains("oom_kill 0"));
                    // Connections may outlive whoever made them.
                    let sockets = read(dir, "memory.kmem.tcp.usage_in_bytes")
                        .is_ok_and(|used| used.trim() != "0");
                    !killed
                        && !sockets
                        && write(dir, "memory.max_usage_in_bytes", "0").is_ok()
                        && write(dir, "memory.failcnt", "0").is_ok()
                        && read(dir, "memory.usage_in_bytes").is_ok_and(|used| {
                            used.trim().parse().unwrap_or(u64::MAX) < REUSABLE_CHARGE_MAX
                        })
                }
                Ability::Pids => read(dir, "pids.events").is_ok_and(|text| text.contains("max 0")),
                Ability::CpuUsage => write(dir, "cpuacct.usage", "0").is_ok(),
                _ => true,
            });
            if !clean {
                return false;
            }
        }
        true
    }
}

/// Memory an emptied group may still be charged for, mostly pages of files, and be used again.
const REUSABLE_CHARGE_MAX: u64 = 1 << 20;

impl Hierarchy {
    fn make(&self, group: &mut Group) -> io::Result<()> {
        rustix::fs::mkdirat(&self.parent, group.name.as_str(), Mode::from(0o755))?;
        self.open_group(group)
    }

    fn open_group(&self, group: &mut Group) -> io::Result<()> {
        let dir = open_dir(&self.parent, &group.name)?;
        if self.v2 {
            group.v2 = Some(dir);
        } else {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let tasks = rustix::fs::openat(&dir, "tasks", flags, Mode::empty())?;
            group.v1.push((dir, tasks));
        }
        Ok(())
    }
}

fn or(value: Option<u64>, none: &str) -> String {
    value.map_or_else(|| none.to_owned(), |value| value.to_string())
}

fn quota(cpus: Option<f64>, none: &str) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "within 0.01 and 1024 processors"
    )]
    let quota = |cpus: f64| ((cpus * PERIOD_US as f64) as u64).max(1000);
    or(cpus.map(quota), none)
}

fn cpu_v1(dir: &OwnedFd, cpus: Option<f64>) -> io::Result<()> {
    write(dir, "cpu.cfs_quota_us", &quota(cpus, "-1"))
}

fn memory_v1(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    // Memory and swap together must never be below memory alone: EINVAL. So both are opened wide, then narrowed inside out.
    const WIDE: &str = "-1";
    let swap = |value: &str| match write(dir, "memory.memsw.limit_in_bytes", value) {
        // Kernels without swap accounting do not have the file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    swap(WIDE)?;
    sockets_v1(dir, limit)?;
    let limit = or(limit, WIDE);
    write(dir, "memory.limit_in_bytes", &limit)?;
    swap(&limit)
}

/// What waits in sockets of IPv4 and IPv6 is no part of version 1's limit, whichever protocol it is of, and not counted at all until
/// this is written. It is another quarter of the limit. Version 2 counts it as memory.
fn sockets_v1(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    let limit = or(limit.map(|limit| limit / 4), "-1");
    match write(dir, "memory.kmem.tcp.limit_in_bytes", &limit) {
        // Kernels without sockets' memory in groups do not have the file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn memory_v2(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    write(dir, "memory.max", &or(limit, "max"))?;
    // The limit is for both; version 2 counts swap by itself, so a limited box gets none.
    match write(
        dir,
        "memory.swap.max",
        if limit.is_some() { "0" } else { "max" },
    ) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
