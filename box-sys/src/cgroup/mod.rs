//! Control groups, version 1, version 2 and both at once, behind one set of verbs.
//!
//! On hybrid machines the limits are version 1's, while version 2 is mounted beside without them. Its group is used all
//! the same: it needs no controller to freeze and to count processor time, and a process is born into it.
//!
//! `cgroup.kill` is not used. A box ends completely with its first process; and a group that was once killed that way
//! kills whatever is cloned into it ever after: the kernel compares its count of kills with that of the cloner's own group.
//!
//! All servers of a machine share one parent in each hierarchy, and the last one removes it. So each holds it by an empty group
//! of its own: making that fails in a parent that is being removed, and the kernel removes none that has a group in it.
//!
//! `find.rs` finds where groups can be made, `mod.rs` holds those places, `group.rs` makes, limits and removes a box's group, `disk.rs` limits its disks, `live.rs` asks and acts on one.

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

/// What a hierarchy is able to do for a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ability {
    /// Limit processor time.
    Cpu,
    /// Limit memory.
    Memory,
    /// Limit processes and threads.
    Pids,
    /// Count processor time.
    CpuUsage,
    /// Stop and continue everything.
    Freeze,
    /// Limit what disks are read and written with, where an operator asks for that.
    Disk,
}

impl Ability {
    /// The name under which it is reported as missing.
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

/// Everything a box would like to have, and at the end what only some operators ask for.
const ALL: [Ability; 6] = [
    Ability::Cpu,
    Ability::Memory,
    Ability::Pids,
    Ability::CpuUsage,
    Ability::Freeze,
    Ability::Disk,
];

/// One mounted hierarchy and what it does for us.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    v2: bool,
    abilities: Vec<Ability>,
    /// The directory all boxes' groups are made in.
    parent: OwnedFd,
    /// The directory that one is in.
    top: OwnedFd,
}

/// How often a parent may be removed by others between being made and being held. Each time somebody else came to an end, so
/// this is far more than will be needed; it keeps an odd file system from holding us for ever.
const TRIES: usize = 1000;

/// The hierarchies boxes are put into.
#[derive(Debug)]
pub struct Cgroups {
    pub(crate) hierarchies: Vec<Hierarchy>,
    parent: String,
    /// The name of the empty groups that hold the parents, if these are held.
    hold: Option<String>,
    /// What boxes have of disks, if that is limited.
    disks: Option<Disks>,
}

impl Cgroups {
    /// The groups below `parent` that a fork server of this machine made, to ask of and act on. Nothing is made: hierarchies in
    /// which there is no such parent are left out.
    pub fn open(parent: &str) -> Self {
        Self::find(parent, None, None)
    }

    /// Finds the hierarchies in which groups can be made below `parent`, makes that one where it is missing, and holds it until
    /// [`Cgroups::close`]. Hierarchies that cannot be written are left out, and the one for disks unless these are limited.
    pub(crate) fn hold(parent: &str, owner: &Owner, disk: Option<DiskLimits>) -> Self {
        Self::find(parent, Some(owner.new_group()), disk.map(Disks::find))
    }

