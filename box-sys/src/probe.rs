//! What this machine gives to this user, and the names under which what is missing is reported.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cgroup::{Ability, Cgroups, DiskLimits, Owner};
use crate::server::overlays::can_overlay_system;
use crate::server::template_mounts::Template;
use crate::{landlock, network, raw, seccomp};

/// What a box is made of, as far as this machine has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Primitives {
    /// Whether boxes are made with root's powers: two user ids in a box, and workspaces with mapped owners.
    pub privileged: bool,
    /// Namespaces that cannot be made, by name.
    pub namespaces_missing: Vec<String>,
    /// Whether the kernel filters system calls.
    pub seccomp: bool,
    /// The version of Landlock; 0 is none.
    pub landlock: u32,
    /// Whether overlays can be made of the system directories and of everything that is mounted below them.
    pub overlay: bool,
    /// What control groups do not do here.
    pub cgroup_missing: Vec<Ability>,
    /// Whether boxes can have a network with exits, where that was tried.
    pub network: Option<bool>,
    /// Whether programs in them are told as usual why they cannot connect, where that was tried.
    pub syn_queue: Option<bool>,
}

/// Every kind of namespace a box has, with its bit.
const NAMESPACES: [(&str, libc::c_int); 7] = [
    ("user", libc::CLONE_NEWUSER),
    ("pid", libc::CLONE_NEWPID),
    ("mount", libc::CLONE_NEWNS),
    ("net", libc::CLONE_NEWNET),
    ("uts", libc::CLONE_NEWUTS),
    ("ipc", libc::CLONE_NEWIPC),
    ("cgroup", libc::CLONE_NEWCGROUP),
];

impl Primitives {
    /// Looks at the machine. Makes and removes an empty group in each cgroup hierarchy and starts a few processes that end at
    /// once; safe in a program with threads.
    pub fn probe() -> Self {
        let hold = |owner| Cgroups::hold("box", &owner, Some(DiskLimits::default()));
        let cgroups = Owner::this().map_or_else(|| Cgroups::open("box"), hold);
        let mut primitives = Self::with(&cgroups, privileged(1_000_000));
        let (network, syn_queue) = network::available(primitives.privileged);
        primitives.network = Some(network);
        primitives.syn_queue = Some(syn_queue);
        if primitives.overlay && primitives.missing_required().is_empty() {
            // As a server finds it, mounts below the system directories included.
            let privileged = primitives.privileged;
            let built =
                || Template::build(privileged, true).is_ok_and(|template| template.is_overlaid());
            primitives.overlay = raw::try_in_child(built);
        }
        cgroups.close();
        primitives
    }

    pub(crate) fn with(cgroups: &Cgroups, privileged: bool) -> Self {
        // Who is not root gets the others only together with a user namespace.
        let with_user = if privileged { 0 } else { libc::CLONE_NEWUSER };
        let absent = |bit: libc::c_int| raw::try_clone(bit | with_user).is_err();
        Self {
            privileged,
            namespaces_missing: NAMESPACES
                .iter()
                .filter(|(_, bit)| absent(*bit))
                .map(|(name, _)| (*name).into())
                .collect(),
            seccomp: seccomp::available(),
            landlock: landlock::abi(),
            overlay: raw::try_in_child(|| {
                raw::unshare(libc::CLONE_NEWNS | with_user).is_ok() && can_overlay_system()
            }),
            cgroup_missing: cgroups.missing(),
            network: None,
            syn_queue: None,
        }
    }

    /// What a box cannot be without and this machine does not have. Empty, or no box is made.
    pub fn missing_required(&self) -> Vec<String> {
        let mut missing: Vec<String> = self
            .namespaces_missing
            .iter()
            .map(|name| format!("namespace.{name}"))
            .collect();
        if !self.seccomp {
            missing.push("seccomp".into());
        }
        missing
    }

    /// What boxes of this machine go without, by name. A strict profile refuses them.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = self.missing_required();
        missing.extend(
            self.cgroup_missing
                .iter()
                .map(|ability| ability.name().to_owned()),
        );
        if self.landlock == 0 {
            missing.push("landlock".into());
        }
        if !self.overlay {
            missing.push("overlay".into());
        }
        if self.network == Some(false) {
            missing.push("network".into());
        }
        if self.syn_queue == Some(false) {
            missing.push("network.gate".into());
        }
        if !self.privileged {
            missing.push("two_uids".into());
        }
        missing
    }
}

impl fmt::Display for Primitives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = if self.privileged {
            "root"
        } else {
            "an ordinary user"
        };
        let missing = self.missing();
        let missing = if missing.is_empty() {
            "nothing".into()
        } else {
            missing.join(", ")
        };
        write!(
            f,
            "as {who}, landlock {}, missing: {missing}",
            self.landlock
        )
    }
}

/// Whether this process can map the 65,536 ids from `base` on and mount on the machine: root, and not one of a container
/// that has given up those powers.
pub(crate) fn privileged(base: u32) -> bool {
    use rustix::thread::CapabilitySet;
    let needed = CapabilitySet::SYS_ADMIN
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::CHOWN;
    let able = rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed));
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mapped = map.lines().any(|line| {
        let mut numbers = line
            .split_whitespace()
            .map(|n| n.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        matches!((first, count), (Some(first), Some(count))
            if first <= u64::from(base) && u64::from(base) + 65_536 <= first + count)
    });
    rustix::process::geteuid().is_root() && able && mapped
}
