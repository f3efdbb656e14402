//! Control groups: version 1, version 2, and both together.
//!
//! On hybrid hosts version 1 has the controllers. Box uses the version 2 cgroup as well: it
//! freezes, measures CPU time, and a process can be cloned into it, all without controllers.
//!
//! Box does not use `cgroup.kill`. A box ends completely with its first process. A cgroup that was
//! killed also kills every process that is cloned into it later, because the kernel compares its
//! kill count with that of the cloning process's cgroup.
//!
//! All servers of a host share one parent in each hierarchy, and the last server removes it. Each
//! server holds the parent with an empty cgroup of its own. The kernel does not remove a parent
//! with a child, and creating the child fails if the parent is being removed.
//!
//! `discover.rs` finds where cgroups can be created, `group.rs` creates, limits and removes the
//! cgroup of a box, `disk.rs` limits its disks, `usage.rs` measures and freezes it.

mod discover;
mod disk;
mod group;
mod usage;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use serde::{Deserialize, Serialize};

pub use disk::DiskLimits;
use disk::Disks;
pub(crate) use group::Group;
pub use usage::Usage;
pub(crate) use usage::{OOM_KILLS, Owner, field_of, read_start_time, start_time};

/// A feature of a cgroup hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CgroupFeature {
    /// Limits CPU time.
    Cpu,
    /// Limits memory.
    Memory,
    /// Limits processes and threads.
    Pids,
    /// Measures CPU time.
    CpuUsage,
    /// Freezes and resumes processes.
    Freeze,
    /// Limits disk bandwidth, if the operator configures it.
    Disk,
}

impl CgroupFeature {
    /// Name of the feature in the list of missing primitives.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cgroup.cpu",
            Self::Memory => "cgroup.memory",
            Self::Pids => "cgroup.pids",
            Self::CpuUsage => "cgroup.cpu_usage",
            Self::Freeze => "cgroup.freeze",
            Self::Disk => "cgroup.io",
        }
    }
}

/// All features. The last one is optional.
const ALL: [CgroupFeature; 6] = [
    CgroupFeature::Cpu,
    CgroupFeature::Memory,
    CgroupFeature::Pids,
    CgroupFeature::CpuUsage,
    CgroupFeature::Freeze,
    CgroupFeature::Disk,
];

/// A mounted hierarchy and its features.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    v2: bool,
    abilities: Vec<CgroupFeature>,
    /// Parent directory of all boxes' cgroups.
    parent: OwnedFd,
    /// Directory that contains `parent`.
    top: OwnedFd,
}

/// Number of attempts to hold a parent that other servers remove.
///
/// Every failure means that another server has just exited. The limit only prevents an endless loop
/// on an unusual file system.
const TRIES: usize = 1000;

/// The hierarchies that boxes use.
#[derive(Debug)]
pub struct Cgroups {
    pub(crate) hierarchies: Vec<Hierarchy>,
    parent: String,
    /// Name of the empty cgroups that hold the parents, if held.
    hold: Option<String>,
    /// Disk limits of boxes, if any.
    disks: Option<Disks>,
}

impl Cgroups {
    /// Opens the cgroups of fork servers below `parent`, to read and control them.
    ///
    /// Creates nothing. Skips hierarchies without this parent.
    pub fn open(parent: &str) -> Self {
        Self::find(parent, None, None)
    }

    /// Creates `parent` where it is missing and holds it until [`Cgroups::close`].
    ///
    /// Skips hierarchies that this user cannot write, and the disk hierarchy without a disk limit.
    pub(crate) fn hold(parent: &str, owner: &Owner, disk: Option<DiskLimits>) -> Self {
        Self::find(parent, Some(owner.new_group()), disk.map(Disks::find))
    }

    fn find(parent: &str, hold: Option<String>, disks: Option<Disks>) -> Self {
        let mut hierarchies = Vec::new();
        let mut wanted: Vec<CgroupFeature> = ALL.to_vec();
        // A client that only reads uses the features that a server has enabled.
        wanted
            .retain(|ability| *ability != CgroupFeature::Disk || disks.is_some() || hold.is_none());
        let mut found = discover::mounted(parent, hold.is_some());
        // Version 2 first: version 1 only provides what version 2 lacks.
        found.sort_by_key(|mount| !mount.v2);
        for mount in found {
            let Some(hierarchy) = Hierarchy::open(&mount, parent, hold.as_deref(), &wanted) else {
                continue;
            };
            wanted.retain(|ability| !hierarchy.abilities.contains(ability));
            hierarchies.push(hierarchy);
        }
        Self {
            hierarchies,
            parent: parent.into(),
            hold,
            disks,
        }
    }

    /// Features that no hierarchy offers this user.
    pub fn missing(&self) -> Vec<CgroupFeature> {
        let has = |ability: &CgroupFeature| {
            self.hierarchies
                .iter()
                .any(|h| h.abilities.contains(ability))
        };
        let wanted =
            |ability: &CgroupFeature| *ability != CgroupFeature::Disk || self.disks.is_some();
        ALL.into_iter()
            .filter(|ability| wanted(ability) && !has(ability))
            .collect()
    }

