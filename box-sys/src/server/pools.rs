//! Parts of boxes that are created in advance: namespaces, overlays and cgroups.
//!
//! They take the longest time of a box's creation and do not depend on the plan. Each is used by
//! one box. Cgroups can be reused (`Cgroups::reset`), namespaces cannot.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags};

use super::overlays::Overlays;
use super::template_mounts::{Template, open_ns};
use crate::cgroup::{Cgroups, Group};
use crate::error::{At, Result};
use crate::network::{self, Net};
use crate::plan::{Guest, Network};
use crate::raw;

/// Number of host ids of a box of root.
pub(crate) const IDS: u32 = 65_536;

/// The ids of boxes in the server's user namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ids {
    privileged: bool,
    base: u32,
}

impl Ids {
    pub(crate) fn new(privileged: bool, base: u32) -> Self {
        Self { privileged, base }
    }

    /// Id of a guest in the server's user namespace.
    ///
    /// Without root, the namespace has one id, which is 0.
    pub(crate) fn guest(self, inside: u32) -> u32 {
        if self.privileged {
            self.base + inside
        } else {
            0
        }
    }

    /// Ids of a user and a group in the server's user namespace.
    pub(crate) fn of(self, guest: &Guest) -> (u32, u32) {
        (self.guest(guest.id), self.guest(guest.group))
    }

    fn map(self, inside: u32) -> String {
        if self.privileged {
            format!("0 {} {IDS}", self.base)
        } else {
            format!("{inside} 0 1")
        }
    }

    /// Maps of users and groups for a box of this guest.
    fn maps(self, (user, group): (u32, u32)) -> (String, String) {
        (self.map(user), self.map(group))
    }
}

/// A map from the owner of a workspace to a guest, each a user and a group id.
type OwnerMap = (((u32, u32), (u32, u32)), OwnedFd);

/// Parts that are ready for use.
#[derive(Debug)]
pub(crate) struct Pools {
    size: usize,
    nets: Vec<Net>,
    /// With egress. Empty until a client asks for the first one.
    egress: Vec<Net>,
    egress_wanted: bool,
    users: Vec<OwnedFd>,
    overlays: Vec<Overlays>,
    /// Overlays of ended boxes.
    ///
    /// Releasing the last mount of an overlay takes the kernel about 0.1 ms, and no box waits for
    /// that.
    retired: Vec<Overlays>,
    /// Number of pooled overlays that boxes use or that are in `retired`.
    lent: usize,
    groups: Vec<Group>,
    ids: Ids,
    owner: crate::cgroup::Owner,
    /// The user and group id for which the pooled user namespaces are mapped.
    guest: (u32, u32),
    /// The map of layers: all ids of a box.
    layer_map: Option<OwnedFd>,
    /// Maps of workspace owners; see `owner_map`.
    owners: Vec<OwnerMap>,
}

/// Most pooled overlays in use at once, because each needs several descriptors.
///
/// Further boxes create their own.
const LENT_MAX: usize = 256;

/// Most cached owner maps.
const OWNERS_MAX: usize = 32;

impl Pools {
    pub(crate) fn new(size: usize, ids: Ids, owner: crate::cgroup::Owner) -> Self {
        Self {
            size,
            nets: Vec::new(),
            egress: Vec::new(),
            egress_wanted: false,
            users: Vec::new(),
            overlays: Vec::new(),
            retired: Vec::new(),
            lent: 0,
            groups: Vec::new(),
            ids,
            owner,
            guest: (Guest::default().id, Guest::default().group),
            layer_map: None,
            owners: Vec::new(),
        }
    }

    /// Creates one missing part. Returns `false` if none is missing.
    pub(crate) fn refill(&mut self, template: &Template, cgroups: &Cgroups) -> bool {
        // If the creation fails, it is tried again, and reported, when a client needs the part.
        if self.nets.len() < self.size {
            let net = new_net(template, Network::Loopback);
            return net.map(|net| self.nets.push(net)).is_ok();
        }
        if self.egress_wanted && self.egress.len() < self.size {
            let net = new_net(template, Network::Egress);
            return net.map(|net| self.egress.push(net)).is_ok();
        }
        if self.overlays.len() < self.size && self.lent < LENT_MAX {
            return self.add_overlays(template).is_ok();
        }
        if self.retired.pop().is_some() {
            self.lent -= 1;
            return true;
        }
        if self.users.len() < self.size {
            return new_user(&self.ids.maps(self.guest))
                .map(|user| self.users.push(user))
                .is_ok();
        }
        if self.groups.len() < self.size && !cgroups.hierarchies.is_empty() {
            return self
                .new_group(cgroups)
                .map(|group| self.groups.push(group))
                .is_ok();
        }
        false
    }