    fn find(parent: &str, hold: Option<String>, disks: Option<Disks>) -> Self {
        let mut hierarchies = Vec::new();
        let mut wanted: Vec<Ability> = ALL.to_vec();
        // To whom only asks, what a server has limited is there.
        wanted.retain(|ability| *ability != Ability::Disk || disks.is_some() || hold.is_none());
        let mut found = discover::mounted(parent, hold.is_some());
        // Version 2 first: what it can do, version 1 need not.
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

    /// What no hierarchy of this machine does for this user.
    pub fn missing(&self) -> Vec<Ability> {
        let has = |ability: &Ability| {
            self.hierarchies
                .iter()
                .any(|h| h.abilities.contains(ability))
        };
        let wanted = |ability: &Ability| *ability != Ability::Disk || self.disks.is_some();
        ALL.into_iter()
            .filter(|ability| wanted(ability) && !has(ability))
            .collect()
    }

    /// The hierarchy with an ability.
    fn with(&self, ability: Ability) -> Option<&Hierarchy> {
        self.hierarchies
            .iter()
            .find(|h| h.abilities.contains(&ability))
    }

    /// Whether groups can be used again: version 2's controllers never forget what a group has used. Its count of processor
    /// time does not either, but that is one number to subtract.
    pub(crate) fn is_recyclable(&self) -> bool {
        !self.hierarchies.is_empty()
            && self
                .hierarchies
                .iter()
                .all(|h| !h.v2 || h.abilities.iter().all(|a| a.is_stateless()))
    }

    /// Lets go of the common parents, and removes those that nobody else holds and no box is in.
    pub fn close(&self) {
        for hierarchy in &self.hierarchies {
            if let Some(hold) = &self.hold {
                let _ = rustix::fs::unlinkat(&hierarchy.parent, hold.as_str(), AtFlags::REMOVEDIR);
            }
            let _ = rustix::fs::unlinkat(&hierarchy.top, self.parent.as_str(), AtFlags::REMOVEDIR);
        }
    }
}

impl Ability {
    fn is_stateless(self) -> bool {
        matches!(self, Self::Freeze | Self::CpuUsage | Self::Disk)
    }
}

impl Hierarchy {
    fn open(
        mount: &discover::Mounted,
        parent: &str,
        hold: Option<&str>,
        wanted: &[Ability],
    ) -> Option<Self> {
        let v1_unwanted = |ability: &Ability| !wanted.contains(ability);
        if !mount.v2 && mount.abilities().iter().all(v1_unwanted) {
            return None;
        }
        let top = open_dir(rustix::fs::CWD, &mount.path).ok()?;
        let parent = match hold {
            Some(hold) => held(&top, parent, hold)?,
            None => writable(&top, parent)?,
        };
        let mut abilities = mount.abilities();
        if mount.v2 {
            if hold.is_some() {
                // Where it cannot be, the limits are missing, and are reported so.
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

/// Opens the parent, if it is there and this user may change it.
fn writable(top: &OwnedFd, parent: &str) -> Option<OwnedFd> {
    use rustix::fs::Access;
    let dir = open_dir(top, parent).ok()?;
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::accessat(&dir, ".", wanted, AtFlags::EACCESS).ok()?;
    Some(dir)
}

/// Opens the parent, making it where it is missing, with the group `hold` in it. `None` where this user may not.
fn held(top: &OwnedFd, parent: &str, hold: &str) -> Option<OwnedFd> {
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
            // The last server but this one has removed it since.
            Err(Errno::NOENT | Errno::NODEV) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Lets the groups below have the controllers, one by one: a single refusal would void a joint request.
///
/// Not where processes are, except at the root, which has no type: the kernel would refuse memory there and grant the others,
/// and with those no process could be put into a group below any more (EOPNOTSUPP).
fn enable(group: &OwnedFd, wanted: &[Ability]) {
    let empty = read(group.as_fd(), "cgroup.procs").is_ok_and(|there| there.is_empty());
    if !empty && read(group.as_fd(), "cgroup.type").is_ok() {
        return;
    }
    let io = wanted.contains(&Ability::Disk).then_some("+io");
    for controller in ["+cpu", "+memory", "+pids"].into_iter().chain(io) {
        let _ = write(group.as_fd(), "cgroup.subtree_control", controller);
    }
}

fn open_dir(at: impl AsFd, path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

/// Reads a small file of a group.
pub(crate) fn read(at: impl AsFd, file: &str) -> io::Result<String> {
    let fd = rustix::fs::openat(at, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = String::new();
    io::Read::read_to_string(&mut fs::File::from(fd), &mut text)?;
    Ok(text)
}

/// Writes a small file of a group.
pub(crate) fn write(at: impl AsFd, file: &str, text: &str) -> io::Result<()> {
    let file = CString::new(file)?;
    let fd = rustix::fs::openat(at, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&fd, text.as_bytes())?;
    Ok(())
}
