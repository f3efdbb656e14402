//! What a box shall be: plain data, sent to the fork server as it stands.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Longest host name the kernel takes.
const HOSTNAME_MAX: usize = 64;
/// Most mounts and directories a plan may name, so that one plan cannot keep the server busy.
pub const MOUNTS_MAX: usize = 64;

/// Everything that makes a box.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxPlan {
    /// The box's name, for people who look at the machine from outside. Letters, digits and dashes.
    pub name: String,
    /// The host name inside.
    pub hostname: String,
    /// What the root directory is made of.
    pub root: Root,
    /// Whether the root is read-only. If not, what is written to it is kept in memory, under [`Caps::bytes`].
    pub read_only_root: bool,
    /// Who the commands run as.
    pub guest: Guest,
    /// Host directories that appear inside; the workspace is the first of them.
    pub mounts: Vec<Mount>,
    /// Directories to make for the guest, writable and private to the box.
    pub dirs: Vec<PathBuf>,
    /// The cap of everything private to the box: `/tmp`, `/dev/shm`, home, `dirs` and what is written to the root.
    pub caps: Caps,
    /// What the box may use of the machine.
    pub limits: Limits,
    /// What the box's own network consists of.
    pub network: Network,
    /// Whether commands are put under Landlock where the kernel has it.
    pub landlock: bool,
    /// Whether the box dies with the fork server. Otherwise it lives until it is killed.
    pub owned: bool,
}

impl Default for SandboxPlan {
    fn default() -> Self {
        Self {
            name: "box".into(),
            hostname: "box".into(),
            root: Root::Host,
            read_only_root: true,
            guest: Guest::default(),
            mounts: Vec::new(),
            dirs: Vec::new(),
            caps: Caps::default(),
            limits: Limits::default(),
            network: Network::default(),
            landlock: true,
            owned: true,
        }
    }
}

/// What the root directory of a box is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// The machine's own system directories, read-only, and nothing else of it.
    Host,
    /// A directory of the host that holds a whole root file system. It is never written to.
    Directory(PathBuf),
}

/// What the network of a box consists of. It is its own in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Of nothing at all.
    Down,
    /// Of itself.
    #[default]
    Loopback,
    /// Of itself, and of exits: what would leave it arrives at sockets that whoever made the box is handed.
    Egress,
}

/// Who the commands of a box run as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// The name in `/etc/passwd`.
    pub name: String,
    /// The home directory, made writable and private to the box.
    pub home: PathBuf,
    /// The user and group id inside. Never 0: that one is init's.
    pub id: u32,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            name: "box".into(),
            home: "/home/box".into(),
            id: 1000,
        }
    }
}

/// A directory or file of the host that appears in a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where it comes from.
    pub source: Source,
    /// Where it appears: absolute, without `..`.
    pub target: PathBuf,
    /// Whether it may be written.
    pub writable: bool,
}

/// Where a mount comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// An absolute path of the host without symbolic links in it.
    Path(PathBuf),
    /// The descriptor at this place of those sent along. It is opened again by its name, and refused if that is now
    /// another file: a path descriptor does not work in another mount namespace.
    Fd(usize),
}

/// The cap of a box's private files, enforced by the kernel with `ENOSPC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    /// Bytes of all files together.
    pub bytes: u64,
    /// Files and directories together.
    pub inodes: u64,
}

impl Default for Caps {
    fn default() -> Self {
        Self {
            bytes: 512 << 20,
            inodes: 65_536,
        }
    }
}

/// What a box may use of the machine. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Processors, in parts: 0.5 is half of one.
    pub cpus: Option<f64>,
    /// Bytes of memory, swap included.
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
    /// Refuses what no box can be made of, before anything is made.
    pub fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        check_name("hostname", &self.hostname)?;
        check_name("guest.name", &self.guest.name)?;
        if self.guest.id == 0 || self.guest.id > 60_000 {
            return Err(Error::Invalid("guest.id must be within 1 and 60000".into()));
        }
        if self.mounts.len() > MOUNTS_MAX || self.dirs.len() > MOUNTS_MAX {
            return Err(Error::Invalid(format!(
                "at most {MOUNTS_MAX} mounts and {MOUNTS_MAX} dirs"
            )));
        }
        if self.caps.bytes == 0 || self.caps.inodes < 64 {
            return Err(Error::Invalid(
                "caps: at least 1 byte and 64 inodes (0 would mean no cap)".into(),
            ));
        }
        if self
            .limits
            .cpus
            .is_some_and(|cpus| !(0.01..=1024.0).contains(&cpus))
        {
            return Err(Error::Invalid(
                "limits.cpus must be within 0.01 and 1024".into(),
            ));
        }
        if self.limits.memory.is_some_and(|memory| memory < 4 << 20) {
            return Err(Error::Invalid(
                "limits.memory must be at least 4 MiB".into(),
            ));
        }
        if self.limits.pids.is_some_and(|pids| pids < 2) {
            return Err(Error::Invalid("limits.pids must be at least 2".into()));
        }
        let targets = self.mounts.iter().map(|mount| &mount.target);
        for path in targets.chain(&self.dirs).chain([&self.guest.home]) {
            check_target(path)?;
        }
        // It is a field of `/etc/passwd`.
        let home = self.guest.home.as_os_str().as_encoded_bytes();
        if home
            .iter()
            .any(|byte| *byte == b':' || byte.is_ascii_control())
        {
            return Err(Error::Invalid(
                "guest.home: no colons and no control characters".into(),
            ));
        }
        Ok(())
    }

    /// The innermost mount that a path is beneath, itself not counted.
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
            "{field}: 1 to {HOSTNAME_MAX} letters, digits, dashes"
        )));
    }
    Ok(())
}

/// Inside, these are made by Box and must stay what they are.
const RESERVED: &[&str] = &[
    "proc", "dev", "sys", "etc", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "run",
];

/// Longest path that the kernel takes, without the byte that ends it.
const TARGET_MAX: usize = 4095;

/// A place inside where something may be mounted.
pub(crate) fn check_target(path: &std::path::Path) -> Result<()> {
    if path.as_os_str().len() > TARGET_MAX {
        return Err(Error::Invalid(format!(
            "a place of more than {TARGET_MAX} bytes"
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
        return invalid("is made by Box itself");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_plan_is_valid() {
        SandboxPlan::default().validate().unwrap();
    }

    #[test]
    fn targets_that_replace_what_box_made_are_refused() {
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
    fn a_place_that_no_kernel_takes_and_a_home_of_more_fields_are_refused() {
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
    fn limits_of_nothing_are_refused() {
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