    /// The hierarchy with a feature.
    fn with(&self, ability: CgroupFeature) -> Option<&Hierarchy> {
        self.hierarchies
            .iter()
            .find(|h| h.abilities.contains(&ability))
    }

    /// Whether cgroups can be reused.
    ///
    /// Version 2 controllers cannot reset their counters. Its CPU time cannot be reset either, but
    /// the server subtracts it.
    pub(crate) fn is_recyclable(&self) -> bool {
        !self.hierarchies.is_empty()
            && self
                .hierarchies
                .iter()
                .all(|h| !h.v2 || h.abilities.iter().all(|a| a.is_stateless()))
    }

    /// Releases the parents, and removes those without other holders and boxes.
    pub fn close(&self) {
        for hierarchy in &self.hierarchies {
            if let Some(hold) = &self.hold {
                let _ = rustix::fs::unlinkat(&hierarchy.parent, hold.as_str(), AtFlags::REMOVEDIR);
            }
            let _ = rustix::fs::unlinkat(&hierarchy.top, self.parent.as_str(), AtFlags::REMOVEDIR);
        }
    }
}

impl CgroupFeature {
    fn is_stateless(self) -> bool {
        matches!(self, Self::Freeze | Self::CpuUsage | Self::Disk)
    }
}

impl Hierarchy {
    fn open(
        mount: &discover::Mounted,
        parent: &str,
        hold: Option<&str>,
        wanted: &[CgroupFeature],
    ) -> Option<Self> {
        let v1_unwanted = |ability: &CgroupFeature| !wanted.contains(ability);
        if !mount.v2 && mount.abilities().iter().all(v1_unwanted) {
            return None;
        }
        let top = open_dir(rustix::fs::CWD, &mount.path).ok()?;
        let parent = match hold {
            Some(hold) => open_held(&top, parent, hold)?,
            None => open_writable(&top, parent)?,
        };
        let mut abilities = mount.abilities();
        if mount.v2 {
            if hold.is_some() {
                // If this fails, the limits are missing, and the server reports them as missing.
                enable(&top, wanted);
                enable(&parent, wanted);
            }
            let given = read(parent.as_fd(), "cgroup.subtree_control").unwrap_or_default();
            let mut mount = mount.clone();
            mount.controllers = given.split_whitespace().map(str::to_owned).collect();
            abilities = mount.abilities();
        }
        abilities.retain(|ability| wanted.contains(ability));
        Some(Self {
            v2: mount.v2,
            abilities,
            parent,
            top,
        })
    }
}

/// Opens the parent if it exists and this user can write to it.
fn open_writable(top: &OwnedFd, parent: &str) -> Option<OwnedFd> {
    use rustix::fs::Access;
    let dir = open_dir(top, parent).ok()?;
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::accessat(&dir, ".", wanted, AtFlags::EACCESS).ok()?;
    Some(dir)
}

/// Opens or creates the parent and creates the group `hold` in it.
///
/// Returns `None` if this user lacks the permission.
fn open_held(top: &OwnedFd, parent: &str, hold: &str) -> Option<OwnedFd> {
    use rustix::io::Errno;
    for _ in 0..TRIES {
        match rustix::fs::mkdirat(top, parent, Mode::from(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(_) => return None,
        }
        let dir = match open_dir(top, parent) {
            Ok(dir) => dir,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => return None,
        };
        match rustix::fs::mkdirat(&dir, hold, Mode::from(0o755)) {
            Ok(()) => return Some(dir),
            // Another server has removed the parent.
            Err(Errno::NOENT | Errno::NODEV) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Enables the controllers for child cgroups, one by one.
///
/// A single failure would void a joint request. A cgroup with processes is skipped, except the
/// root, which has no type. There the kernel would refuse memory and grant the others, and then
/// refuse processes in child cgroups (EOPNOTSUPP).
fn enable(group: &OwnedFd, wanted: &[CgroupFeature]) {
    let empty = read(group.as_fd(), "cgroup.procs").is_ok_and(|there| there.is_empty());
    if !empty && read(group.as_fd(), "cgroup.type").is_ok() {
        return;
    }
    let io = wanted.contains(&CgroupFeature::Disk).then_some("+io");
    for controller in ["+cpu", "+memory", "+pids"].into_iter().chain(io) {
        let _ = write(group.as_fd(), "cgroup.subtree_control", controller);
    }
}

fn open_dir(at: impl AsFd, path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

/// Reads a small file of a cgroup.
pub(crate) fn read(at: impl AsFd, file: &str) -> io::Result<String> {
    let fd = rustix::fs::openat(at, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = String::new();
    io::Read::read_to_string(&mut fs::File::from(fd), &mut text)?;
    Ok(text)
}

/// Writes a small file of a cgroup.
pub(crate) fn write(at: impl AsFd, file: &str, text: &str) -> io::Result<()> {
    let file = CString::new(file)?;
    let fd = rustix::fs::openat(at, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&fd, text.as_bytes())?;
    Ok(())
}
