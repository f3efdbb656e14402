//! Description of a box: plain data that the client sends to the fork server.

mod storage;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub use self::storage::{Caps, Layer, LayerKind, Scratch};

/// Longest host name that the kernel accepts.
const HOSTNAME_MAX: usize = 64;
/// Ids that no guest has: that of init beside a guest with id 0, and the marks of commands.
pub(crate) const RESERVED_IDS: std::ops::RangeInclusive<u32> = 60_999..=61_999;
/// Largest id of a guest.
const GUEST_MAX: u32 = 65_535;
/// Limit of layers in one plan.
pub const LAYERS_MAX: usize = 32;
/// Limit of mounts and of directories in one plan.
pub const MOUNTS_MAX: usize = 64;

/// Complete description of a box.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxPlan {
    /// Name of the box for operators on the host. Letters, digits and dashes.
    pub name: String,
    /// Host name inside the box.
    pub hostname: String,
    /// Content of the root directory.
    pub root: Root,
    /// Layers on top of the root, the topmost first.
    pub layers: Vec<Layer>,
    /// Whether the root is read-only.
    ///
    /// Otherwise writes go to `scratch`.
    pub read_only_root: bool,
    /// User that runs the commands.
    pub guest: Guest,
    /// Host directories mounted in the box. The workspace is the first one.
    pub mounts: Vec<Mount>,
    /// Writable directories to create for the guest, private to the box.
    pub dirs: Vec<PathBuf>,
    /// Storage of private files: `/tmp`, home, `dirs`, writes to the root.
    pub scratch: Scratch,
    /// Resource limits of the box.
    pub limits: Limits,
    /// Network of the box.
    pub network: Network,
    /// Whether Landlock restricts the commands, if the kernel has it.
    pub landlock: bool,
    /// Whether the box ends with the fork server. Otherwise it runs until it is killed.
    pub owned: bool,
}

impl Default for SandboxPlan {
    fn default() -> Self {
        Self {
            name: "box".into(),
            hostname: "box".into(),
            root: Root::Host,
            layers: Vec::new(),
            read_only_root: true,
            guest: Guest::default(),
            mounts: Vec::new(),
            dirs: Vec::new(),
            scratch: Scratch::default(),
            limits: Limits::default(),
            network: Network::default(),
            landlock: true,
            owned: true,
        }
    }
}

/// Content of a box's root directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// The host's system directories, read-only. No other directories of the host.
    Host,
    /// An unpacked image: a host directory with a complete root file system.
    ///
    /// Box never writes to it. The directory must not change while a box uses it.
    Image(PathBuf),
}

/// Network of a box. Every box has its own network namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// No interface is up.
    Down,
    /// Loopback only.
    #[default]
    Loopback,
    /// Loopback, and egress to sockets that the creator of the box holds.
    Egress,
}

/// User that runs the commands of a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// User name in `/etc/passwd`.
    pub name: String,
    /// Home directory, writable and private to the box.
    pub home: PathBuf,
    /// User id in the box.
    ///
    /// 0 requires an image. The guest then has no capability either, and init has another id.
    pub id: u32,
    /// Group id in the box.
    pub group: u32,
}

impl Guest {
    /// Why a guest cannot have this user or group id, if it cannot.
    pub fn id_problem(id: u32) -> Option<String> {
        if id > GUEST_MAX {
            return Some(format!("{id} is above {GUEST_MAX}; use a smaller id"));
        }
        let (first, last) = (RESERVED_IDS.start(), RESERVED_IDS.end());
        RESERVED_IDS
            .contains(&id)
            .then(|| format!("{id} is reserved, as all from {first} to {last}; use another id"))
    }
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            name: "box".into(),
            home: "/home/box".into(),
            id: 1000,
            group: 1000,
        }
    }
}

/// A host directory or file that is mounted in a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Source on the host.
    pub source: Source,
    /// Mount point in the box: absolute, without `..`.
    pub target: PathBuf,
    /// Whether the guest can write to it.
    pub writable: bool,
    /// Whether writes go to the private files of the box, and never to the source.
    ///
    /// For one writable directory of a box. Its changes are below its mount point in the private
    /// files, and become part of snapshots.
    #[serde(default)]
    pub overlay: bool,
}

