//! Builds the root directory of a box.
//!
//! This runs in the box's mount namespace, which starts as a copy of the server's template. No
//! guest runs yet, and no host path is resolved.
//!
//! `prepare` builds what boxes of one shape have in common and needs no plan. `finish` adds the
//! parts of one plan.
//!
//! One file system holds all private data of the box, so that a guest cannot exceed its limit in any
//! place. It is a tmpfs, which holds `/dev/shm` as well, or a disk. Everything that a guest writes
//! is below one directory of it, `upper`: that directory is the root itself, or the upper layer of
//! an overlay (`overlay.rs`). Where the root is read-only, `/tmp`, the home and other private
//! directories are mounted onto themselves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawMode};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags};

use super::{Resources, overlay};
use crate::error::{At, Error, Result};
use crate::identity;
use crate::mounts::{
    Attr, attach, chown, clone_tree, create_dirs, create_mount_point, is_no_directory, new_fs,
    open_beneath, remove_non_directory,
};
use crate::plan::{Caps, Mount, Root, SandboxPlan, Scratch};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};
use crate::server::overlays::Overlays;
use crate::server::template_mounts::Template;

/// Directory of the private files in their file system. Everything that a guest writes is there.
pub(crate) const UPPER: &str = "upper";

/// Mode of a directory in which all users can write, and only owners can delete.
const SHARED: RawMode = 0o1777;

/// Mode that the owner of a private directory needs.
const OWNER: RawMode = 0o700;

/// Bits of a mode that are not the type of the file.
const PERMISSIONS: RawMode = 0o7777;

/// Terminals per box.
///
/// The host has 3,072 for all boxes (`kernel.pty.max` minus the reserve).
const TERMINALS: &str = "64";

/// Builds the common parts and makes them the root of this process.
///
/// Returns the directory of the private files as well.
pub(super) fn prepare(
    resources: &mut Resources<'_>,
    trees: &[(OwnedFd, Mount)],
) -> Result<(RootBuilder, OwnedFd)> {
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
    // A disk of an ended box has its files.
    let is_used = match rustix::fs::mkdirat(&scratch, UPPER, Mode::from(0o755)) {
        Ok(()) => false,
        Err(Errno::EXIST) => true,
        Err(error) => return Err(error).at("create the directory of the private files"),
    };
    let upper = open_beneath(&scratch, UPPER, OFlags::PATH | OFlags::DIRECTORY);
    let upper = upper.at("open the private files")?;
    let shape = resources.shape;
    let root = if shape.has_overlay() {
        overlay::root(resources, &scratch, is_used)?
    } else {
        clone_tree(&scratch, UPPER, false).at("clone the root's mount")?
    };
    attach(&root, open("/r")?).at("attach the root")?;
    let mut tree = RootBuilder {
        root,
        guest: resources.server.ids.of(&shape.guest),
        has_snapshots: is_used || !shape.layers.is_empty(),
        workspace: None,
    };
    if shape.root == Root::Host {
        tree.mount_system(template, &template_files, &system)?;
    }
    tree.mount_dev(template, &template_files, &shape.scratch, &scratch)?;
    tree.mount_proc(template, &template_files)?;
    tree.create_private_dir(Path::new("tmp"), Access::Shared)?;
    tree.create_var_tmp(&shape.root)?;
    tree.create_private_dir(&shape.guest.home, Access::Guest)?;
    if shape.root == Root::Host {
        tree.mount_default_identity(&template_files)?;
    }
    if let Some((source, mount)) = trees.iter().find(|(_, mount)| mount.overlay) {
        tree.create_upper(&mount.target)?;
        let upper = open_beneath(
            &upper,
            within(&mount.target),
            OFlags::PATH | OFlags::DIRECTORY,
        );
        let upper = upper.at("open the changes of the workspace")?;
        tree.workspace = Some(overlay::workspace(
            resources, &scratch, source, &upper, mount,
        )?);
    }
    // The new root covers the old one at the same path. The detach then removes the old one.
    rustix::process::fchdir(&tree.root).at("enter the root")?;
    rustix::process::pivot_root(".", ".").at("pivot the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).at("leave the server's mounts")?;
    rustix::process::chdir("/").at("enter the root")?;
    Ok((tree, upper))
}

/// Attaches the file system of the private files. Overlays refer to it as `/s`.
fn scratch(resources: &mut Resources<'_>) -> Result<OwnedFd> {
    let scratch = match (&resources.shape.scratch, resources.scratch.take()) {
        (Scratch::Memory(caps), _) => memory(*caps, "0755", 0)?,
        (_, Some(disk)) => disk,
        (Scratch::FileSystem { .. } | Scratch::File { .. } | Scratch::Directory { .. }, None) => {
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

pub(super) fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(
        path,
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )
    .at("open a mount point of the template")
}

/// Clones a directory of the template as a mount.
fn template_file(template_files: &OwnedFd, name: &str) -> Result<OwnedFd> {
    clone_tree(template_files, name, false).at("clone a template file's mount")
}

pub(super) fn create_dir(at: impl AsFd, name: &str) -> Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error).at("create a directory of the root"),
    }
}

