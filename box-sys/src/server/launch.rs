//! From a plan to a running box: the server's part, up to the fork.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use super::disks::Disk;
use super::layers::{self, DISK_WAIT, Layers};
use super::spares::Spare;
use super::{RunningBox, Server};
use crate::child::{self, FinishRequest, InitMain, Resources};
use crate::disk_file::{self, Use};
use crate::error::{At, Error, Result};
use crate::mounts::{attach, clone_tree, create_mount_point};
use crate::plan::{Limits, Mount, SandboxPlan, Scratch, Source, check_target};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY, Forked};
use crate::volumes;
use crate::wire::{FDS_MAX, socket_pair};

/// The namespaces into which a box is forked.
///
/// The child enters the user namespace last, and the network namespace comes from the pool. It
/// creates the cgroup namespace after it has joined its cgroup, so that it sees that cgroup as the
/// root.
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;

/// Directories of the host for a new box, as detached mounts.
struct HostTrees {
    /// Directory of the private files.
    scratch: Option<OwnedFd>,
    /// Mounts of the plan, parents first.
    trees: Vec<(OwnedFd, Mount)>,
}

/// Name for the file of the box's disk.
fn disk_name(plan: &SandboxPlan) -> Option<&Path> {
    match &plan.scratch {
        Scratch::FileSystem { name, .. } => name.as_deref(),
        Scratch::Memory(_) | Scratch::File { .. } | Scratch::Directory { .. } => None,
    }
}

impl Server {
    /// Creates a box, from a spare of the same shape if possible.
    ///
    /// The box itself replies on `reply`. On an error no box exists.
    pub(super) fn create(
        &mut self,
        plan: &SandboxPlan,
        mut fds: Vec<OwnedFd>,
        sources: usize,
        reply: OwnedFd,
    ) -> Result<()> {
        plan.validate()?;
        if sources > fds.len() {
            return Err(Error::Invalid(
                "mounts: the descriptor of a source is missing".into(),
            ));
        }
        let init_fds = fds.split_off(sources);
        if let Scratch::File { path, .. } = &plan.scratch {
            // Spares may use it as a layer.
            self.forget_layer(path);
        }
        let (HostTrees { scratch, trees }, sources) =
            self.in_host_mounts(|server| Ok((server.trees(plan, &fds)?, layers::sources(plan))))?;
        let request = FinishRequest {
            plan: plan.clone(),
            trees,
            init_fds,
            reply,
        };
        self.shapes.end_replaced(plan, &sources);
        // A spare cannot make the overlay of a mount any more.
        if scratch.is_none()
            && plan.overlay_mount().is_none()
            && request.trees.len() + request.init_fds.len() < FDS_MAX
        {
            while let Some(spare) = self.shapes.take(plan) {
                // A spare that has died does not take the request. Try the next one.
                if self.assign_spare(&spare, &request)? {
                    return Ok(());
                }
            }
        }
        let created = self.create_new(plan, scratch, request);
        if created.is_err() {
            self.shapes.give_up(plan);
            self.drop_unused(&layers::disks(&plan.layers));
        }
        created
    }

    /// Creates a box without a spare.
    fn create_new(
        &mut self,
        plan: &SandboxPlan,
        scratch: Option<OwnedFd>,
        request: FinishRequest,
    ) -> Result<()> {
        let mut layers = self.layers(plan)?;
        if let Some((tree, _)) = request.trees.iter().find(|(_, mount)| mount.overlay) {
            layers.by_descriptor &= self.layers.takes_descriptors(tree.as_fd());
        }
        let mut disk = self.new_disk(plan)?;
        if let (Some(disk), Some(name)) = (&mut disk, disk_name(plan)) {
            self.disks.name(&mut disk.handle, name)?;
        }
        let pid = self.fork(
            plan,
            (layers, scratch, disk),
            |resources, init| child::run(resources, request, init),
            Some(&plan.limits),
        )?;
        self.assign(pid, plan);
        Ok(())
    }

    /// Drops the mount of a layer, and ends the spares on it.
    fn forget_layer(&mut self, path: &Path) {
        self.layers.forget(path);
        self.shapes.forget_layer(path);
    }

