//! The cgroup of a box: created early, limited on use, then removed or reused.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};

use super::{CgroupFeature, Cgroups, Hierarchy, open_dir, read, write};
use crate::plan::Limits;

/// Period of the CPU quota, the kernel's default.
const PERIOD_US: u64 = 100_000;

/// Number of attempts to remove a cgroup whose last process has just ended.
const REMOVALS: usize = 50;

/// Tasks above the guest's limit, for init, its threads and starting commands.
///
/// `RLIMIT_NPROC` limits the guest's processes as well, so the guest cannot use the reserve.
const AGENT_TASKS: u64 = 16;

/// Cgroups with one name, one in each hierarchy.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// CPU time that the cgroup counted for earlier boxes.
    pub(crate) cpu_before: Duration,
    /// Directory and writable `tasks` file, for each version 1 hierarchy.
    ///
    /// The kernel checks the permissions of the opener, so an unprivileged process can still move
    /// itself.
    v1: Vec<(OwnedFd, OwnedFd)>,
    /// Version 2 directory, into which the box is cloned.
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

    /// Version 2 directory, for `CLONE_INTO_CGROUP`.
    pub(crate) fn v2(&self) -> Option<BorrowedFd<'_>> {
        self.v2.as_ref().map(AsFd::as_fd)
    }

    /// Moves the calling, single-threaded process into the cgroup.
    ///
    /// Writing `0` to `tasks` has a constant cost. Writing a pid to `cgroup.procs` sometimes waits
    /// for an RCU grace period (p95 6.7 ms instead of 1.2 ms).
    pub(crate) fn enter(&self) -> io::Result<()> {
        for (_, tasks) in &self.v1 {
            rustix::io::write(tasks, b"0")?;
        }
        Ok(())
    }
}

impl Cgroups {
    /// Creates a cgroup in each hierarchy, or in none.
    pub(crate) fn create(&self, name: &str) -> io::Result<Group> {
        let mut group = Group::named(name);
        for hierarchy in &self.hierarchies {
            let made = hierarchy
                .create(&mut group)
                .and_then(|()| self.limit_disks(hierarchy, &group));
            if let Err(error) = made {
                let _ = self.remove(name);
                return Err(error);
            }
        }
        Ok(group)
    }

    /// Limits the disk bandwidth of the cgroup that was last created in a hierarchy.
    fn limit_disks(&self, hierarchy: &Hierarchy, group: &Group) -> io::Result<()> {
        let dir = if hierarchy.v2 {
            group.v2.as_ref()
        } else {
            group.v1.last().map(|(dir, _)| dir)
        };
        match (&self.disks, dir) {
            (Some(disks), Some(dir)) if hierarchy.abilities.contains(&CgroupFeature::Disk) => {
                disks.limit(dir, hierarchy.v2)
            }
            _ => Ok(()),
        }
    }

    /// Opens an existing cgroup.
    pub(crate) fn reopen(&self, name: &str) -> io::Result<Group> {
        let mut group = Group::named(name);
        for hierarchy in &self.hierarchies {
            hierarchy.open_group(&mut group)?;
        }
        Ok(group)
    }

    /// Removes an empty cgroup. A missing one is not an error.
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

    /// Removes the cgroup of an ended box, and the parents if they are empty.
    pub fn remove_last(&self, name: &str) {
        for _ in 0..REMOVALS {
            if self.remove(name).is_ok() {
                break;
            }
            // The kernel releases the last process of a cgroup shortly after its end.
            std::thread::sleep(Duration::from_millis(1));
        }
        self.close();
    }

    /// Sets all limits of a cgroup.
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
                    (CgroupFeature::Cpu, false) => cpu_v1(dir, limits.cpus)?,
                    (CgroupFeature::Cpu, true) => write(
                        dir,
                        "cpu.max",
                        &format!("{} {PERIOD_US}", quota(limits.cpus, "max")),
                    )?,
                    (CgroupFeature::Memory, false) => memory_v1(dir, limits.memory)?,
                    (CgroupFeature::Memory, true) => memory_v2(dir, limits.memory)?,
                    (CgroupFeature::Pids, _) => {
                        let pids = limits.pids.map(|pids| pids.saturating_add(AGENT_TASKS));
                        write(dir, "pids.max", &number_or(pids, "max"))?;
                    }
                    (CgroupFeature::CpuUsage | CgroupFeature::Freeze | CgroupFeature::Disk, _) => {}
                }
            }
        }
        Ok(())
    }

    /// Resets an empty cgroup for reuse. Returns `false` if it is not reusable.
    ///
    /// Some counters of a box that reached a limit cannot be reset, and its remaining page cache
    /// stays charged.
    pub(crate) fn reset(&self, group: &Group) -> bool {
        // The last box may have been killed while frozen, and the next one would start frozen.
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
                CgroupFeature::Memory => {
                    let killed = read(dir, "memory.oom_control")
                        .is_ok_and(|text| !text.contains("oom_kill 0"));
                    // Connections can outlive their processes.
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
                CgroupFeature::Pids => {
                    read(dir, "pids.events").is_ok_and(|text| text.contains("max 0"))
                }
                CgroupFeature::CpuUsage => write(dir, "cpuacct.usage", "0").is_ok(),
                _ => true,
            });
            if !clean {
                return false;
            }
        }
        true
    }
}

/// Largest memory charge of an empty cgroup that can be reused, mostly page cache.
const REUSABLE_CHARGE_MAX: u64 = 1 << 20;

impl Hierarchy {
    fn create(&self, group: &mut Group) -> io::Result<()> {
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

fn number_or(value: Option<u64>, none: &str) -> String {
    value.map_or_else(|| none.to_owned(), |value| value.to_string())
}

fn quota(cpus: Option<f64>, none: &str) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "within 0.01 and 1024 CPUs"
    )]
    let quota = |cpus: f64| ((cpus * PERIOD_US as f64) as u64).max(1000);
    number_or(cpus.map(quota), none)
}

fn cpu_v1(dir: &OwnedFd, cpus: Option<f64>) -> io::Result<()> {
    write(dir, "cpu.cfs_quota_us", &quota(cpus, "-1"))
}

fn memory_v1(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    // The limit of memory and swap must never be below the memory limit (EINVAL). Raise both, then
    // lower memory first.
    const WIDE: &str = "-1";
    let swap = |value: &str| match write(dir, "memory.memsw.limit_in_bytes", value) {
        // A kernel without swap accounting has no such file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    swap(WIDE)?;
    sockets_v1(dir, limit)?;
    let limit = number_or(limit, WIDE);
    write(dir, "memory.limit_in_bytes", &limit)?;
    swap(&limit)
}

/// Limits socket buffers, for version 1, to a quarter of the memory limit.
///
/// Version 1 does not count IPv4 and IPv6 socket buffers as memory, and counts them at all only
/// after this write. Version 2 counts them as memory.
fn sockets_v1(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    let limit = number_or(limit.map(|limit| limit / 4), "-1");
    match write(dir, "memory.kmem.tcp.limit_in_bytes", &limit) {
        // A kernel without accounting of socket memory has no such file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn memory_v2(dir: &OwnedFd, limit: Option<u64>) -> io::Result<()> {
    write(dir, "memory.max", &number_or(limit, "max"))?;
    // The limit covers memory and swap. Version 2 counts swap separately, so a limited box gets
    // none.
    match write(
        dir,
        "memory.swap.max",
        if limit.is_some() { "0" } else { "max" },
    ) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
