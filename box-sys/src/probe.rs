//! Detects what this host offers this user, and names what is missing.

use std::fmt;

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupFeature, Cgroups, DiskLimits, Owner};
use crate::mounts::{attach, new_fs};
use crate::raw::{ATTR_NODEV, ATTR_NOSUID};
use crate::server::overlays::can_overlay_system;
use crate::server::template_mounts::Template;
use crate::{landlock, network, raw, seccomp};

/// What a box lacks if the files of its image belong to no id of the box.
pub(crate) const IMAGE_OWNERS: &str = "image.owners";

/// What a box lacks that cannot keep the changes of its workspace to itself.
pub const WORKSPACE: &str = "overlay.workspace";

/// Kernel features for boxes on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Primitives {
    /// Whether the server has root's privileges.
    ///
    /// Boxes then have two user ids, and workspaces have mapped owners.
    pub privileged: bool,
    /// Names of the namespaces that cannot be created.
    pub namespaces_missing: Vec<String>,
    /// Whether the kernel supports seccomp filters.
    pub seccomp: bool,
    /// Landlock version; 0 means none.
    pub landlock: u32,
    /// Whether overlays work for the system directories and all mounts below them.
    pub overlay: bool,
    /// Whether a workspace can be an overlay. `None` if not probed.
    pub overlay_workspace: Option<bool>,
    /// Cgroup features that are missing.
    pub cgroup_missing: Vec<CgroupFeature>,
    /// Whether boxes can have egress. `None` if not probed.
    pub network: Option<bool>,
    /// Whether failed connections in a box get the usual errors. `None` if not probed.
    pub syn_queue: Option<bool>,
}

/// Namespace types of a box, with their clone flags.
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
    /// Probes the host.
    ///
    /// Creates and removes an empty cgroup in each hierarchy and starts a few processes that exit
    /// at once. Safe in a program with threads.
    pub fn probe() -> Self {
        let hold = |owner| Cgroups::hold("box", &owner, Some(DiskLimits::default()));
        let cgroups = Owner::this().map_or_else(|| Cgroups::open("box"), hold);
        let mut primitives = Self::with(&cgroups, privileged(1_000_000));
        let (network, syn_queue) = network::available(primitives.privileged);
        primitives.network = Some(network);
        primitives.syn_queue = Some(syn_queue);
        if primitives.overlay && primitives.missing_required().is_empty() {
            // Probe again with the mounts below the system directories, as a server does.
            let privileged = primitives.privileged;
            let built =
                || Template::build(privileged, true).is_ok_and(|template| template.is_overlaid());
            primitives.overlay = raw::try_in_child(built);
        }
        if primitives.missing_required().is_empty() {
            let privileged = primitives.privileged;
            let overlaid = || {
                let template = Template::build(privileged, false);
                template.is_ok_and(|_| can_overlay_workspace(privileged).is_ok())
            };
            primitives.overlay_workspace = Some(raw::try_in_child(overlaid));
        }
        cgroups.close();
        primitives
    }

    pub(crate) fn with(cgroups: &Cgroups, privileged: bool) -> Self {
        // Without root, the kernel creates the other namespaces only together with a user
        // namespace.
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
            overlay_workspace: None,
            cgroup_missing: cgroups.missing(),
            network: None,
            syn_queue: None,
        }
    }

    /// Names of required primitives that this host lacks.
    ///
    /// No box is created unless it is empty.
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

    /// Names of all primitives that this host lacks.
    ///
    /// A strict profile refuses such boxes.
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
        if self.overlay_workspace == Some(false) {
            missing.push(WORKSPACE.into());
        }
        if self.network == Some(false) {
            missing.push("network".into());
        }
        if self.syn_queue == Some(false) {
            missing.push("network.connect_errors".into());
        }
        if !self.privileged {
            missing.push("two_uids".into());
        }
        missing
    }
}

/// Makes a writable overlay, in the mount namespace of a template.
fn can_overlay_workspace(privileged: bool) -> std::io::Result<()> {
    let files = new_fs("tmpfs", &[], ATTR_NOSUID | ATTR_NODEV)?;
    for name in ["upper", "work", "lower"] {
        rustix::fs::mkdirat(&files, name, Mode::RWXU)?;
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    attach(&files, rustix::fs::open("/s", flags, Mode::empty())?)?;
    let mut options = vec![
        ("upperdir", "/s/upper"),
        ("workdir", "/s/work"),
        ("lowerdir", "/s/lower"),
    ];
    if !privileged {
        options.push(("userxattr", ""));
    }
    new_fs("overlay", &options, ATTR_NOSUID | ATTR_NODEV).map(drop)
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

/// Whether this process can map 65,536 ids from `base` and can mount.
///
/// True for root, except in a container without these privileges.
pub(crate) fn privileged(base: u32) -> bool {
    use rustix::thread::CapabilitySet;
    let needed = CapabilitySet::SYS_ADMIN
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::CHOWN;
    let has_capabilities =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed));
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mapped = map.lines().any(|line| {
        let mut numbers = line
            .split_whitespace()
            .map(|n| n.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        matches!((first, count), (Some(first), Some(count))
            if first <= u64::from(base) && u64::from(base) + 65_536 <= first + count)
    });
    rustix::process::geteuid().is_root() && has_capabilities && mapped
}
