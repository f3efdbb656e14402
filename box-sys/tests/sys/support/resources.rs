//! Counts the resources of a fork server and its boxes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Directories of the cgroup hierarchies.
const HIERARCHIES: [&str; 8] = [
    "memory",
    "cpu",
    "cpu,cpuacct",
    "cpuacct",
    "pids",
    "freezer",
    "unified",
    "",
];

/// The cgroups below a parent, in all hierarchies.
pub(crate) fn groups(parent: &str) -> BTreeSet<String> {
    let dirs = HIERARCHIES.map(|hierarchy| format!("/sys/fs/cgroup/{hierarchy}/{parent}"));
    let entries = dirs
        .iter()
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flatten()
        .flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .collect()
}

/// Whether a parent exists in any hierarchy.
pub(crate) fn parent_exists(parent: &str) -> bool {
    HIERARCHIES
        .iter()
        .any(|hierarchy| Path::new(&format!("/sys/fs/cgroup/{hierarchy}/{parent}")).exists())
}

/// The processes in the cgroups below a parent.
pub(crate) fn members(parent: &str) -> BTreeSet<i32> {
    let lists = groups(parent)
        .into_iter()
        .filter_map(|group| fs::read_to_string(format!("{group}/cgroup.procs")).ok());
    lists
        .flat_map(|list| {
            list.lines()
                .filter_map(|line| line.parse().ok())
                .collect::<Vec<i32>>()
        })
        .collect()
}

/// The children of a process. Empty if it has ended.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// Whether a process exists, zombies included.
pub(crate) fn exists(pid: impl std::fmt::Display) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap()
}

/// Whether a process exists and has not ended.
///
/// The test does not control when orphans are reaped.
pub(crate) fn is_running(pid: impl std::fmt::Display) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    // The main thread may have ended before the others.
    let threads = state
        .split(' ')
        .nth(17)
        .map_or(0, |threads| threads.parse().unwrap());
    !state.is_empty() && (!state.starts_with(['Z', 'X']) || threads > 1)
}

/// Targets of a process's open descriptors, with their number.
///
/// The ids of sockets and namespaces are removed. Cgroups are left out, because the size of their
/// pool varies.
pub(crate) fn descriptors(pid: u32) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        // The descriptor of this listing.
        if target.contains("box-test-") || target.ends_with("/fd") {
            continue;
        }
        let kind = target
            .split_once(":[")
            .map_or(target.as_str(), |(kind, _)| kind);
        *count.entry(kind.to_owned()).or_insert(0) += 1;
    }
    count
}

/// Number of namespaces of each type that a server and its boxes use.
///
/// The namespaces of this process are not counted.
pub(crate) fn namespaces(server: u32) -> BTreeMap<String, usize> {
    let links = |dir: String| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|link| link.to_string_lossy().into_owned())
            .filter(|link| link.contains(":[") && !link.starts_with("socket"))
            .collect::<BTreeSet<String>>()
    };
    let mut all = links(format!("/proc/{server}/fd"));
    all.append(&mut links(format!("/proc/{}/fd", std::process::id())));
    for pid in children(server).into_iter().chain([server]) {
        all.append(&mut links(format!("/proc/{pid}/ns")));
    }
    let own = links("/proc/self/ns".into());
    let mut count = BTreeMap::new();
    for link in all.difference(&own) {
        let kind = link.split_once(":[").unwrap().0;
        if kind != "pipe" {
            *count.entry(kind.to_owned()).or_insert(0) += 1;
        }
    }
    count
}

/// All files in a server's root without procfs, and the number of its mounts.
///
/// A mount or file that a box left behind would appear here.
pub(crate) fn root_of(server: u32) -> (BTreeSet<String>, usize) {
    fn walk(dir: &Path, depth: usize, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            found.insert(entry.path().to_string_lossy().into_owned());
            let below = depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir());
            if below && entry.file_name() != "proc" {
                walk(&entry.path(), depth - 1, found);
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(Path::new(&format!("/proc/{server}/root/")), 2, &mut found);
    let mounts = fs::read_to_string(format!("/proc/{server}/mountinfo")).unwrap();
    (found, mounts.lines().count())
}