/// Converts an absolute path to one relative to the root.
pub(super) fn within(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Users of a private directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// The guest.
    Guest,
    /// All users.
    Shared,
}

/// A root directory under construction.
pub(super) struct RootBuilder {
    root: OwnedFd,
    /// User and group id of the guest in the server's user namespace.
    guest: (u32, u32),
    /// Whether an earlier guest has changed files of the root.
    has_snapshots: bool,
    /// The overlay of a mount whose changes go to the private files.
    workspace: Option<OwnedFd>,
}

impl RootBuilder {
    /// Adds the parts of one plan and makes the root read-only if requested.
    pub(super) fn finish(self, plan: &SandboxPlan, trees: &[(OwnedFd, Mount)]) -> Result<()> {
        self.mount_identity(plan)?;
        if !plan.read_only_root {
            chown(&self.root, "", self.guest).at("give the root to the guest")?;
            self.create_dir(Path::new("opt"), Access::Guest)?;
        }
        let mut dirs: Vec<&PathBuf> = plan.dirs.iter().collect();
        dirs.sort();
        dirs.retain(|dir| {
            let is_target = plan.mounts.iter().any(|mount| mount.target == **dir);
            !is_target && **dir != plan.guest.home
        });
        let in_mount = |dir: &Path| plan.mount_of(dir).is_some();
        let (later, first): (Vec<_>, Vec<_>) = dirs.into_iter().partition(|dir| in_mount(dir));
        // Before the mounts, because a private directory would hide a mount below it.
        for dir in first {
            self.create_private_dir(dir, Access::Guest)?;
        }
        for (tree, mount) in trees {
            let name = mount.target.display();
            let tree = match &self.workspace {
                Some(workspace) if mount.overlay => workspace,
                _ => tree,
            };
            let place = self.mount_point_of(&mount.target, tree);
            attach(tree, place.at(format!("create the mount point {name}"))?)
                .at(format!("attach the mount {name}"))?;
        }
        for dir in later {
            if let Some(mount) = plan.mount_of(dir) {
                self.create_dir_in_mount(mount, dir)?;
            }
        }
        if plan.read_only_root {
            raw::mount_setattr(self.root.as_fd(), false, ATTR_RDONLY, 0)
                .at("make the root read-only")?;
        }
        Ok(())
    }

