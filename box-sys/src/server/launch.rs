//! From a plan to a running box, seen from the server: what only it can do, then the fork.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use super::{RunningBox, Server, Spare};
use crate::child::{self, FinishRequest, InitMain, Resources};
use crate::error::{At, Error, Result};
use crate::mounts::{attach, clone_tree, make_place};
use crate::plan::{Limits, Mount, Root, SandboxPlan, Source, check_target};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY, Forked};
use crate::wire::{FDS_MAX, socket_pair};

/// The namespaces a box is forked into. The user namespace is entered last and the network's is made ahead; the cgroup one
/// comes once the box is in its cgroup, so that it sees itself at the root.
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;

impl Server {
    /// Makes a box, of a spare one if there is one of its shape. It answers on `reply` by itself; an error here means that
    /// there is none.
    pub(super) fn create(
        &mut self,
        plan: &SandboxPlan,
        mut fds: Vec<OwnedFd>,
        sources: usize,
        reply: OwnedFd,
    ) -> Result<()> {
        plan.validate()?;
        if sources > fds.len() {
            return Err(Error::Invalid("a descriptor for a mount is missing".into()));
        }
        let init_fds = fds.split_off(sources);
        let (lower, trees) = self.in_host_mounts(|server| server.trees(plan, &fds))?;
        let request = FinishRequest {
            plan: plan.clone(),
            trees,
            init_fds,
            reply,
        };
        if lower.is_none() && request.trees.len() + request.init_fds.len() < FDS_MAX {
            while let Some(spare) = self.take_spare(plan) {
                // One that has died meanwhile does not answer; there may be another.
                if self.assign_spare(&spare, &request)? {
                    return Ok(());
                }
            }
        }
        let pid = self.fork(
            plan,
            lower,
            |resources, init| child::run(resources, request, init),
            Some(&plan.limits),
        )?;
        self.assign(pid, plan);
        Ok(())
    }

    /// Whether a box begun for one plan can be finished for the other: everything else comes with the order.
    fn same_shape(one: &SandboxPlan, other: &SandboxPlan) -> bool {
        one.root == other.root
            && one.guest == other.guest
            && one.caps == other.caps
            && one.network == other.network
    }

    /// A box that waits for a plan like this one. Those of another shape are of no use any more.
    fn take_spare(&mut self, plan: &SandboxPlan) -> Option<Spare> {
        if !Self::same_shape(&self.shape, plan) {
            self.shape = plan.clone();
            // Their sockets close, and they end.
            self.spares.clear();
        }
        self.spares.pop()
    }

    fn assign_spare(&mut self, spare: &Spare, request: &FinishRequest) -> Result<bool> {
        if let Some(group) = &spare.group {
            self.cgroups
                .limit(group, &request.plan.limits)
                .at("set the limits of the cgroup")?;
        }
        let sent = request.send(spare.socket.as_fd()).is_ok();
        if sent {
            self.assign(spare.pid, &request.plan);
        }
        Ok(sent)
    }

    /// Begins a box of the shape last asked for, to be finished when the next plan comes. `false` if there are enough.
    pub(super) fn add_spare(&mut self) -> Result<bool> {
        if self.spares.len() >= self.spares_wanted || !matches!(self.shape.root, Root::Host) {
            return Ok(false);
        }
        let (near, far) = socket_pair().at("make a socket pair")?;
        self.pools.prepare_overlays(&self.template)?;
        let shape = self.shape.clone();
        let mut far = Some(far);
        let pid = self.fork(
            &shape,
            None,
            |resources, init| match far.take() {
                Some(far) => child::run_spare(resources, far, init),
                None => raw::exit_now(1),
            },
            None,
        )?;
        let group = self
            .boxes
            .get(&pid)
            .and_then(|running| running.group.as_deref());
        let group = group
            .map(|name| self.cgroups.reopen(name))
            .transpose()
            .at("open a cgroup again")?;
        self.spares.push(Spare {
            socket: near,
            pid,
            group,
        });
        Ok(true)
    }

