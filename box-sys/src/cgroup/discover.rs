//! Finds the directories in which this process can create cgroups.
//!
//! For root it is the top of each hierarchy, as for container engines. For other users it is a
//! cgroup that was delegated to them.
//!
//! Version 2 enforces no limits below a cgroup that contains processes. An ordinary user's boxes
//! therefore go into the topmost delegated cgroup without processes; with systemd it is the one of
//! the user's service manager. A cgroup with processes of this program only also qualifies, because
//! they can move down (a service with `Delegate=yes`).

use std::fs;
use std::os::fd::OwnedFd;

use rustix::fs::{Access, AtFlags, Mode};

use super::{CgroupFeature, open_dir, read, write};

/// Cgroup to which the processes of this program move, to empty their parent.
const HOST_GROUP: &str = "box-host";

/// A mounted cgroup hierarchy.
#[derive(Debug, Clone)]
pub(super) struct Mounted {
    pub(super) v2: bool,
    /// Directory in which this process can create cgroups.
    pub(super) path: String,
    pub(super) controllers: Vec<String>,
}

impl Mounted {
    pub(super) fn abilities(&self) -> Vec<CgroupFeature> {
        let mut abilities = Vec::new();
        for controller in &self.controllers {
            match controller.as_str() {
                "cpu" => abilities.push(CgroupFeature::Cpu),
                "memory" => abilities.push(CgroupFeature::Memory),
                "pids" => abilities.push(CgroupFeature::Pids),
                "cpuacct" => abilities.push(CgroupFeature::CpuUsage),
                "freezer" => abilities.push(CgroupFeature::Freeze),
                "blkio" | "io" => abilities.push(CgroupFeature::Disk),
                _ => {}
            }
        }
        if self.v2 {
            abilities.extend([CgroupFeature::CpuUsage, CgroupFeature::Freeze]);
        }
        abilities
    }
}

/// The mounted cgroup hierarchies, with the directory for `parent` in each.
///
/// With `settle`, the caller will create cgroups there, and this program may move to another
/// cgroup.
pub(super) fn mounted(parent: &str, settle: bool) -> Vec<Mounted> {
    let Ok(table) = fs::read_to_string("/proc/self/mountinfo") else {
        return Vec::new();
    };
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let root = rustix::process::geteuid().is_root();
    let own = (!root).then_some(own);
    let mut found: Vec<Mounted> = table
        .lines()
        .filter_map(|line| parse_mount(line, own.as_deref()))
        .collect();
    let usable = |group: &OwnedFd| {
        is_delegated(group)
            && if settle {
                vacate(group)
            } else {
                open_dir(group, parent).is_ok()
            }
    };
    for mount in found.iter_mut().filter(|mount| !root && mount.v2) {
        let own = &mount.path;
        let ends = own.match_indices('/').map(|(at, _)| at).skip(1);
        let mut upper = ends.chain([own.len()]).map(|end| &own[..end]);
        let given =
            upper.find(|path| open_dir(rustix::fs::CWD, path).is_ok_and(|group| usable(&group)));
        if let Some(given) = given {
            mount.path = given.to_owned();
        }
    }
    found
}

/// Whether this user can create cgroups here and move its processes between them.
fn is_delegated(group: &OwnedFd) -> bool {
    let may = |name, access| rustix::fs::accessat(group, name, access, AtFlags::EACCESS).is_ok();
    may(".", Access::WRITE_OK | Access::EXEC_OK)
        && may("cgroup.procs", Access::WRITE_OK)
        && may("cgroup.subtree_control", Access::WRITE_OK)
}

/// Moves the processes of this program out of a cgroup.
///
/// Returns whether it is empty then.
fn vacate(group: &OwnedFd) -> bool {
    let Ok(there) = read(group, "cgroup.procs") else {
        return false;
    };
    let pids = || there.lines().map(str::parse::<u32>);
    if !pids().all(|pid| pid.is_ok_and(is_this_program)) {
        return false;
    }
    if there.is_empty() {
        return true;
    }
    let _ = rustix::fs::mkdirat(group, HOST_GROUP, Mode::from(0o755));
    let Ok(host) = open_dir(group, HOST_GROUP) else {
        return false;
    };
    there
        .lines()
        .all(|pid| write(&host, "cgroup.procs", pid).is_ok())
}

/// Whether a process runs the same executable as this one.
///
/// Box does not move other processes.
fn is_this_program(pid: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let program = |of: &str| fs::metadata(format!("/proc/{of}/exe")).map(|m| (m.dev(), m.ino()));
    let (this, other) = (program("self"), program(&pid.to_string()));
    this.is_ok_and(|this| other.is_ok_and(|other| this == other))
}

fn parse_mount(line: &str, own: Option<&str>) -> Option<Mounted> {
    let (left, right) = line.split_once(" - ")?;
    let path = left.split(' ').nth(4)?;
    let mut right = right.split(' ');
    let kind = right.next()?;
    let options = right.nth(1)?;
    let v2 = match kind {
        "cgroup" => false,
        "cgroup2" => true,
        _ => return None,
    };
    let controllers: Vec<String> = if v2 {
        Vec::new()
    } else {
        options.split(',').map(str::to_owned).collect()
    };
    let below = match own {
        None => String::new(),
        Some(own) => own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (names, path) = rest.split_once(':')?;
            let same = if v2 {
                names.is_empty()
            } else {
                names
                    .split(',')
                    .any(|name| controllers.iter().any(|c| c == name))
            };
            same.then(|| path.trim_end_matches('/').to_owned())
        })?,
    };
    Some(Mounted {
        v2,
        path: format!("{path}{below}"),
        controllers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str =
        "36 31 0:33 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory";
    const V2: &str = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate";
    const OWN: &str = "4:memory:/a/b\n1:name=systemd:/\n0::/user.slice/x.scope\n";

    #[test]
    fn mounts_of_both_versions_are_found() {
        let v1 = parse_mount(V1, None).unwrap();
        assert_eq!((v1.v2, v1.path.as_str()), (false, "/sys/fs/cgroup/memory"));
        assert_eq!(v1.abilities(), [CgroupFeature::Memory]);
        let v2 = parse_mount(V2, None).unwrap();
        assert!(v2.v2);
        assert!(parse_mount("22 27 0:21 / /proc rw - proc proc rw", None).is_none());
    }

    #[test]
    fn an_ordinary_user_starts_at_the_cgroup_of_its_process() {
        assert_eq!(
            parse_mount(V1, Some(OWN)).unwrap().path,
            "/sys/fs/cgroup/memory/a/b"
        );
        assert_eq!(
            parse_mount(V2, Some(OWN)).unwrap().path,
            "/sys/fs/cgroup/user.slice/x.scope"
        );
    }
}