    /// Drops the mounts of layers that no box uses.
    pub(super) fn drop_unused(&mut self, layers: &[PathBuf]) {
        for path in layers {
            let uses =
                |running: &RunningBox| running.assigned && running.disk_layers.contains(path);
            if !self.boxes.values().any(uses) {
                self.forget_layer(path);
            }
        }
    }

    /// Makes the disk of a box, if its plan asks for one.
    fn new_disk(&mut self, plan: &SandboxPlan) -> Result<Option<Disk>> {
        match plan.scratch {
            Scratch::FileSystem { caps, .. } => {
                self.in_host_mounts(|server| server.disks.make(caps).map(Some))
            }
            Scratch::Memory(_) | Scratch::File { .. } | Scratch::Directory { .. } => Ok(None),
        }
    }

    fn assign_spare(&mut self, spare: &Spare, request: &FinishRequest) -> Result<bool> {
        if let Some(group) = &spare.group {
            self.cgroups
                .limit(group, &request.plan.limits)
                .at("set the limits of the cgroup")?;
        }
        let running = self.boxes.get_mut(&spare.pid);
        let disk = running.and_then(|running| running.disk.as_mut());
        if let (Some(disk), Some(name)) = (disk, disk_name(&request.plan)) {
            self.disks.name(disk, name)?;
        }
        let sent = request.send(spare.socket.as_fd()).is_ok();
        if sent {
            self.assign(spare.pid, &request.plan);
        }
        Ok(sent)
    }

    /// Prepares a spare with the shape of one of the last plans.
    ///
    /// Returns `false` if enough exist.
    pub(super) fn add_spare(&mut self) -> Result<bool> {
        let Some(shape) = self.shapes.short().cloned() else {
            return Ok(false);
        };
        let added = self.add_spare_of(&shape);
        if added.is_err() {
            self.shapes.give_up(&shape);
        }
        // The last box on a layer may have ended before the spare was made.
        self.drop_unused(&layers::disks(&shape.layers));
        added
    }

