//! Builds the root directory of a box.
//!
//! This runs in the box's mount namespace, which starts as a copy of the server's template. No
//! guest runs yet, and no host path is resolved.
//!
//! `prepare` builds what boxes of one shape have in common and needs no plan. `finish` adds the
//! parts of one plan.
//!
//! One file system holds all private data of the box: the root skeleton, `/tmp`, the guest's home
//! and its directories. A guest cannot exceed its limit in any of them. It is a tmpfs, which holds
//! `/dev/shm` as well, or a disk.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MoveMountFlags, UnmountFlags};

use super::Resources;
use crate::error::{At, Error, Result};
use crate::identity::{self, passwd_line};
use crate::mounts::{
    Attr, attach, chown, clone_tree, create_dirs, create_file, create_mount_point, new_fs,
    open_beneath, overlay_of,
};
use crate::plan::{Caps, Guest, Mount, Root, SandboxPlan, Scratch};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};
use crate::server::images::Image;
use crate::server::overlays::Overlays;
use crate::server::template_mounts::Template;

/// All users can write; only owners can delete.
const STICKY: Mode = Mode::from_raw_mode(0o1777);

/// Terminals per box.
///
/// The host has 3,072 for all boxes (`kernel.pty.max` minus the reserve).
const TERMINALS: &str = "64";

/// Builds the common parts and makes them the root of this process.
pub(super) fn prepare(resources: &mut Resources<'_>) -> Result<RootBuilder> {
    let template = &resources.server.template;
    let scratch = scratch(resources)?;
    let Overlays {
        template_files,
        system,
    } = resources
        .overlays
        .take()
        .map_or_else(|| Overlays::new(template), Ok)?;
    attach(&template_files, open("/o")?).at("attach the template files")?;
    let image = resources.image.take();
    let root = match &image {
        None => host_root(resources, &scratch, &template_files, &system)?,
        Some(image) => image_root(resources, &scratch, image)?,
    };
    let tree = RootBuilder {
        root,
        scratch,
        guest: resources.server.ids.of(&resources.shape.guest),
    };
    tree.mount_dev(template, &template_files, &resources.shape.scratch)?;
    tree.mount_proc(template, &template_files)?;
    let home = &resources.shape.guest.home;
    if image.is_some() {
        // Everything that the guest writes is in the upper directory of the overlay.
        tree.create_dir(Path::new("tmp"), STICKY)?;
        if !leads_to_tmp(&tree.root) {
            tree.create_dir(Path::new("var/tmp"), STICKY)?;
        }
        tree.create_dir(home, Mode::from(0o755))?;
    } else {
        tree.mount_private("tmp", Path::new("tmp"), STICKY)?;
        // Two paths for one directory, so that both share the limit and end with the box.
        let var = tree.mount_point(Path::new("var"))?;
        rustix::fs::symlinkat("../tmp", &var, "tmp").at("create /var/tmp")?;
        tree.mount_private("home", home, Mode::from(0o755))?;
        tree.mount_default_identity(&template_files)?;
    }
    // The new root covers the old one at the same path. The detach then removes the old one.
    rustix::process::fchdir(&tree.root).at("enter the root")?;
    rustix::process::pivot_root(".", ".").at("pivot the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).at("leave the server's mounts")?;
    rustix::process::chdir("/").at("enter the root")?;
    Ok(tree)
}

/// Attaches the file system of the private files. Overlays refer to it as `/s`.
fn scratch(resources: &mut Resources<'_>) -> Result<OwnedFd> {
    let scratch = match (&resources.shape.scratch, resources.scratch.take()) {
        (Scratch::Memory(caps), _) => memory(*caps, "0755", 0)?,
        (Scratch::FileSystem { .. } | Scratch::Directory { .. }, Some(disk)) => disk,
        (Scratch::FileSystem { .. } | Scratch::Directory { .. }, None) => {
            return Err(Error::Protocol("a box without its disk".into()));
        }
    };
    attach(&scratch, open("/s")?).at("attach the private files")?;
    Ok(scratch)
}

/// Creates a size-limited file system in memory.
fn memory(caps: Caps, mode: &str, attr: Attr) -> Result<OwnedFd> {
    let (size, inodes) = (caps.bytes.to_string(), caps.inodes.to_string());
    let options = [
        ("size", size.as_str()),
        ("nr_inodes", inodes.as_str()),
        ("mode", mode),
    ];
    let attr = ATTR_NOSUID | ATTR_NODEV | attr;
    new_fs("tmpfs", &options, attr).at("create the private tmpfs")
}

fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(
        path,
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )
    .at("open a mount point of the template")
}