    /// Takes a network namespace.
    ///
    /// Without one, the box creates its own in parallel to others.
    pub(crate) fn net(&mut self, network: Network) -> Option<Net> {
        match network {
            Network::Down => None,
            Network::Loopback => self.nets.pop(),
            Network::Egress => {
                self.egress_wanted = true;
                self.egress.pop()
            }
        }
    }

    fn add_overlays(&mut self, template: &Template) -> Result<()> {
        let overlays = Overlays::new(template)?;
        overlays.warm(template);
        self.overlays.push(overlays);
        Ok(())
    }

    /// Prepares overlays for a spare box, for which no client waits.
    pub(crate) fn prepare_overlays(&mut self, template: &Template) -> Result<()> {
        if self.overlays.is_empty() && self.lent < LENT_MAX {
            self.add_overlays(template)?;
        }
        Ok(())
    }

    /// Takes overlays. Without them, the box creates its own.
    pub(crate) fn overlays(&mut self) -> Option<Overlays> {
        let overlays = self.overlays.pop();
        self.lent += usize::from(overlays.is_some());
        overlays
    }

    /// Keeps the overlays of an ended box, to release them later.
    pub(crate) fn retire_overlays(&mut self, overlays: Option<Overlays>) {
        self.retired.extend(overlays);
    }

    /// Releases all overlays of ended boxes.
    pub(crate) fn drop_retired(&mut self) {
        self.lent -= self.retired.len();
        self.retired.clear();
    }

    pub(crate) fn user(&mut self, guest: &Guest) -> io::Result<OwnedFd> {
        let guest = (guest.id, guest.group);
        // All boxes of root have one map.
        if (guest == self.guest || self.ids.privileged)
            && let Some(user) = self.users.pop()
        {
            return Ok(user);
        }
        new_user(&self.ids.maps(guest))
    }

    /// A user namespace that maps the ids of layers to those of boxes.
    pub(crate) fn layer_map(&mut self) -> io::Result<&OwnedFd> {
        let map = match self.layer_map.take() {
            Some(map) => map,
            None => new_user(&self.ids.maps((0, 0)))?,
        };
        Ok(self.layer_map.insert(map))
    }

    pub(crate) fn group(&mut self, cgroups: &Cgroups) -> io::Result<Option<Group>> {
        if cgroups.hierarchies.is_empty() {
            return Ok(None);
        }
        self.groups
            .pop()
            .map_or_else(|| self.new_group(cgroups), Ok)
            .map(Some)
    }

    /// Returns the cgroup of an ended box to the pool, or removes it.
    pub(crate) fn return_group(&mut self, cgroups: &Cgroups, name: &str) {
        // Twice the size, because the pool has already been refilled.
        if self.groups.len() < 2 * self.size
            && cgroups.is_recyclable()
            && let Ok(mut group) = cgroups.reopen(name)
            && cgroups.reset(&group)
        {
            group.cpu_before = cgroups.usage(name).cpu.unwrap_or_default();
            self.groups.push(group);
        } else {
            let _ = cgroups.remove(name);
        }
    }

    /// Removes the pooled cgroups.
    pub(crate) fn clear(&mut self, cgroups: &Cgroups) {
        for group in self.groups.drain(..) {
            let _ = cgroups.remove(&group.name);
        }
    }

    fn new_group(&self, cgroups: &Cgroups) -> io::Result<Group> {
        cgroups.create(&self.owner.new_group())
    }