/// Source of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// An absolute host path without symbolic links.
    Path(PathBuf),
    /// Index of a descriptor that the client sent along.
    ///
    /// The server reopens it by its path and checks that it is the same file. A path descriptor
    /// does not work in another mount namespace.
    Fd(usize),
    /// A volume with its own file system.
    Volume {
        /// Its file, an absolute host path without symbolic links ([`create_volume`](crate::create_volume)).
        ///
        /// The server mounts over its directory for a moment, in a namespace of its own.
        file: PathBuf,
        /// A directory of the volume, relative and without `..`. It is created for a writable mount.
        sub_path: Option<PathBuf>,
    },
}

/// Resource limits of a box. `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Number of CPUs; 0.5 is half a CPU.
    pub cpus: Option<f64>,
    /// Bytes of memory and swap.
    pub memory: Option<u64>,
    /// Processes and threads, init included.
    pub pids: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpus: Some(1.0),
            memory: Some(512 << 20),
            pids: Some(256),
        }
    }
}

impl SandboxPlan {
    /// Whether the root is an overlay. Otherwise it is the directory of the private files.
    pub(crate) fn has_overlay(&self) -> bool {
        !self.layers.is_empty() || matches!(self.root, Root::Image(_))
    }

    /// The mount whose changes go to the private files, if the box has one.
    pub(crate) fn overlay_mount(&self) -> Option<&Mount> {
        self.mounts.iter().find(|mount| mount.overlay)
    }

    /// Checks the plan before anything is created.
    pub fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        check_name("hostname", &self.hostname)?;
        check_name("guest.name", &self.guest.name)?;
        for (field, id) in [("id", self.guest.id), ("group", self.guest.group)] {
            if let Some(problem) = Guest::id_problem(id) {
                return Err(Error::Invalid(format!("guest.{field}: {problem}")));
            }
        }
        if self.guest.id == 0 && matches!(self.root, Root::Host) {
            return Err(Error::Invalid(
                "guest.id: 0 is for images only; use another id".into(),
            ));
        }
        if self.mounts.len() > MOUNTS_MAX || self.dirs.len() > MOUNTS_MAX {
            return Err(Error::Invalid(format!(
                "mounts: {}, dirs: {}; the limit is {MOUNTS_MAX} of each",
                self.mounts.len(),
                self.dirs.len()
            )));
        }
        if self.mounts.iter().filter(|mount| mount.overlay).count() > 1 {
            return Err(Error::Invalid("mounts: more than one overlay".into()));
        }
        if let Some(mount) = self.overlay_mount()
            && (!mount.writable || matches!(mount.source, Source::Volume { .. }))
        {
            return Err(Error::Invalid(
                "mounts: an overlay is a writable mount of a host directory".into(),
            ));
        }
        if self.layers.len() > LAYERS_MAX {
            return Err(Error::Invalid(format!(
                "layers: {}; the limit is {LAYERS_MAX}",
                self.layers.len()
            )));
        }
        self.scratch.validate()?;
        if self
            .limits
            .cpus
            .is_some_and(|cpus| !(0.01..=1024.0).contains(&cpus))
        {
            return Err(Error::Invalid(
                "limits.cpus: must be between 0.01 and 1024".into(),
            ));
        }
        if self.limits.memory.is_some_and(|memory| memory < 4 << 20) {
            return Err(Error::Invalid(
                "limits.memory: must be at least 4 MiB".into(),
            ));
        }
        if self.limits.pids.is_some_and(|pids| pids < 2) {
            return Err(Error::Invalid("limits.pids: must be at least 2".into()));
        }
        let targets = self.mounts.iter().map(|mount| &mount.target);
        for path in targets.chain(&self.dirs).chain([&self.guest.home]) {
            check_target(path)?;
        }
        // The path becomes a field of `/etc/passwd`.
        let home = self.guest.home.as_os_str().as_encoded_bytes();
        if home
            .iter()
            .any(|byte| *byte == b':' || byte.is_ascii_control())
        {
            return Err(Error::Invalid(
                "guest.home: must not contain colons or control characters".into(),
            ));
        }
        Ok(())
    }

    /// The innermost mount that contains a path.
    ///
    /// A mount does not contain its own target.
    pub(crate) fn mount_of(&self, path: &Path) -> Option<&Mount> {
        let over = |mount: &&Mount| path.starts_with(&mount.target) && path != mount.target;
        let depth = |mount: &&Mount| mount.target.components().count();
        self.mounts.iter().filter(over).max_by_key(depth)
    }
}