/// Creates a skeleton of directories and attaches the box's system directories.
fn host_root(
    resources: &Resources<'_>,
    scratch: &OwnedFd,
    template_files: &OwnedFd,
    system: &[OwnedFd],
) -> Result<OwnedFd> {
    let template = &resources.server.template;
    create_dir(scratch, "root")?;
    let skeleton = clone_tree(scratch, "root", false).at("clone the root's mount")?;
    attach(&skeleton, open("/r")?).at("attach the root")?;
    for (name, target) in &template.links {
        rustix::fs::symlinkat(target.as_str(), &skeleton, name.as_str())
            .at("create a system link")?;
    }
    for (tree, overlays) in template.trees.iter().zip(system) {
        let place = create_mount_point(skeleton.as_fd(), Path::new(&tree.name), overlays.as_fd());
        attach(
            overlays,
            place.at("create the mount point of a system directory")?,
        )
        .at("attach a system directory")?;
    }
    create_dir(&skeleton, "etc")?;
    let place = open_beneath(&skeleton, "etc", OFlags::PATH).at("open /etc")?;
    attach(template_file(template_files, "etc")?, place).at("attach /etc")?;
    Ok(skeleton)
}

/// Clones a directory of the template as a mount.
fn template_file(template_files: &OwnedFd, name: &str) -> Result<OwnedFd> {
    clone_tree(template_files, name, false).at("clone a template file's mount")
}

/// Creates an overlay above an image.
///
/// Writes go to the private files, never to the image.
fn image_root(resources: &Resources<'_>, scratch: &OwnedFd, image: &Image) -> Result<OwnedFd> {
    for name in ["upper", "work"] {
        create_dir(scratch, name)?;
    }
    // Root of the box, if it has more than one id.
    let owner = resources.server.ids.guest(0);
    chown(scratch, "upper", (owner, owner)).at("give the root to the box")?;
    add_guest(&resources.shape.guest, scratch, &image.tree, owner)
        .at("add the guest to the root's users")?;
    let mut options = vec![("upperdir", "/s/upper"), ("workdir", "/s/work")];
    if !resources.server.template.privileged {
        // The overlay's own attributes need a namespace that ordinary users can write.
        options.push(("userxattr", ""));
    }
    if !matches!(resources.shape.scratch, Scratch::Memory(_)) {
        // The end of the box would otherwise sync the file system of its disk.
        options.push(("volatile", ""));
    }
    let attr = ATTR_NOSUID | ATTR_NODEV;
    let root = if image.by_descriptor {
        overlay_of(&[image.tree.as_fd()], &options, attr)
    } else {
        attach(&image.tree, open("/l")?).at("attach the root directory")?;
        options.push(("lowerdir", "/l"));
        new_fs("overlay", &options, attr)
    };
    let root = root.at("create the overlay")?;
    attach(&root, open("/r")?).at("attach the overlay")?;
    Ok(root)
}

