//! The box's root directory. Runs in the box's own mount namespace, which begins as a copy of the server's small world; no
//! guest exists yet, and nothing of the machine is looked up by name.
//!
//! In two parts: `prepare` is what boxes of one shape have in common, and can be done before there is a plan; `finish` adds
//! what one plan asks for.
//!
//! One tmpfs with one cap holds everything private to the box: the root's skeleton, `/tmp`, `/dev/shm`, the guest's home and
//! directories. So there is one limit, whichever way a guest tries to fill it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MoveMountFlags, UnmountFlags};

use super::Resources;
use crate::error::{At, Error, Result};
use crate::identity::{self, passwd_line};
use crate::mounts::{
    attach, chown, clone_tree, make_dirs, make_file, make_place, new_fs, open_beneath,
};
use crate::plan::{Guest, Mount, Root, SandboxPlan};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};
use crate::server::overlays::Overlays;
use crate::server::template_mounts::Template;

/// Everybody may write, only owners may delete.
const STICKY: Mode = Mode::from_raw_mode(0o1777);

/// Terminals of one box. The machine has 3,072 for all of them (`kernel.pty.max` without the reserve).
const TERMINALS: &str = "64";

/// Builds what does not depend on a single box, and makes it this process's root.
pub(super) fn prepare(resources: &mut Resources<'_>) -> Result<RootBuilder> {
    let template = &resources.server.template;
    let scratch = scratch(resources.shape)?;
    let Overlays { pieces, system } = resources
        .overlays
        .take()
        .map_or_else(|| Overlays::new(template), Ok)?;
    attach(&pieces, open("/o")?).at("attach the pieces")?;
    let root = match resources.lower.take() {
        None => host_root(resources, &scratch, &pieces, &system)?,
        Some(lower) => image_root(resources, &scratch, &lower)?,
    };
    let guest = resources.server.ids.guest(resources.shape.guest.id);
    let tree = RootBuilder {
        root,
        scratch,
        guest,
    };
    tree.dev(template, &pieces)?;
    tree.proc(template, &pieces)?;
    tree.private("tmp", Path::new("tmp"), STICKY)?;
    // One place, two names: whatever a program leaves in either is under the same cap and ends with the box.
    let var = tree.place(Path::new("var"))?;
    match rustix::fs::symlinkat("../tmp", &var, "tmp") {
        Err(rustix::io::Errno::EXIST) => tree.private("var-tmp", Path::new("var/tmp"), STICKY)?,
        other => other.at("make /var/tmp")?,
    }
    tree.private("home", &resources.shape.guest.home, Mode::from(0o755))?;
    tree.default_identity(&pieces)?;
    // Both names of the root are one: the old one lies under the new one and is then taken away with all it holds.
    rustix::process::fchdir(&tree.root).at("enter the root")?;
    rustix::process::pivot_root(".", ".").at("pivot the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).at("leave the server's mounts")?;
    rustix::process::chdir("/").at("enter the root")?;
    Ok(tree)
}

/// The capped file system, attached at `/s` so that overlays can name parts of it.
fn scratch(plan: &SandboxPlan) -> Result<OwnedFd> {
    let (size, inodes) = (plan.caps.bytes.to_string(), plan.caps.inodes.to_string());
    let options = [
        ("size", size.as_str()),
        ("nr_inodes", inodes.as_str()),
        ("mode", "0755"),
    ];
    let scratch =
        new_fs("tmpfs", &options, ATTR_NOSUID | ATTR_NODEV).at("make the private tmpfs")?;
    attach(&scratch, open("/s")?).at("attach the private tmpfs")?;
    Ok(scratch)
}

fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(
        path,
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )
    .at("open a piece of the box")
}

/// A skeleton of empty directories, onto which the box's views of the system directories are attached.
fn host_root(
    resources: &Resources<'_>,
    scratch: &OwnedFd,
    pieces: &OwnedFd,
    system: &[OwnedFd],
) -> Result<OwnedFd> {
    let template = &resources.server.template;
    make_dir(scratch, "root")?;
    let skeleton = clone_tree(scratch, "root", false).at("copy the root's mount")?;
    attach(&skeleton, open("/r")?).at("attach the root")?;
    for (name, target) in &template.links {
        rustix::fs::symlinkat(target.as_str(), &skeleton, name.as_str())
            .at("make a system link")?;
    }
    for (tree, overlays) in template.trees.iter().zip(system) {
        let place = make_place(skeleton.as_fd(), Path::new(&tree.name), overlays.as_fd());
        attach(overlays, place.at("open the place of a system directory")?)
            .at("attach a system directory")?;
    }
    make_dir(&skeleton, "etc")?;
    let place = open_beneath(&skeleton, "etc", OFlags::PATH).at("open /etc")?;
    attach(piece(pieces, "etc")?, place).at("attach /etc")?;
    Ok(skeleton)
}

/// A mount of one of the server's pieces.
fn piece(pieces: &OwnedFd, name: &str) -> Result<OwnedFd> {
    clone_tree(pieces, name, false).at("copy a piece's mount")
}