fn check_name(field: &str, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty()
        || name.len() > HOSTNAME_MAX
        || !name.chars().all(plain)
        || name.starts_with(['-', '.'])
    {
        return Err(Error::Invalid(format!(
            "{field}: must be 1 to {HOSTNAME_MAX} letters, digits, dashes"
        )));
    }
    Ok(())
}

/// Top-level directories that Box creates. No mount may replace them.
const RESERVED: &[&str] = &[
    "proc", "dev", "sys", "etc", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "run",
];

/// Longest path that the kernel accepts, without the final zero byte.
const TARGET_MAX: usize = 4095;

/// Checks a mount point or directory inside a box.
pub(crate) fn check_target(path: &std::path::Path) -> Result<()> {
    if path.as_os_str().len() > TARGET_MAX {
        return Err(Error::Invalid(format!(
            "target: path of {} bytes; the limit is {TARGET_MAX}",
            path.as_os_str().len()
        )));
    }
    let invalid = |why: &str| Err(Error::Invalid(format!("{}: {why}", path.display())));
    let mut components = path.components();
    if components.next() != Some(std::path::Component::RootDir) {
        return invalid("must be absolute");
    }
    let mut names = Vec::new();
    for component in components {
        let std::path::Component::Normal(name) = component else {
            return invalid("must not contain `..`");
        };
        names.push(name);
    }
    let Some(first) = names.first() else {
        return invalid("must not be the root");
    };
    if RESERVED.iter().any(|reserved| **first == **reserved) {
        return invalid("is reserved for Box");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::storage::{DISK_MAX, DISK_MIN};
    use super::*;

    #[test]
    fn the_default_plan_is_valid() {
        SandboxPlan::default().validate().unwrap();
    }

    #[test]
    fn reserved_targets_are_refused() {
        for bad in [
            "/",
            "proc",
            "/proc",
            "/proc/self/attr",
            "/dev/null",
            "/a/../etc",
            "/usr/bin",
            "/run/box",
        ] {
            assert!(check_target(bad.as_ref()).is_err(), "{bad}");
        }
        for good in [
            "/workspace",
            "/mnt/skills",
            "/home/user/y",
            "/opt/tool",
            "/tmp/data",
        ] {
            assert!(check_target(good.as_ref()).is_ok(), "{good}");
        }
    }

    #[test]
    fn long_targets_and_homes_with_colons_are_refused() {
        let long = |length: usize| format!("/{}", "a".repeat(length - 1));
        assert!(check_target(long(TARGET_MAX).as_ref()).is_ok());
        let refused = check_target(long(TARGET_MAX + 1).as_ref()).unwrap_err();
        assert!(refused.to_string().len() < 200, "{refused}");
        let at_home = |home: &str| {
            let mut plan = SandboxPlan::default();
            plan.guest.home = home.into();
            plan.validate()
        };
        assert!(at_home("/home/some body").is_ok());
        assert!(at_home("/home/x:/bin/false").is_err());
        assert!(at_home("/home/x\nroot::0:0::/:/bin/sh").is_err());
    }

    #[test]
    fn disks_have_plain_names_and_sizes_within_bounds() {
        let disk = |bytes, name: Option<&str>| {
            let caps = Caps {
                bytes,
                inodes: 1024,
            };
            let scratch = Scratch::FileSystem {
                caps,
                shm: Caps::default(),
                name: name.map(PathBuf::from),
            };
            let plan = SandboxPlan {
                scratch,
                ..SandboxPlan::default()
            };
            plan.validate()
        };
        assert!(disk(DISK_MIN, None).is_ok());
        assert!(disk(DISK_MAX, Some("box/disk")).is_ok());
        assert!(disk(DISK_MIN - 1, None).is_err());
        assert!(disk(DISK_MAX + 1, None).is_err());
        for name in ["", "/etc/disk", "../disk", "box/../../disk", "."] {
            assert!(disk(DISK_MIN, Some(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn limits_of_zero_are_refused() {
        let plan = |limits| {
            SandboxPlan {
                limits,
                ..SandboxPlan::default()
            }
            .validate()
        };
        let free = Limits {
            cpus: None,
            memory: None,
            pids: None,
        };
        assert!(plan(free).is_ok());
        assert!(
            plan(Limits {
                cpus: Some(f64::NAN),
                ..free
            })
            .is_err()
        );
        assert!(
            plan(Limits {
                memory: Some(0),
                ..free
            })
            .is_err()
        );
        assert!(
            plan(Limits {
                pids: Some(1),
                ..free
            })
            .is_err()
        );
    }
}