/// Adds the guest to copies of the image's `/etc/passwd` and `/etc/group`.
///
/// An image that knows the id of the guest keeps its files. The copies go directly to the upper
/// layer. Through the overlay, the kernel could not copy up a file with an unmapped owner (EACCES).
fn add_guest(guest: &Guest, scratch: &OwnedFd, lower: &OwnedFd, owner: u32) -> io::Result<()> {
    let etc = create_dirs(scratch.as_fd(), Path::new("upper/etc"))?;
    chown(&etc, "", (owner, owner))?;
    create_file(&etc, "resolv.conf", identity::resolv_conf().as_bytes())?;
    chown(&etc, "resolv.conf", (owner, owner))?;
    for (name, id, line) in [
        ("passwd", guest.id, passwd_line(guest)),
        (
            "group",
            guest.group,
            format!("{}:x:{}:\n", guest.name, guest.group),
        ),
    ] {
        let mut content = match open_beneath(
            lower,
            format!("etc/{name}"),
            OFlags::RDONLY | OFlags::NONBLOCK,
        ) {
            Ok(file) => read_some(file)?,
            Err(_) => Vec::new(),
        };
        if knows(&content, id) {
            continue;
        }
        if !content.is_empty() && !content.ends_with(b"\n") {
            content.push(b'\n');
        }
        content.extend_from_slice(line.as_bytes());
        create_file(&etc, name, &content)?;
        chown(&etc, name, (owner, owner))?;
    }
    Ok(())
}

/// Whether a file of users or groups has an id, which is the third field of a line.
fn knows(content: &[u8], id: u32) -> bool {
    let id = id.to_string();
    content
        .split(|byte| *byte == b'\n')
        .any(|line| line.split(|byte| *byte == b':').nth(2) == Some(id.as_bytes()))
}

/// Reads the beginning of an untrusted file.
fn read_some(file: OwnedFd) -> io::Result<Vec<u8>> {
    const MOST: u64 = 1 << 20;
    let mut content = Vec::new();
    if rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file() {
        io::Read::read_to_end(
            &mut io::Read::take(std::fs::File::from(file), MOST),
            &mut content,
        )?;
    }
    Ok(content)
}

/// Whether `/var/tmp` of an image is a link to `/tmp`.
fn leads_to_tmp(root: &OwnedFd) -> bool {
    let link = open_beneath(root, "var/tmp", OFlags::PATH | OFlags::NOFOLLOW);
    let target = link.map(|link| rustix::fs::readlinkat(link, "", Vec::new()));
    matches!(target, Ok(Ok(target)) if matches!(target.to_bytes(), b"/tmp" | b"../tmp"))
}

fn create_dir(at: impl AsFd, name: &str) -> Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(error).at("create a directory of the root"),
    }
}