/// An overlay: the given directory below, what is written above and under the cap. The directory is never written to.
fn image_root(resources: &Resources<'_>, scratch: &OwnedFd, lower: &OwnedFd) -> Result<OwnedFd> {
    attach(lower, open("/l")?).at("attach the root directory")?;
    for name in ["upper", "work"] {
        make_dir(scratch, name)?;
    }
    add_guest(&resources.shape.guest, scratch, lower).at("add the guest to the root's users")?;
    let mut options = vec![
        ("lowerdir", "/l"),
        ("upperdir", "/s/upper"),
        ("workdir", "/s/work"),
    ];
    if !resources.server.template.privileged {
        // The overlay's own marks need a name space of attributes that ordinary users may write.
        options.push(("userxattr", ""));
    }
    let root = new_fs("overlay", &options, ATTR_NOSUID | ATTR_NODEV).at("make the overlay")?;
    attach(&root, open("/r")?).at("attach the overlay")?;
    Ok(root)
}

/// Puts copies of a given root's `/etc/passwd` and `/etc/group` with the guest's line into the upper layer. Written there and
/// not through the overlay: a file whose owner is in no map cannot be copied up (EACCES).
fn add_guest(guest: &Guest, scratch: &OwnedFd, lower: &OwnedFd) -> io::Result<()> {
    let etc = make_dirs(scratch.as_fd(), Path::new("upper/etc"))?;
    make_file(&etc, "resolv.conf", identity::resolv_conf().as_bytes())?;
    for (name, line) in [
        ("passwd", passwd_line(guest)),
        ("group", format!("{}:x:{}:\n", guest.name, guest.id)),
    ] {
        let mut content = match open_beneath(
            lower,
            format!("etc/{name}"),
            OFlags::RDONLY | OFlags::NONBLOCK,
        ) {
            Ok(file) => read_some(file)?,
            Err(_) => Vec::new(),
        };
        if !content.is_empty() && !content.ends_with(b"\n") {
            content.push(b'\n');
        }
        content.extend_from_slice(line.as_bytes());
        make_file(&etc, name, &content)?;
    }
    Ok(())
}

/// The beginning of a file that somebody else made, and that may be anything.
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

fn make_dir(at: impl AsFd, name: &str) -> Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(error).at("make a directory of the root"),
    }
}

