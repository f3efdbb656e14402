//! The box's root directory. Runs in the box's own mount namespace, which begins as a copy of the server's small world; no
//! guest exists yet, and nothing of the machine is looked up by name.
//!
//! One tmpfs with one cap holds everything private to the box: the root's skeleton, `/tmp`, `/dev/shm`, the guest's home and
//! directories. So there is one limit, whichever way a guest tries to fill it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MoveMountFlags, UnmountFlags};

use super::Context;
use crate::error::{At, Error, Result};
use crate::mounts::{attach, chown, clone_tree, make_dirs, make_file, make_place, new_fs, open_beneath};
use crate::plan::SandboxPlan;
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};

/// Everybody may write, only owners may delete.
const STICKY: Mode = Mode::from_raw_mode(0o1777);

/// Builds the root and makes it this process's.
pub(super) fn build(context: &mut Context<'_>) -> Result<()> {
    let scratch = scratch(context.plan)?;
    let root = match context.lower.take() {
        None => host_root(context, &scratch)?,
        Some(lower) => given_root(context, &scratch, &lower)?,
    };
    let tree = Tree { root, scratch, guest: context.server.ids.guest(context.plan.guest.id), made: 0 };
    tree.fill(context)
}

/// The capped file system, attached at `/s` so that overlays can name parts of it.
fn scratch(plan: &SandboxPlan) -> Result<OwnedFd> {
    let (size, inodes) = (plan.caps.bytes.to_string(), plan.caps.inodes.to_string());
    let options = [("size", size.as_str()), ("nr_inodes", inodes.as_str()), ("mode", "0755")];
    let scratch = new_fs("tmpfs", &options, ATTR_NOSUID | ATTR_NODEV).at("make the private tmpfs")?;
    attach(&scratch, open("/s")?).at("attach the private tmpfs")?;
    Ok(scratch)
}

fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()).at("open a piece of the box")
}

/// A skeleton of empty directories, into which the server's read-only pieces are moved.
fn host_root(context: &Context<'_>, scratch: &OwnedFd) -> Result<OwnedFd> {
    let world = &context.server.world;
    make_dir(scratch, "root")?;
    let skeleton = clone_tree(scratch, "root", false).at("copy the root's mount")?;
    attach(&skeleton, open("/r")?).at("attach the root")?;
    for (name, target) in &world.links {
        rustix::fs::symlinkat(target.as_str(), &skeleton, name.as_str()).at("make a system link")?;
    }
    for name in world.trees.iter().map(String::as_str).chain(["etc"]) {
        make_dir(&skeleton, name)?;
        let flags = MoveMountFlags::empty();
        rustix::mount::move_mount(CWD, format!("/t/{name}"), &skeleton, name, flags).at("move a system directory")?;
    }
    Ok(skeleton)
}

/// An overlay: the given directory below, what is written above and under the cap. The directory is never written to.
fn given_root(context: &Context<'_>, scratch: &OwnedFd, lower: &OwnedFd) -> Result<OwnedFd> {
    attach(lower, open("/l")?).at("attach the root directory")?;
    for name in ["upper", "work"] {
        make_dir(scratch, name)?;
    }
    let mut options = vec![("lowerdir", "/l"), ("upperdir", "/s/upper"), ("workdir", "/s/work")];
    if !context.server.world.privileged {
        // The overlay's own marks need a name space of attributes that ordinary users may write.
        options.push(("userxattr", ""));
    }
    let root = new_fs("overlay", &options, ATTR_NOSUID | ATTR_NODEV).at("make the overlay")?;
    attach(&root, open("/r")?).at("attach the overlay")?;
    Ok(root)
}

fn make_dir(at: impl AsFd, name: &str) -> Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(error).at("make a directory of the root"),
    }
}

/// A root under construction.
struct Tree {
    root: OwnedFd,
    scratch: OwnedFd,
    /// The guest's id as the server numbers it.
    guest: u32,
    made: u32,
}