/// Converts an absolute path to one relative to the root.
fn within(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// A root directory under construction.
pub(super) struct RootBuilder {
    root: OwnedFd,
    scratch: OwnedFd,
    /// User and group id of the guest in the server's user namespace.
    guest: (u32, u32),
}

impl RootBuilder {
    /// Adds the parts of one plan and makes the root read-only if requested.
    pub(super) fn finish(self, plan: &SandboxPlan, trees: &[(OwnedFd, Mount)]) -> Result<()> {
        self.mount_identity(plan)?;
        if !plan.read_only_root {
            for name in ["", "opt"] {
                self.give_to_guest(&self.mount_point(Path::new(name))?, Mode::from(0o755))?;
            }
        }
        for (tree, mount) in trees {
            let name = mount.target.display();
            let place = create_mount_point(self.root.as_fd(), &mount.target, tree.as_fd());
            attach(tree, place.at(format!("create the mount point {name}"))?)
                .at(format!("attach the mount {name}"))?;
        }
        let mut dirs: Vec<&PathBuf> = plan.dirs.iter().collect();
        dirs.sort();
        for dir in dirs {
            if plan.mounts.iter().any(|mount| mount.target == *dir) || *dir == plan.guest.home {
                continue;
            }
            match plan.mount_of(dir) {
                Some(mount) => self.create_dir_in_mount(mount, dir)?,
                None => self.create_guest_dir(dir)?,
            }
        }
        if plan.read_only_root {
            raw::mount_setattr(self.root.as_fd(), false, ATTR_RDONLY, 0)
                .at("make the root read-only")?;
        }
        Ok(())
    }

    /// Descriptors that `finish` needs.
    pub(super) fn descriptors(&self) -> [&OwnedFd; 2] {
        [&self.root, &self.scratch]
    }

    /// Creates a guest-owned directory in the root.
    ///
    /// A bind mount onto itself keeps it writable when the root is read-only.
    fn create_guest_dir(&self, path: &Path) -> Result<()> {
        self.create_dir(path, Mode::from(0o755))
    }

    /// Creates a writable directory in the root, which is the guest's unless all users share it.
    fn create_dir(&self, path: &Path, mode: Mode) -> Result<()> {
        let place = self.mount_point(path)?;
        if mode == STICKY {
            rustix::fs::chmodat(&place, ".", mode, rustix::fs::AtFlags::empty())
                .at("set a directory's mode")?;
        } else {
            self.give_to_guest(&place, mode)?;
        }
        let tree = clone_tree(&place, "", false).at("clone a private directory's mount")?;
        attach(tree, place).at("attach a private directory")
    }

    /// Creates a directory in a mount with the guest's permissions and owner.
    fn create_dir_in_mount(&self, mount: &Mount, dir: &Path) -> Result<()> {
        let refused = || Error::Invalid(format!("dirs: {} cannot be created there", dir.display()));
        let place = open_beneath(&self.root, within(&mount.target), OFlags::PATH);
        let place = place.at("open a mount")?;
        let rest = dir.strip_prefix(&mount.target).map_err(|_| refused())?;
        raw::set_file_ids(self.guest).at("switch to the guest's file access")?;
        // A guest may control these names, so no link is followed.
        let made = create_dirs(place.as_fd(), rest);
        raw::set_file_ids((0, 0)).at("restore file access")?;
        made.map(drop).map_err(|_| refused())
    }

    fn give_to_guest(&self, dir: &OwnedFd, mode: Mode) -> Result<()> {
        rustix::fs::chmodat(dir, ".", mode, rustix::fs::AtFlags::empty())
            .at("set a directory's mode")?;
        chown(dir, "", self.guest).at("give a directory to the guest")
    }

    fn mount_point(&self, path: &Path) -> Result<OwnedFd> {
        create_dirs(self.root.as_fd(), path).at(format!("create {}", path.display()))
    }

    /// Mounts a private, guest-owned directory over a path of the root.
    fn mount_private(&self, name: &str, path: &Path, mode: Mode) -> Result<()> {
        let place = self.mount_point(path)?;
        attach(self.private_tree(name, mode)?, place).at("attach a private directory")
    }

    fn private_tree(&self, name: &str, mode: Mode) -> Result<OwnedFd> {
        rustix::fs::mkdirat(&self.scratch, name, Mode::from(0o700))
            .at("create a private directory")?;
        rustix::fs::chmodat(&self.scratch, name, mode, rustix::fs::AtFlags::empty())
            .at("set a private directory's mode")?;
        if mode != STICKY {
            chown(&self.scratch, name, self.guest).at("give a private directory to the guest")?;
        }
        clone_tree(&self.scratch, name, false).at("clone a private directory's mount")
    }

    fn mount_dev(
        &self,
        template: &Template,
        template_files: &OwnedFd,
        scratch: &Scratch,
    ) -> Result<()> {
        let place = self.mount_point(Path::new("dev"))?;
        let dev = template_file(template_files, "dev")?;
        if template.nodes.is_empty() {
            raw::mount_setattr(dev.as_fd(), false, 0, ATTR_NODEV).at("allow devices")?;
        }
        attach(dev, place).at("attach /dev")?;
        for name in &template.nodes {
            let onto = MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            let place = self.open_inside(&format!("dev/{name}"))?;
            rustix::mount::move_mount(CWD, format!("/d/{name}"), place, "", onto)
                .at("move a device")?;
        }
        // No `gid=`: no box maps the usual group (EINVAL). A terminal has the group of its opener.
        let options = [
            ("newinstance", ""),
            ("ptmxmode", "0666"),
            ("mode", "0620"),
            ("max", TERMINALS),
        ];
        let pts = new_fs("devpts", &options, ATTR_NOSUID | ATTR_NOEXEC).at("create devpts")?;
        attach(pts, self.open_inside("dev/pts")?).at("attach devpts")?;
        let shm = match scratch {
            Scratch::Memory(_) => {
                let shm = self.private_tree("shm", STICKY)?;
                raw::mount_setattr(shm.as_fd(), false, ATTR_NOEXEC, 0).at("restrict /dev/shm")?;
                shm
            }
            // Programs expect shared memory to be memory.
            Scratch::FileSystem { shm, .. } | Scratch::Directory { shm, .. } => {
                memory(*shm, "1777", ATTR_NOEXEC)?
            }
        };
        attach(shm, self.open_inside("dev/shm")?).at("attach /dev/shm")
    }

    fn open_inside(&self, path: &str) -> Result<OwnedFd> {
        open_beneath(&self.root, path, OFlags::PATH).at("open a mount point of the box")
    }

    fn mount_proc(&self, template: &Template, template_files: &OwnedFd) -> Result<()> {
        // No `hidepid`: it hides processes that the reader may not trace. Commands of a box have
        // separate Landlock domains, so `ps` would not show processes of other commands. Init
        // protects itself by being non-dumpable.
        let proc =
            new_fs("proc", &[], ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC).map_err(|error| {
                // Without root, the kernel requires a visible, unmasked procfs. Containers often
                // have none.
                if error.raw_os_error() == Some(libc::EPERM) {
                    Error::Unavailable("procfs".into())
                } else {
                    Error::Step {
                        step: "create procfs".into(),
                        source: error,
                    }
                }
            })?;
        let place = self.mount_point(Path::new("proc"))?;
        attach(&proc, &place).at("attach procfs")?;
        let sys = clone_tree(&proc, "sys", true).at("clone /proc/sys")?;
        raw::mount_setattr(sys.as_fd(), true, ATTR_RDONLY, 0).at("make /proc/sys read-only")?;
        attach(
            sys,
            open_beneath(&proc, "sys", OFlags::PATH).at("open /proc/sys")?,
        )
        .at("attach /proc/sys")?;
        for (name, dir) in &template.masks {
            let mask = template_file(template_files, if *dir { "empty" } else { "nothing" })?;
            // By path: this procfs is new, and it contains no links to other file systems.
            let beneath = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            match rustix::mount::move_mount(mask, "", &proc, name.as_str(), beneath) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error).at("mask a file of procfs"),
            }
        }
        Ok(())
    }

    /// Mounts the default identity files at their path.
    fn mount_default_identity(&self, template_files: &OwnedFd) -> Result<()> {
        let dir = self.mount_point(Path::new("run/box"))?;
        attach(template_file(template_files, "who")?, dir).at("attach the identity files")
    }

    /// Mounts the identity files of this plan.
    ///
    /// `add_guest` has changed those of an image.
    fn mount_identity(&self, plan: &SandboxPlan) -> Result<()> {
        if matches!(plan.root, Root::Image(_)) || identity::is_default(plan) {
            return Ok(());
        }
        // Covers the default files.
        let place = self.mount_point(Path::new("run/box"))?;
        let fs = new_fs(
            "tmpfs",
            &[("size", "64k"), ("mode", "0755")],
            ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC,
        );
        let fs = fs.at("create a tmpfs")?;
        identity::write(&fs, &plan.guest, &plan.hostname).at("write the identity files")?;
        raw::mount_setattr(fs.as_fd(), false, ATTR_RDONLY, 0)
            .at("make the identity files read-only")?;
        attach(fs, place).at("attach the identity files")
    }
}