    /// Descriptors that `finish` needs.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.root].into_iter().chain(&self.workspace)
    }

    /// Device of the overlay of a mount, by which the server finds it again.
    pub(super) fn workspace_device(&self) -> io::Result<Option<u64>> {
        let stat = self.workspace.as_ref().map(rustix::fs::fstat).transpose();
        Ok(stat?.map(|stat| stat.st_dev))
    }

    /// Creates the directory of the changes of a mount, which is its mount point.
    fn create_upper(&self, target: &Path) -> Result<()> {
        let path = within(target);
        let created = self.create_dir(path, Access::Guest)?;
        let place = match created {
            Some(place) => place,
            None => self.mount_point(path)?,
        };
        // A directory of a layer has no copy in the private files before its first change.
        let mode = rustix::fs::fstat(&place).at("read a directory's metadata")?;
        let mode = Mode::from_raw_mode(mode.st_mode);
        rustix::fs::chmodat(&place, ".", mode, AtFlags::empty()).at("set a directory's mode")
    }

    /// Creates a writable directory in the root.
    ///
    /// A bind mount onto itself keeps it writable when the root is read-only.
    fn create_private_dir(&self, path: &Path, access: Access) -> Result<()> {
        let Some(place) = self.create_dir(path, access)? else {
            return Ok(());
        };
        let tree = clone_tree(&place, "", false).at("clone a private directory's mount")?;
        attach(tree, place).at("attach a private directory")
    }

    /// Creates a directory in the root, or gives an existing one to its users.
    ///
    /// Returns `None` if an earlier guest has put something else there, such as a link.
    fn create_dir(&self, path: &Path, access: Access) -> Result<Option<OwnedFd>> {
        let name = path.file_name().unwrap_or_default();
        let parent = path.parent().unwrap_or(Path::new(""));
        let step = || format!("create {}", path.display());
        let parent = match create_dirs(self.root.as_fd(), parent) {
            Err(error) if self.has_snapshots && is_no_directory(&error) => return Ok(None),
            parent => parent.at(step())?,
        };
        let made = rustix::fs::mkdirat(&parent, name, Mode::from(0o755));
        let place = match open_beneath(&parent, name, OFlags::PATH | OFlags::DIRECTORY) {
            Err(error) if self.has_snapshots && is_no_directory(&error) => return Ok(None),
            // The first error has the reason.
            Err(_) if !matches!(made, Ok(()) | Err(Errno::EXIST)) => {
                return made.map(|()| None).at(step());
            }
            place => place.at(step())?,
        };
        self.set_access(&place, access, made.is_ok())?;
        Ok(Some(place))
    }

    /// Gives a directory to its users. A directory of a layer keeps its mode if they can use it.
    fn set_access(&self, dir: &OwnedFd, access: Access, is_new: bool) -> Result<()> {
        let stat = rustix::fs::fstat(dir).at("read a directory's metadata")?;
        let mode = match access {
            Access::Shared => SHARED,
            Access::Guest => stat.st_mode | OWNER,
        };
        if access == Access::Guest && (is_new || (stat.st_uid, stat.st_gid) != self.guest) {
            self.give_to_guest(dir)?;
        }
        if mode & PERMISSIONS != stat.st_mode & PERMISSIONS {
            let mode = Mode::from_raw_mode(mode);
            rustix::fs::chmodat(dir, ".", mode, AtFlags::empty()).at("set a directory's mode")?;
        }
        Ok(())
    }

    /// Creates `/var/tmp`.
    ///
    /// On the host's directories it is a link to `/tmp`, so that both share the limit and end with
    /// the box. Some images have that link as well.
    fn create_var_tmp(&self, root: &Root) -> Result<()> {
        let path = Path::new("var/tmp");
        if *root == Root::Host {
            let var = self.mount_point(Path::new("var"))?;
            match rustix::fs::symlinkat("../tmp", &var, "tmp") {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) if self.has_snapshots => {}
                Err(error) => return Err(error).at("create /var/tmp"),
            }
        }
        let link = open_beneath(&self.root, path, OFlags::PATH | OFlags::NOFOLLOW);
        let target = link.map(|link| rustix::fs::readlinkat(link, "", Vec::new()));
        match target {
            Ok(Ok(target)) if matches!(target.to_bytes(), b"/tmp" | b"../tmp") => Ok(()),
            _ => self.create_private_dir(path, Access::Shared),
        }
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

    fn give_to_guest(&self, dir: &OwnedFd) -> Result<()> {
        chown(dir, "", self.guest).at("give a directory to the guest")
    }

    /// Creates a mount point for a directory of the box.
    fn mount_point(&self, path: &Path) -> Result<OwnedFd> {
        let place = create_dirs(self.root.as_fd(), path);
        self.or_replaced(place, path, |root| create_dirs(root, path))
            .at(format!("create {}", path.display()))
    }

    /// Creates a mount point for a file or a directory.
    fn mount_point_of(&self, path: &Path, tree: &OwnedFd) -> io::Result<OwnedFd> {
        let place = create_mount_point(self.root.as_fd(), path, tree.as_fd());
        self.or_replaced(place, path, |root| {
            create_mount_point(root, path, tree.as_fd())
        })
    }

    /// Tries again without the links and files that an earlier guest has put in the way.
    fn or_replaced(
        &self,
        place: io::Result<OwnedFd>,
        path: &Path,
        create: impl FnOnce(BorrowedFd<'_>) -> io::Result<OwnedFd>,
    ) -> io::Result<OwnedFd> {
        match place {
            Err(error) if self.has_snapshots && is_no_directory(&error) => {
                remove_non_directory(self.root.as_fd(), path)?;
                create(self.root.as_fd())
            }
            place => place,
        }
    }

    /// Attaches the host's system directories.
    fn mount_system(
        &self,
        template: &Template,
        template_files: &OwnedFd,
        system: &[OwnedFd],
    ) -> Result<()> {
        for (name, target) in &template.links {
            match rustix::fs::symlinkat(target.as_str(), &self.root, name.as_str()) {
                Err(Errno::EXIST) if self.has_snapshots => self.replace_with_link(name, target),
                other => other.map_err(Into::into),
            }
            .at("create a system link")?;
        }
        for (tree, overlays) in template.trees.iter().zip(system) {
            let place = self.mount_point_of(Path::new(&tree.name), overlays);
            attach(
                overlays,
                place.at("create the mount point of a system directory")?,
            )
            .at("attach a system directory")?;
        }
        let place = self.mount_point(Path::new("etc"))?;
        attach(template_file(template_files, "etc")?, place).at("attach /etc")
    }

    /// Replaces what an earlier guest or another machine has put at the place of a system link.
    fn replace_with_link(&self, name: &str, target: &str) -> io::Result<()> {
        let found = rustix::fs::readlinkat(&self.root, name, Vec::new());
        if found.is_ok_and(|found| found.to_bytes() == target.as_bytes()) {
            return Ok(());
        }
        match rustix::fs::unlinkat(&self.root, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => rustix::fs::unlinkat(&self.root, name, AtFlags::REMOVEDIR)?,
            other => other?,
        }
        Ok(rustix::fs::symlinkat(target, &self.root, name)?)
    }

    fn mount_dev(
        &self,
        template: &Template,
        template_files: &OwnedFd,
        storage: &Scratch,
        scratch: &OwnedFd,
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
        let shm = match storage {
            Scratch::Memory(_) => {
                create_dir(scratch, "shm")?;
                rustix::fs::chmodat(
                    scratch,
                    "shm",
                    Mode::from_raw_mode(SHARED),
                    AtFlags::empty(),
                )
                .at("set a directory's mode")?;
                let shm = clone_tree(scratch, "shm", false).at("clone the mount of /dev/shm")?;
                raw::mount_setattr(shm.as_fd(), false, ATTR_NOEXEC, 0).at("restrict /dev/shm")?;
                shm
            }
            // Programs expect shared memory to be memory.
            Scratch::FileSystem { shm, .. }
            | Scratch::File { shm, .. }
            | Scratch::Directory { shm, .. } => memory(*shm, "1777", ATTR_NOEXEC)?,
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
                Ok(()) | Err(Errno::NOENT) => {}
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