    /// Forks a box's first process, which goes on with `child`.
    fn fork(
        &mut self,
        shape: &SandboxPlan,
        lower: Option<OwnedFd>,
        child: impl FnOnce(Resources<'_>, InitMain) -> Result<i32>,
        limits: Option<&Limits>,
    ) -> Result<i32> {
        let net = self.pools.net(shape.network);
        let user = self.pools.user(shape.guest.id);
        let read_only = |error: &std::io::Error| error.raw_os_error() == Some(libc::EROFS);
        let user = match user {
            Err(error) if read_only(&error) => Err(error).at(
                "make a user namespace where /proc/sys is read-only, as it is in a container that is not privileged",
            ),
            user => user.at("make a user namespace"),
        }?;
        let group = self.pools.group(&self.cgroups).at("make a cgroup")?;
        if let (Some(group), Some(limits)) = (&group, limits)
            && let Err(error) = self.cgroups.limit(group, limits)
        {
            let _ = self.cgroups.remove(&group.name);
            return Err(error).at("set the limits of the cgroup");
        }
        let v2 = group.as_ref().and_then(crate::cgroup::Group::v2);
        let overlays = self.pools.overlays();
        // SAFETY: this process has one thread.
        match unsafe { raw::fork_into(NAMESPACES, v2) } {
            Ok(Forked::Child) => {
                let resources = Resources {
                    server: self,
                    shape,
                    lower,
                    net,
                    overlays,
                    user,
                    group: group.as_ref(),
                };
                // Never returns, whatever its type says.
                child(resources, self.init)
            }
            Ok(Forked::Parent(pid, _pidfd)) => {
                let group = group.map(|group| group.name);
                self.boxes.insert(
                    pid,
                    RunningBox {
                        group,
                        owned: true,
                        has_handle: false,
                        overlays,
                    },
                );
                Ok(pid)
            }
            Err(error) => {
                self.pools.retire_overlays(overlays);
                if let Some(group) = group {
                    let _ = self.cgroups.remove(&group.name);
                }
                Err(error).at("fork the box")
            }
        }
    }

    /// Somebody has this box now.
    fn assign(&mut self, pid: i32, plan: &SandboxPlan) {
        if let Some(running) = self.boxes.get_mut(&pid) {
            running.owned = plan.owned;
            running.has_handle = true;
        }
    }

    /// Mounts into a box that is running. Its mount namespace belongs to the server's user namespace, so nobody inside can do
    /// or undo this.
    pub(super) fn add_mount(&mut self, mount: &Mount, guest: u32, fds: &[OwnedFd]) -> Result<()> {
        check_target(&mount.target)?;
        let Some((namespace, fds)) = fds.split_first() else {
            return Err(Error::Protocol("no mount namespace".into()));
        };
        let tree = self.in_host_mounts(|server| server.tree(mount, guest, fds))?;
        raw::setns(namespace.as_fd(), libc::CLONE_NEWNS).at("enter the box's mount namespace")?;
        let result = attach_inside(&tree, &mount.target);
        self.return_to_template();
        result
    }

    /// Does something where the machine's file systems are in sight. Path descriptors do not travel between mount namespaces
    /// (EINVAL), detached trees do.
    fn in_host_mounts<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        raw::setns(self.template.host_mounts.as_fd(), libc::CLONE_NEWNS)
            .at("enter the machine's overlays")?;
        let result = work(self);
        self.return_to_template();
        result
    }

    /// Or ends the server: what it would do in another mount namespace is nothing that anybody asked for.
    fn return_to_template(&self) {
        if raw::setns(self.template_mounts(), libc::CLONE_NEWNS).is_err() {
            raw::exit_now(1);
        }
    }