    fn add_spare_of(&mut self, shape: &SandboxPlan) -> Result<bool> {
        let (near, far) = socket_pair().at("create a socket pair")?;
        self.pools.prepare_overlays(&self.template)?;
        let mut layers = self.layers(shape)?;
        let sources = std::mem::take(&mut layers.sources);
        let disk = self.new_disk(shape)?;
        let mut far = Some(far);
        let pid = self.fork(
            shape,
            (layers, None, disk),
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
            .at("reopen a cgroup")?;
        let spare = Spare {
            socket: near,
            pid,
            group,
            sources,
        };
        self.shapes.add(shape, spare);
        Ok(true)
    }

    /// Forks a box's first process, which runs `child`.
    fn fork(
        &mut self,
        shape: &SandboxPlan,
        (layers, scratch, disk): (Layers, Option<OwnedFd>, Option<Disk>),
        child: impl FnOnce(Resources<'_>, InitMain) -> Result<i32>,
        limits: Option<&Limits>,
    ) -> Result<i32> {
        let net = self.pools.net(shape.network);
        let user = self.pools.user(&shape.guest);
        let read_only = |error: &std::io::Error| error.raw_os_error() == Some(libc::EROFS);
        let user = match user {
            Err(error) if read_only(&error) => Err(error).at(
                "create a user namespace: /proc/sys is read-only, as in an unprivileged container",
            ),
            user => user.at("create a user namespace"),
        }?;
        let group = self.pools.group(&self.cgroups).at("create a cgroup")?;
        if let (Some(group), Some(limits)) = (&group, limits)
            && let Err(error) = self.cgroups.limit(group, limits)
        {
            let _ = self.cgroups.remove(&group.name);
            return Err(error).at("set the limits of the cgroup");
        }
        let v2 = group.as_ref().and_then(crate::cgroup::Group::v2);
        let overlays = self.pools.overlays();
        let (mount, disk) = disk.map(|disk| (disk.mount, disk.handle)).unzip();
        let scratch = scratch.or(mount);
        // SAFETY: this process has a single thread.
        match unsafe { raw::fork_into(NAMESPACES, v2) } {
            Ok(Forked::Child) => {
                let resources = Resources {
                    server: self,
                    shape,
                    layers,
                    scratch,
                    net,
                    overlays,
                    user,
                    group: group.as_ref(),
                };
                // `child` never returns in this process.
                child(resources, self.init)
            }
            Ok(Forked::Parent(pid, _pidfd)) => {
                let running = RunningBox {
                    group: group.map(|group| group.name),
                    owned: true,
                    assigned: false,
                    has_handle: false,
                    overlays,
                    disk,
                    disk_layers: layers::disks(&shape.layers),
                };
                self.boxes.insert(pid, running);
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

    /// Records that a client has a handle of this box.
    fn assign(&mut self, pid: i32, plan: &SandboxPlan) {
        if let Some(running) = self.boxes.get_mut(&pid) {
            running.owned = plan.owned;
            running.assigned = true;
            running.has_handle = true;
        }
    }

    /// Mounts into a running box.
    ///
    /// The server's user namespace owns the box's mount namespace, so no process of the box can
    /// mount or unmount.
    pub(super) fn add_mount(
        &mut self,
        mount: &Mount,
        guest: (u32, u32),
        fds: &[OwnedFd],
    ) -> Result<()> {
        check_target(&mount.target)?;
        if mount.overlay {
            return Err(Error::Invalid(
                "mounts: a running box cannot get an overlay".into(),
            ));
        }
        let Some((namespace, fds)) = fds.split_first() else {
            return Err(Error::Protocol("no mount namespace in the request".into()));
        };
        let tree = self.in_host_mounts(|server| server.tree(mount, guest, fds))?;
        raw::setns(namespace.as_fd(), libc::CLONE_NEWNS).at("enter the box's mount namespace")?;
        let result = attach_inside(&tree, &mount.target);
        self.return_to_template();
        result
    }

    /// Runs `work` in the mount namespace with the host's file systems.
    ///
    /// Path descriptors do not work in another mount namespace (EINVAL); detached trees do.
    pub(super) fn in_host_mounts<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        raw::setns(self.template.host_mounts.as_fd(), libc::CLONE_NEWNS)
            .at("enter the host's mount namespace")?;
        let result = work(self);
        self.return_to_template();
        result
    }

    /// Returns to the template's mount namespace, or exits.
    ///
    /// The server must not run in any other mount namespace.
    pub(super) fn return_to_template(&self) {
        if raw::setns(self.template_mounts(), libc::CLONE_NEWNS).is_err() {
            raw::exit_now(1);
        }
    }

    fn trees(&mut self, plan: &SandboxPlan, fds: &[OwnedFd]) -> Result<HostTrees> {
        let scratch = match &plan.scratch {
            Scratch::Memory(_) | Scratch::FileSystem { .. } => None,
            Scratch::Directory { path, .. } => Some(self.scratch_tree(path)?),
            Scratch::File { path, .. } => Some(disk_file::mount(path, Use::Upper, DISK_WAIT)?),
        };
        let mut trees = Vec::with_capacity(plan.mounts.len());
        for mount in &plan.mounts {
            let guest = (plan.guest.id, plan.guest.group);
            trees.push((self.tree(mount, guest, fds)?, mount.clone()));
        }
        // Parents first, so that they do not cover mounts below them.
        trees.sort_by_key(|(_, mount)| mount.target.components().count());
        Ok(HostTrees { scratch, trees })
    }

    /// Opens the image and the layers of a box.
    fn layers(&mut self, plan: &SandboxPlan) -> Result<Layers> {
        if plan.has_overlay() {
            return self.in_host_mounts(|server| {
                let privileged = server.template.privileged;
                server.layers.open(plan, privileged, &mut server.pools)
            });
        }
        Ok(Layers::default())
    }

    /// Clones a host directory for the private files of a box.
    fn scratch_tree(&self, path: &Path) -> Result<OwnedFd> {
        let place = open_source(path).at("open the directory of a disk")?;
        let recursive = !self.template.privileged;
        let tree = clone_tree(&place, "", recursive).at("clone the directory of a disk")?;
        raw::mount_setattr(tree.as_fd(), recursive, ATTR_NOSUID | ATTR_NODEV, 0)
            .at("restrict a disk")?;
        Ok(tree)
    }

    /// Clones a host directory as a restricted mount with mapped owner.
    pub(super) fn tree(
        &mut self,
        mount: &Mount,
        guest: (u32, u32),
        fds: &[OwnedFd],
    ) -> Result<OwnedFd> {
        // An ordinary user can only clone a tree with its submounts, because they are locked. Root
        // leaves out submounts, so that a workspace is one file system.
        let recursive = !self.template.privileged;
        let clone = |place: OwnedFd| clone_tree(&place, "", recursive).at("clone a mount's source");
        let tree = match &mount.source {
            Source::Path(path) => clone(open_source(path).at("open a mount's source")?)?,
            Source::Fd(n) => {
                let fd = fds.get(*n).ok_or_else(|| {
                    Error::Invalid("mounts: the descriptor of a source is missing".into())
                })?;
                clone(reopen(fd.as_fd()).at("reopen a mount's source")?)?
            }
            Source::Volume { file, sub_path } => {
                volumes::tree(file, sub_path.as_deref(), mount.writable)?
            }
        };
        if self.template.privileged {
            self.map_owner(&tree, mount, guest)?;
        }
        let read_only = if mount.writable && !mount.overlay {
            0
        } else {
            ATTR_RDONLY
        };
        raw::mount_setattr(
            tree.as_fd(),
            recursive,
            ATTR_NOSUID | ATTR_NODEV | read_only,
            0,
        )
        .at("restrict a mount")?;
        Ok(tree)
    }

    pub(super) fn map_owner(
        &mut self,
        tree: &OwnedFd,
        mount: &Mount,
        guest: (u32, u32),
    ) -> Result<()> {
        let stat = rustix::fs::fstat(tree).at("read a mount source's metadata")?;
        if stat.st_uid == self.ids.guest(guest.0) {
            return Ok(());
        }
        let map = self
            .pools
            .owner_map((stat.st_uid, stat.st_gid), guest)
            .at("create a map of owners")?;
        match raw::mount_idmap(tree.as_fd(), map.as_fd()) {
            // Some file systems, such as overlays, do not support this. A read-only mount can still
            // be read with the permissions of other users.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !mount.writable => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Error::Unavailable(
                "mapped owners on this file system".into(),
            )),
            other => other.at("map a mount's owner"),
        }
    }
}

pub(super) fn open_source(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )?)
}

