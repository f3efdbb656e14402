//! The template: a mount namespace with the files that every box starts from.
//!
//! A box's mount namespace is a copy of it, and the box moves the mounts into place. The server
//! resolves no host path after its start. Copying a dozen mounts is cheap; copying all mounts of the
//! host would not be.
//!
//! ```text
//! /proc        the host's, unmasked: without root, the kernel requires a visible one to mount procfs
//! /t/…         the host's system directories
//! /p/…         files of the template: etc, dev, default identity files, an empty file and directory
//! /d/…         the host's devices, if the server cannot create device nodes
//! /r /s /o     empty: mount points for a box's root, private files and template files
//! /l/…         empty: mount points for a box's layers
//! /n           empty: the layer below every overlay
//! ```
//!
//! `overlays.rs` gives each box separate inodes of these files.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::UnmountFlags;

use super::etc;
use super::overlays::{self, SystemTree};
use crate::error::{At, Result};
use crate::identity;
use crate::mounts::{attach, clone_tree, create_dirs, create_file, new_fs, open_beneath};
use crate::own_root;
use crate::plan::{LAYERS_MAX, SandboxPlan};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID};

/// The host's system directories.
///
/// If one is a link (`/bin` to `usr/bin`), boxes get the link.
const SYSTEM: &[&str] = &["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// The six devices with their numbers.
///
/// The server refuses a node with another number.
const NODES: &[(&str, u32, u32)] = &[
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Files of procfs that reveal or control the host. Boxes get masks over them.
const MASKED: &[&str] = &[
    "acpi",
    "asound",
    "bootconfig",
    "cmdline",
    "config.gz",
    "diskstats",
    "interrupts",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "modules",
    "partitions",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
];

/// Directories of the template; see above.
const PLACES: &[&str] = &[
    "proc",
    "t",
    "p/etc",
    "p/dev/pts",
    "p/dev/shm",
    "p/empty",
    "p/who",
    "d",
    "r",
    "s",
    "o",
    "n",
];

/// The template: the namespaces and mounts from which the server creates boxes.
#[derive(Debug)]
pub(crate) struct Template {
    /// Whether the server has root's privileges on the host.
    pub(crate) privileged: bool,
    /// Mount namespace with the host's file systems, for mount sources.
    ///
    /// It follows later mounts.
    pub(crate) host_mounts: OwnedFd,
    /// Mount namespace of the template.
    pub(crate) mounts: OwnedFd,
    /// User namespace that owns the boxes' namespaces, except the user ones.
    pub(crate) user: OwnedFd,
    /// Network namespace of the server.
    pub(crate) net: OwnedFd,
    /// System directories that are links: name and target.
    pub(crate) links: Vec<(String, String)>,
    /// System directories below `/t`, parents first.
    pub(crate) trees: Vec<SystemTree>,
    /// Whether boxes get overlays of the template's own files.
    pub(crate) use_overlays: bool,
    /// Devices below `/d`, if the server cannot create device nodes.
    pub(crate) nodes: Vec<&'static str>,
    /// Masked files of procfs: name, and whether it is a directory.
    pub(crate) masks: Vec<(String, bool)>,
}

impl Template {
    /// Builds the template and moves this process into it.
    ///
    /// The host's mounts do not change: everything happens in namespaces that end with the server.
    pub(crate) fn build(privileged: bool, use_overlays: bool) -> Result<Self> {
        if privileged {
            raw::unshare(libc::CLONE_NEWNS).at("unshare the mount namespace")?;
        } else {
            become_own_root()?;
        }
        raw::set_propagation(true).at("make mounts follow the host's")?;
        let host_mounts = open_ns("mnt").at("open the mount namespace")?;
        let net = open_ns("net").at("open the network namespace")?;

        raw::unshare(libc::CLONE_NEWNS).at("unshare the second mount namespace")?;
        raw::set_propagation(false).at("make mounts private")?;
        let mut template = Self {
            privileged,
            host_mounts,
            mounts: open_ns("mnt").at("open the template's mount namespace")?,
            user: open_ns("user").at("open the user namespace")?,
            net,
            links: Vec::new(),
            trees: Vec::new(),
            use_overlays,
            nodes: Vec::new(),
            masks: masks(),
        };
        template.fill()?;
        Ok(template)
    }

    /// Whether boxes get overlays of all system directories and of all mounts in them.
    ///
    /// A file that is a mount cannot have an overlay.
    pub(crate) fn is_overlaid(&self) -> bool {
        self.use_overlays && self.trees.iter().all(|tree| tree.overlaid)
    }

    fn fill(&mut self) -> Result<()> {
        // All modes below are complete, so the caller's umask must not change them.
        rustix::process::umask(Mode::from(0o022));
        let root = new_fs(
            "tmpfs",
            &[("mode", "0755"), ("size", "64m")],
            ATTR_NOSUID | ATTR_NODEV,
        )
        .at("create a tmpfs")?;
        let proc = clone_tree(CWD, "/proc", true).at("clone the mount of procfs")?;
        let system = self.system()?;
        let made = self.privileged && create_nodes(&root).is_ok();
        let nodes = if made { Vec::new() } else { device_nodes()? };

        // Any directory can be the mount point. The clones above were taken before it is covered.
        let place = rustix::fs::open(
            "/usr",
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .at("open")?;
        attach(&root, &place).at("attach the server's root")?;
        for name in PLACES {
            create_dirs(root.as_fd(), Path::new(name)).at("create a directory")?;
        }
        for n in 0..=LAYERS_MAX {
            create_dirs(root.as_fd(), Path::new(&format!("l/{n}"))).at("create a directory")?;
        }
        etc::copy(&root)?;
        let default = SandboxPlan::default();
        let who = create_dirs(root.as_fd(), Path::new("p/who")).at("open")?;
        identity::write(&who, &default.guest, &default.hostname).at("write the identity files")?;
        self.assemble(&root, &proc, system, nodes)?;

        rustix::process::fchdir(&root).at("enter the server's root")?;
        rustix::process::pivot_root(".", ".").at("pivot the server's root")?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).at("leave the host's mounts")?;
        rustix::process::chdir("/").at("enter the server's root")?;
        self.trees.retain_mut(|tree| {
            tree.overlaid = tree.overlaid && overlays::can_overlay(&tree.name);
            // No box can see a mount that is covered or that this user cannot enter.
            tree.overlaid || SYSTEM.contains(&tree.name.as_str()) || overlays::can_copy(&tree.name)
        });
        Ok(())
    }

    /// Clones the mounts of the system directories, and lists the mounts below them.
    fn system(&mut self) -> Result<Vec<(String, OwnedFd)>> {
        let mut system = Vec::new();
        for name in SYSTEM {
            let path = Path::new("/").join(name);
            let Ok(meta) = fs::symlink_metadata(&path) else {
                continue;
            };
            if meta.is_symlink() {
                let target = fs::read_link(&path).at("read a link")?;
                self.links
                    .push(((*name).into(), target.to_string_lossy().into_owned()));
            } else if meta.is_dir() {
                // Recursive, because submounts are locked for an ordinary user (EINVAL).
                let tree = clone_tree(CWD, &path, true).at("clone a system directory's mount")?;
                raw::mount_setattr(tree.as_fd(), true, overlays::SYSTEM_ATTR, 0)
                    .at("make a system directory read-only")?;
                system.push(((*name).into(), tree));
                let mut names = vec![(*name).to_owned()];
                if self.use_overlays {
                    names.extend(overlays::mounts_below(&path).at("list mounts")?);
                }
                let overlaid = self.use_overlays;
                self.trees
                    .extend(names.into_iter().map(|name| SystemTree { name, overlaid }));
            }
        }
        Ok(system)
    }

    fn assemble(
        &mut self,
        root: &OwnedFd,
        proc: &OwnedFd,
        system: Vec<(String, OwnedFd)>,
        nodes: Vec<(&'static str, OwnedFd)>,
    ) -> Result<()> {
        let place = |path: &str| create_dirs(root.as_fd(), Path::new(path));
        attach(proc, place("proc").at("open")?).at("attach procfs")?;
        for (name, tree) in system {
            attach(tree, place(&format!("t/{name}")).at("create a directory")?)
                .at("attach a system directory")?;
        }
        let dev = place("p/dev").at("open")?;
        for (name, target) in [
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
            ("ptmx", "pts/ptmx"),
        ] {
            rustix::fs::symlinkat(target, &dev, name).at("create a link of /dev")?;
        }
        create_file(place("p").at("open")?, "nothing", b"").at("create an empty file")?;
        let places = place("d").at("open")?;
        for (name, tree) in nodes {
            for dir in [&dev, &places] {
                create_file(dir, name, b"").at("create a mount point for a device")?;
            }
            let place =
                open_beneath(&places, name, OFlags::PATH).at("open a device's mount point")?;
            attach(tree, place).at("attach a device")?;
            self.nodes.push(name);
        }
        Ok(())
    }
}

/// Without root: enters a user namespace in which this process is root.
///
/// It also unshares the network namespace. Leaving a network namespace requires privileges over it,
/// and the server enters new ones.
fn become_own_root() -> Result<()> {
    own_root::enter(libc::CLONE_NEWNS | libc::CLONE_NEWNET)
}

/// Opens a namespace of this process.
pub(crate) fn open_ns(kind: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(
        format!("/proc/self/ns/{kind}"),
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Creates device nodes, so that boxes get no inodes of the host.
///
/// Fails if the server lacks the privilege.
fn create_nodes(root: &OwnedFd) -> io::Result<()> {
    let dev = create_dirs(root.as_fd(), Path::new("p/dev"))?;
    for (name, major, minor) in NODES {
        let number = rustix::fs::makedev(*major, *minor);
        let mode = Mode::from(0o666);
        rustix::fs::mknodat(&dev, *name, FileType::CharacterDevice, mode, number)?;
        rustix::fs::chmodat(&dev, *name, mode, rustix::fs::AtFlags::empty())?;
    }
    Ok(())
}

fn device_nodes() -> Result<Vec<(&'static str, OwnedFd)>> {
    let mut nodes = Vec::new();
    for (name, major, minor) in NODES {
        let tree = clone_tree(CWD, format!("/dev/{name}"), false).at("clone a device's mount")?;
        let meta = fs::File::from(tree.try_clone().at("duplicate")?)
            .metadata()
            .at("read a device's metadata")?;
        let right =
            meta.file_type().is_char_device() && meta.rdev() == rustix::fs::makedev(*major, *minor);
        if !right {
            return Err(crate::error::Error::Unavailable(format!("device {name}")));
        }
        // All restrictions except `nodev`, with which the device could not be opened (EACCES).
        raw::mount_setattr(tree.as_fd(), false, ATTR_NOSUID | ATTR_NOEXEC, ATTR_NODEV)
            .or_else(|_| raw::mount_setattr(tree.as_fd(), false, ATTR_NOSUID | ATTR_NOEXEC, 0))
            .at("restrict a device")?;
        nodes.push((*name, tree));
    }
    Ok(nodes)
}

fn masks() -> Vec<(String, bool)> {
    // A file that only root can read needs no mask, because no guest is root of the host.
    let open = |meta: &fs::Metadata| meta.mode() & 0o006 != 0;
    let masked = |name: &&str| {
        let meta = fs::symlink_metadata(format!("/proc/{name}"))
            .ok()
            .filter(open)?;
        Some(((*name).to_owned(), meta.is_dir()))
    };
    MASKED.iter().filter_map(masked).collect()
}