    #[expect(
        clippy::type_complexity,
        reason = "the root's tree, if one was given, and the other trees"
    )]
    fn trees(
        &mut self,
        plan: &SandboxPlan,
        fds: &[OwnedFd],
    ) -> Result<(Option<OwnedFd>, Vec<(OwnedFd, Mount)>)> {
        let lower = match &plan.root {
            Root::Host => None,
            Root::Directory(path) => {
                let place = open_source(path).at("open the root directory")?;
                let tree = clone_tree(&place, "", !self.template.privileged)
                    .at("copy the root directory's mount")?;
                Some(tree)
            }
        };
        let mut trees = Vec::with_capacity(plan.mounts.len());
        for mount in &plan.mounts {
            trees.push((self.tree(mount, plan.guest.id, fds)?, mount.clone()));
        }
        // Outer ones first, so that an inner one is not covered.
        trees.sort_by_key(|(_, mount)| mount.target.components().count());
        Ok((lower, trees))
    }

    /// A detached copy of a host directory's mount, restricted, and with its owner mapped to the guest.
    fn tree(&mut self, mount: &Mount, guest: u32, fds: &[OwnedFd]) -> Result<OwnedFd> {
        let place = match &mount.source {
            Source::Path(path) => open_source(path).at("open a mount's source")?,
            Source::Fd(n) => {
                let fd = fds
                    .get(*n)
                    .ok_or_else(|| Error::Invalid("a descriptor for a mount is missing".into()))?;
                reopen(fd.as_fd()).at("open a mount's source again")?
            }
        };
        // Locked parts of a tree can only be copied together, which is what an ordinary user sees. Root leaves out what is
        // mounted further down: a workspace is one file system.
        let recursive = !self.template.privileged;
        let tree = clone_tree(&place, "", recursive).at("copy a mount's source")?;
        if self.template.privileged {
            self.map_owner(&tree, mount, guest)?;
        }
        let read_only = if mount.writable { 0 } else { ATTR_RDONLY };
        raw::mount_setattr(
            tree.as_fd(),
            recursive,
            ATTR_NOSUID | ATTR_NODEV | read_only,
            0,
        )
        .at("restrict a mount")?;
        Ok(tree)
    }

    fn map_owner(&mut self, tree: &OwnedFd, mount: &Mount, guest: u32) -> Result<()> {
        let stat = rustix::fs::fstat(tree).at("look at a mount's source")?;
        if stat.st_uid == self.ids.guest(guest) {
            return Ok(());
        }
        let map = self
            .pools
            .owner_map(stat.st_uid, stat.st_gid, guest)
            .at("make a map of owners")?;
        match raw::mount_idmap(tree.as_fd(), map.as_fd()) {
            // A file system without this (an overlay, for one) can still be read as others may.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !mount.writable => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Error::Unavailable(
                "mapped owners on this file system".into(),
            )),
            other => other.at("map a mount's owner"),
        }
    }
}

fn open_source(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )?)
}

/// Opens in this mount namespace what a descriptor of another one stands for.
fn reopen(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let place = open_source(&name)?;
    let (was, is) = (rustix::fs::fstat(fd)?, rustix::fs::fstat(&place)?);
    if (was.st_dev, was.st_ino) != (is.st_dev, is.st_ino) {
        return Err(io::Error::from_raw_os_error(libc::ESTALE));
    }
    Ok(place)
}

/// The guest may be changing names right now: the place is opened without following any link, and attached to as opened.
fn attach_inside(tree: &OwnedFd, target: &Path) -> Result<()> {
    let root = rustix::fs::open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .at("open the box's root")?;
    let place = match make_place(root.as_fd(), target, tree.as_fd()) {
        Ok(place) => place,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // A read-only root: the directory is made through a second, writable mount of it that nobody else sees.
            let through = clone_tree(&root, "", false).at("copy the root's mount")?;
            raw::mount_setattr(through.as_fd(), false, 0, ATTR_RDONLY)
                .at("make the copy writable")?;
            make_place(through.as_fd(), target, tree.as_fd()).at("make the mount point")?;
            make_place(root.as_fd(), target, tree.as_fd()).at("open the mount point")?
        }
        Err(error) => return Err(error).at("make the mount point"),
    };
    attach(tree, place).at("attach the mount")
}