/// Reopens a descriptor of another mount namespace in this one.
pub(super) fn reopen(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let place = open_source(&name)?;
    let (was, is) = (rustix::fs::fstat(fd)?, rustix::fs::fstat(&place)?);
    if (was.st_dev, was.st_ino) != (is.st_dev, is.st_ino) {
        return Err(io::Error::from_raw_os_error(libc::ESTALE));
    }
    Ok(place)
}

/// Attaches a mount in a running box.
///
/// The guest may change names at the same time. The path is opened without following links, and the
/// mount is attached to the open descriptor.
fn attach_inside(tree: &OwnedFd, target: &Path) -> Result<()> {
    let root = rustix::fs::open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .at("open the box's root")?;
    let place = match create_mount_point(root.as_fd(), target, tree.as_fd()) {
        Ok(place) => place,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // For a read-only root, create the directory through a second, writable mount that no
            // other process sees.
            let through = clone_tree(&root, "", false).at("clone the root's mount")?;
            raw::mount_setattr(through.as_fd(), false, 0, ATTR_RDONLY)
                .at("make the copy writable")?;
            create_mount_point(through.as_fd(), target, tree.as_fd())
                .at("create the mount point")?;
            create_mount_point(root.as_fd(), target, tree.as_fd()).at("open the mount point")?
        }
        Err(error) => return Err(error).at("create the mount point"),
    };
    attach(tree, place).at("attach the mount")
}