    /// A user namespace that maps the owner of a workspace to the guest.
    ///
    /// It is for an idmapped mount, in which the guest's files belong to the owner. It depends only
    /// on the ids, so it is cached.
    pub(crate) fn owner_map(
        &mut self,
        owner: (u32, u32),
        guest: (u32, u32),
    ) -> io::Result<&OwnedFd> {
        let key = (owner, guest);
        if let Some(place) = self.owners.iter().position(|(known, _)| *known == key) {
            return Ok(&self.owners[place].1);
        }
        if self.owners.len() == OWNERS_MAX {
            self.owners.remove(0);
        }
        let map = |owner: u32, guest: u32| format!("{owner} {} 1", self.ids.guest(guest));
        let map = new_mapped(&map(owner.0, guest.0), &map(owner.1, guest.1))?;
        self.owners.push((key, map));
        Ok(&self.owners[self.owners.len() - 1].1)
    }
}

/// Creates a network namespace, owned by the server's user namespace.
///
/// No process of the box has privileges over it.
fn new_net(template: &Template, network: Network) -> Result<Net> {
    let made = network::enter_new(network).and_then(|egress| {
        let namespace = open_ns("net").at("open the network namespace")?;
        Ok(Net { namespace, egress })
    });
    let back = raw::setns(template.net.as_fd(), libc::CLONE_NEWNET);
    back.at("return to the server's network namespace")?;
    made
}

fn new_user((uids, gids): &(String, String)) -> io::Result<OwnedFd> {
    new_mapped(uids, gids)
}

/// Stack of a process that calls few functions.
const STACK: usize = 32 * 1024;

/// Creates a mapped user namespace in which no further one can be created.
///
/// A short-lived child creates it. This process writes the maps, because a process inside may map
/// only its own id (EPERM).
fn new_mapped(uids: &str, gids: &str) -> io::Result<OwnedFd> {
    let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut stack = vec![0; STACK];
    let mut ends = [wait.as_raw_fd(), go.as_raw_fd()];
    // SAFETY: the function only makes system calls through rustix, which does not set `errno`. The
    // stack and the argument outlive the child.
    let pid = unsafe {
        let argument = (&raw mut ends).cast();
        raw::clone_sharing_memory(libc::CLONE_NEWUSER, &mut stack, lock_and_wait, argument)
    }?;
    let open = || -> io::Result<OwnedFd> {
        let path = format!("/proc/{pid}/ns/user");
        let user = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        fs::write(format!("/proc/{pid}/uid_map"), uids)?;
        fs::write(format!("/proc/{pid}/gid_map"), gids)?;
        Ok(user)
    };
    let made = open();
    drop((wait, go));
    let status = rustix::process::waitpid(
        rustix::process::Pid::from_raw(pid),
        rustix::process::WaitOptions::empty(),
    )?;
    match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) => made,
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("cannot set max_user_namespaces")),
    }
}

/// Code of the child.
///
/// It forbids further user namespaces with ENOSPC, in addition to the filter, and this works only
/// before the maps are written. Then it waits for the maps.
extern "C" fn lock_and_wait(ends: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the caller's argument, which the caller does not change.
    let [wait, go] = unsafe { *ends.cast::<[RawFd; 2]>() };
    // SAFETY: this process's own copy of the writing end, which it does not use otherwise.
    unsafe { rustix::io::close(go) };
    // SAFETY: open as long as this process runs.
    let wait = unsafe { BorrowedFd::borrow_raw(wait) };
    let locked = set_limit(c"/proc/sys/user/max_user_namespaces", b"0");
    for (limit, value) in INOTIFY_LIMITS {
        // A kernel without inotify has no such setting.
        let _ = set_limit(limit, value);
    }
    let _ = rustix::io::read(wait, &mut [0_u8]);
    locked.err().map_or(0, rustix::io::Errno::raw_os_error)
}

/// Inotify limits of a box.
///
/// The kernel also counts its instances for the creator of the namespace, who has 128 of them for
/// all programs.
const INOTIFY_LIMITS: [(&CStr, &[u8]); 2] = [
    (c"/proc/sys/user/max_inotify_instances", b"16"),
    (c"/proc/sys/user/max_inotify_watches", b"65536"),
];

fn set_limit(limit: &CStr, value: &[u8]) -> rustix::io::Result<()> {
    let limit = rustix::fs::open(limit, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(limit, value).map(drop)
}