impl Tree {
    fn fill(mut self, context: &mut Context<'_>) -> Result<()> {
        let plan = context.plan;
        self.dev()?;
        self.proc(context)?;
        self.identity(plan)?;
        if !plan.read_only_root {
            for name in ["", "opt"] {
                self.give(Path::new(name), 0o755)?;
            }
        }
        self.private(Path::new("tmp"), STICKY, plan)?;
        self.private(Path::new("var/tmp"), STICKY, plan)?;
        self.private(&plan.guest.home, Mode::from(0o755), plan)?;
        for (tree, mount) in std::mem::take(&mut context.trees) {
            let place = make_place(self.root.as_fd(), &mount.target, tree.as_fd())
                .at(format!("make the mount point {}", mount.target.display()))?;
            attach(&tree, place).at(format!("attach the mount {}", mount.target.display()))?;
        }
        let mut dirs: Vec<&PathBuf> = plan.dirs.iter().collect();
        dirs.sort();
        for dir in dirs {
            if !plan.mounts.iter().any(|mount| mount.target == *dir) && *dir != plan.guest.home {
                self.private(dir, Mode::from(0o755), plan)?;
            }
        }
        if plan.read_only_root {
            raw::mount_setattr(self.root.as_fd(), false, ATTR_RDONLY, 0).at("make the root read-only")?;
        }
        // Both names of the root are one: the old one lies under the new one and is then taken away with all it holds.
        rustix::process::fchdir(&self.root).at("enter the root")?;
        rustix::process::pivot_root(".", ".").at("pivot the root")?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).at("leave the server's mounts")?;
        rustix::process::chdir("/").at("enter the root")
    }

    fn place(&self, path: &Path) -> Result<OwnedFd> {
        make_dirs(self.root.as_fd(), path, None).at(format!("make {}", path.display()))
    }

    /// Lets the guest own a directory of a writable root.
    fn give(&self, path: &Path, mode: u32) -> Result<()> {
        let dir = self.place(path)?;
        chown(&dir, "", self.guest).at("give a directory to the guest")?;
        let _ = mode;
        Ok(())
    }

    /// A directory that belongs to the guest and to this box alone.
    fn private(&mut self, path: &Path, mode: Mode, plan: &SandboxPlan) -> Result<()> {
        let place = self.place(path)?;
        self.made += 1;
        let name = format!("d{}", self.made);
        let _ = plan;
        let tree = self.private_tree(&name, mode)?;
        attach(tree, place).at("attach a private directory")
    }

    fn private_tree(&self, name: &str, mode: Mode) -> Result<OwnedFd> {
        rustix::fs::mkdirat(&self.scratch, name, Mode::from(0o700)).at("make a private directory")?;
        rustix::fs::chmodat(&self.scratch, name, mode, rustix::fs::AtFlags::empty()).at("open a private directory up")?;
        if mode != STICKY {
            chown(&self.scratch, name, self.guest).at("give a private directory to the guest")?;
        }
        clone_tree(&self.scratch, name, false).at("copy a private directory's mount")
    }

    fn dev(&self) -> Result<()> {
        let dev = self.place(Path::new("dev"))?;
        rustix::mount::move_mount(CWD, "/t/dev", &dev, "", MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH).at("move /dev")?;
        // No `gid=`: the usual group is mapped in no box (EINVAL). A terminal then has the group of who opened it.
        let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620")];
        let pts = new_fs("devpts", &options, ATTR_NOSUID | ATTR_NOEXEC).at("make devpts")?;
        attach(pts, self.inside("dev/pts")?).at("attach devpts")?;
        let shm = self.private_tree("shm", STICKY)?;
        raw::mount_setattr(shm.as_fd(), false, ATTR_NOEXEC, 0).at("restrict /dev/shm")?;
        attach(shm, self.inside("dev/shm")?).at("attach /dev/shm")
    }

    fn inside(&self, path: &str) -> Result<OwnedFd> {
        open_beneath(&self.root, path, OFlags::PATH).at("open a place of the box")
    }

    fn proc(&self, context: &Context<'_>) -> Result<()> {
        let world = &context.server.world;
        // Nobody sees another user's processes, init's first of all. Init itself must see all, to end them; its group may.
        let group = context.server.ids.init_group().map(|group| group.to_string());
        let mut options = vec![("hidepid", "2")];
        options.extend(group.as_deref().map(|group| ("gid", group)));
        let proc = new_fs("proc", &options, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC).map_err(|error| {
            // Without root the kernel wants an unmasked procfs in sight, which containers do not have.
            if error.raw_os_error() == Some(libc::EPERM) {
                Error::Unavailable("procfs".into())
            } else {
                Error::Step { step: "make procfs".into(), source: error }
            }
        })?;
        let place = self.place(Path::new("proc"))?;
        attach(&proc, &place).at("attach procfs")?;
        let sys = clone_tree(&proc, "sys", true).at("copy /proc/sys")?;
        raw::mount_setattr(sys.as_fd(), true, ATTR_RDONLY, 0).at("make /proc/sys read-only")?;
        attach(sys, open_beneath(&proc, "sys", OFlags::PATH).at("open /proc/sys")?).at("attach /proc/sys")?;
        for (name, dir) in &world.masks {
            let Ok(place) = open_beneath(&proc, name.as_str(), OFlags::PATH) else { continue };
            let mask = clone_tree(CWD, if *dir { "/t/empty" } else { "/t/nothing" }, false).at("copy a mask")?;
            attach(mask, place).at("mask a part of procfs")?;
        }
        Ok(())
    }

    /// Who is who, for programs that ask. In a given root its own files are kept, and the guest added.
    fn identity(&self, plan: &SandboxPlan) -> Result<()> {
        let guest = &plan.guest;
        let (name, id, home) = (&guest.name, guest.id, guest.home.display());
        let passwd = format!(
            "root:x:0:0:root:/:/bin/false\n{name}:x:{id}:{id}::{home}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
        );
        let group = format!("root:x:0:\n{name}:x:{id}:\nnogroup:x:65534:\n");
        let hosts = format!("127.0.0.1 localhost {0}\n::1 localhost {0}\n", plan.hostname);
        let dir = self.place(Path::new("run/box"))?;
        let files = [
            ("passwd", passwd.as_str()),
            ("group", &group),
            ("hosts", &hosts),
            ("hostname", &format!("{}\n", plan.hostname)),
            ("resolv.conf", ""),
        ];
        for (file, content) in files {
            make_file(&dir, file, content.as_bytes()).at("write who is who")?;
        }
        if matches!(plan.root, crate::plan::Root::Directory(_)) {
            self.add_guest(&files[..2]).at("add the guest to the root's users")?;
        }
        Ok(())
    }

    /// Appends the guest's line to `/etc/passwd` and `/etc/group` of a given root, or writes them where there are none.
    fn add_guest(&self, files: &[(&str, &str)]) -> io::Result<()> {
        let etc = make_dirs(self.root.as_fd(), Path::new("etc"), None)?;
        for (file, content) in files {
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW;
            match open_beneath(&etc, *file, flags) {
                Ok(open) => {
                    let line = content.lines().nth(1).unwrap_or_default();
                    rustix::io::write(&open, format!("{line}\n").as_bytes())?;
                }
                Err(_) => make_file(&etc, *file, content.as_bytes())?,
            }
        }
        Ok(())
    }
}