/// A path of the box as one that is looked up beneath its root.
fn within(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// A root under construction.
pub(super) struct RootBuilder {
    root: OwnedFd,
    scratch: OwnedFd,
    /// The guest's id as the server numbers it.
    guest: u32,
}

impl RootBuilder {
    /// Adds what one box has for itself, and closes the root.
    pub(super) fn finish(self, plan: &SandboxPlan, trees: &[(OwnedFd, Mount)]) -> Result<()> {
        self.identity(plan)?;
        if !plan.read_only_root {
            for name in ["", "opt"] {
                self.give_to_guest(&self.place(Path::new(name))?, Mode::from(0o755))?;
            }
        }
        for (tree, mount) in trees {
            let name = mount.target.display();
            let place = make_place(self.root.as_fd(), &mount.target, tree.as_fd());
            attach(tree, place.at(format!("make the mount point {name}"))?)
                .at(format!("attach the mount {name}"))?;
        }
        let mut dirs: Vec<&PathBuf> = plan.dirs.iter().collect();
        dirs.sort();
        for dir in dirs {
            if plan.mounts.iter().any(|mount| mount.target == *dir) || *dir == plan.guest.home {
                continue;
            }
            match plan.mount_of(dir) {
                Some(mount) => self.dir_in(mount, dir)?,
                None => self.own_dir(dir)?,
            }
        }
        if plan.read_only_root {
            raw::mount_setattr(self.root.as_fd(), false, ATTR_RDONLY, 0)
                .at("make the root read-only")?;
        }
        Ok(())
    }

    /// What must stay open until `finish`.
    pub(super) fn descriptors(&self) -> [&OwnedFd; 2] {
        [&self.root, &self.scratch]
    }

    /// A directory of the root that belongs to the guest. Mounted onto itself, it stays writable when the root is not.
    fn own_dir(&self, path: &Path) -> Result<()> {
        let place = self.place(path)?;
        self.give_to_guest(&place, Mode::from(0o755))?;
        let tree = clone_tree(&place, "", false).at("copy a private directory's mount")?;
        attach(tree, place).at("attach a private directory")
    }

    /// A directory in a mount, made as the guest would make it: it belongs to the mount's owner, and only where that one may.
    fn dir_in(&self, mount: &Mount, dir: &Path) -> Result<()> {
        let refused = || Error::Invalid(format!("dirs: {} cannot be made there", dir.display()));
        let place = open_beneath(&self.root, within(&mount.target), OFlags::PATH);
        let place = place.at("open a mount")?;
        let rest = dir.strip_prefix(&mount.target).map_err(|_| refused())?;
        raw::set_file_ids(self.guest).at("touch files as the guest")?;
        // Names in there may be a guest's: no link is followed.
        let made = make_dirs(place.as_fd(), rest);
        raw::set_file_ids(0).at("touch files as before")?;
        made.map(drop).map_err(|_| refused())
    }

    fn give_to_guest(&self, dir: &OwnedFd, mode: Mode) -> Result<()> {
        rustix::fs::chmodat(dir, ".", mode, rustix::fs::AtFlags::empty())
            .at("set a directory's mode")?;
        chown(dir, "", self.guest).at("give a directory to the guest")
    }

    fn place(&self, path: &Path) -> Result<OwnedFd> {
        make_dirs(self.root.as_fd(), path).at(format!("make {}", path.display()))
    }

    /// A directory that belongs to the guest and to this box alone, whatever the root has under its name.
    fn private(&self, name: &str, path: &Path, mode: Mode) -> Result<()> {
        let place = self.place(path)?;
        attach(self.private_tree(name, mode)?, place).at("attach a private directory")
    }

    fn private_tree(&self, name: &str, mode: Mode) -> Result<OwnedFd> {
        rustix::fs::mkdirat(&self.scratch, name, Mode::from(0o700))
            .at("make a private directory")?;
        rustix::fs::chmodat(&self.scratch, name, mode, rustix::fs::AtFlags::empty())
            .at("open a private directory up")?;
        if mode != STICKY {
            chown(&self.scratch, name, self.guest).at("give a private directory to the guest")?;
        }
        clone_tree(&self.scratch, name, false).at("copy a private directory's mount")
    }

    fn dev(&self, template: &Template, pieces: &OwnedFd) -> Result<()> {
        let place = self.place(Path::new("dev"))?;
        let dev = piece(pieces, "dev")?;
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
        // No `gid=`: the usual group is mapped in no box (EINVAL). A terminal then has the group of who opened it.
        let options = [
            ("newinstance", ""),
            ("ptmxmode", "0666"),
            ("mode", "0620"),
            ("max", TERMINALS),
        ];
        let pts = new_fs("devpts", &options, ATTR_NOSUID | ATTR_NOEXEC).at("make devpts")?;
        attach(pts, self.open_inside("dev/pts")?).at("attach devpts")?;
        let shm = self.private_tree("shm", STICKY)?;
        raw::mount_setattr(shm.as_fd(), false, ATTR_NOEXEC, 0).at("restrict /dev/shm")?;
        attach(shm, self.open_inside("dev/shm")?).at("attach /dev/shm")
    }

    fn open_inside(&self, path: &str) -> Result<OwnedFd> {
        open_beneath(&self.root, path, OFlags::PATH).at("open a place of the box")
    }

    fn proc(&self, template: &Template, pieces: &OwnedFd) -> Result<()> {
        // Not `hidepid`: it shows only what one may trace, and commands of one box are under separate Landlock domains, so `ps`
        // would not show what another command started. What matters of init is closed by its being non-dumpable.
        let proc =
            new_fs("proc", &[], ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC).map_err(|error| {
                // Without root the kernel wants an unmasked procfs in sight, which containers do not have.
                if error.raw_os_error() == Some(libc::EPERM) {
                    Error::Unavailable("procfs".into())
                } else {
                    Error::Step {
                        step: "make procfs".into(),
                        source: error,
                    }
                }
            })?;
        let place = self.place(Path::new("proc"))?;
        attach(&proc, &place).at("attach procfs")?;
        let sys = clone_tree(&proc, "sys", true).at("copy /proc/sys")?;
        raw::mount_setattr(sys.as_fd(), true, ATTR_RDONLY, 0).at("make /proc/sys read-only")?;
        attach(
            sys,
            open_beneath(&proc, "sys", OFlags::PATH).at("open /proc/sys")?,
        )
        .at("attach /proc/sys")?;
        for (name, dir) in &template.masks {
            let mask = piece(pieces, if *dir { "empty" } else { "nothing" })?;
            // By name: what this procfs has is the kernel's, and nothing in it is a link to elsewhere.
            let beneath = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            match rustix::mount::move_mount(mask, "", &proc, name.as_str(), beneath) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error).at("mask a part of procfs"),
            }
        }
        Ok(())
    }

    /// Who is who by default, at the place where files of one's own would be.
    fn default_identity(&self, pieces: &OwnedFd) -> Result<()> {
        let dir = self.place(Path::new("run/box"))?;
        attach(piece(pieces, "who")?, dir).at("attach who is who")
    }

    /// Who is who, for programs that ask. A given root has its own files, to which `add_guest` added.
    fn identity(&self, plan: &SandboxPlan) -> Result<()> {
        if matches!(plan.root, Root::Directory(_)) || identity::is_default(plan) {
            return Ok(());
        }
        // On top of the default ones.
        let place = self.place(Path::new("run/box"))?;
        let fs = new_fs(
            "tmpfs",
            &[("size", "64k"), ("mode", "0755")],
            ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC,
        );
        let fs = fs.at("make a tmpfs")?;
        identity::write(&fs, &plan.guest, &plan.hostname).at("write who is who")?;
        raw::mount_setattr(fs.as_fd(), false, ATTR_RDONLY, 0).at("make who is who read-only")?;
        attach(fs, place).at("attach who is who")
    }
}
