//! What is made ahead of time: network namespaces, user namespaces, overlays and cgroups, each used once by one box.
//!
//! They are the dearest parts of a box and depend on no plan. Groups of control may come back (`Cgroups::reset`), namespaces
//! never do.

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
use crate::plan::Network;
use crate::raw;

/// How many ids of the host a box of root is given.
pub(crate) const IDS: u32 = 65_536;

/// The ids of boxes, as the server's own user namespace numbers them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ids {
    privileged: bool,
    base: u32,
}

impl Ids {
    pub(crate) fn new(privileged: bool, base: u32) -> Self {
        Self { privileged, base }
    }

    /// Outside, the guest with this id inside. Without root there is one id only, and the server is 0 to itself.
    pub(crate) fn guest(self, inside: u32) -> u32 {
        if self.privileged {
            self.base + inside
        } else {
            0
        }
    }

    fn map(self, guest: u32) -> String {
        if self.privileged {
            format!("0 {} {IDS}", self.base)
        } else {
            format!("{guest} 0 1")
        }
    }
}

/// Things kept ready.
#[derive(Debug)]
pub(crate) struct Pools {
    size: usize,
    nets: Vec<Net>,
    /// With exits; none before the first is asked for.
    egress: Vec<Net>,
    egress_wanted: bool,
    users: Vec<OwnedFd>,
    overlays: Vec<Overlays>,
    /// Views of boxes that have ended. To let go of the last mount of an overlay takes the kernel some 0.1 ms, which no box's
    /// end is to wait for.
    retired: Vec<Overlays>,
    /// How many views from here boxes have, or had until now.
    lent: usize,
    groups: Vec<Group>,
    ids: Ids,
    owner: crate::cgroup::Owner,
    /// The guest's id that pooled user namespaces are mapped for.
    guest: u32,
    /// Maps of workspace owners, see `owner_map`.
    owners: Vec<((u32, u32, u32), OwnedFd)>,
}

/// Most views that boxes have from here at once: each is a few descriptors of the server's. Further boxes make their own.
const LENT_MAX: usize = 256;

/// Most owner maps kept.
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
            guest: crate::plan::Guest::default().id,
            owners: Vec::new(),
        }
    }

    /// Makes one thing that is short. `false` when nothing is.
    pub(crate) fn refill(&mut self, template: &Template, cgroups: &Cgroups) -> bool {
        // What cannot be made now is made, or reported, when it is asked for.
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
            return new_user(&self.ids.map(self.guest))
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

    /// A network namespace, unless the box must make its own: many at once then make theirs beside each other.
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

    /// Makes sure that there are overlays for a box that is begun while nobody waits for it.
    pub(crate) fn prepare_overlays(&mut self, template: &Template) -> Result<()> {
        if self.overlays.is_empty() && self.lent < LENT_MAX {
            self.add_overlays(template)?;
        }
        Ok(())
    }

    /// Overlays, unless the box must make its own, as with networks.
    pub(crate) fn overlays(&mut self) -> Option<Overlays> {
        let overlays = self.overlays.pop();
        self.lent += usize::from(overlays.is_some());
        overlays
    }

    /// Takes the overlays of a box that has ended, to let go of them later.
    pub(crate) fn retire_overlays(&mut self, overlays: Option<Overlays>) {
        self.retired.extend(overlays);
    }

    /// Lets go of all of them now.
    pub(crate) fn drop_retired(&mut self) {
        self.lent -= self.retired.len();
        self.retired.clear();
    }

    pub(crate) fn user(&mut self, guest: u32) -> io::Result<OwnedFd> {
        if guest == self.guest
            && let Some(user) = self.users.pop()
        {
            return Ok(user);
        }
        new_user(&self.ids.map(guest))
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

    /// Takes a group back from a box that has ended.
    pub(crate) fn return_group(&mut self, cgroups: &Cgroups, name: &str) {
        // Twice the size: the one that replaced this group in the pool was made at once.
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

    /// Removes what would stay behind.
    pub(crate) fn clear(&mut self, cgroups: &Cgroups) {
        for group in self.groups.drain(..) {
            let _ = cgroups.remove(&group.name);
        }
    }

    fn new_group(&self, cgroups: &Cgroups) -> io::Result<Group> {
        cgroups.make(&self.owner.new_group())
    }

    /// A user namespace that maps a workspace's owner to the guest, for an idmapped mount: what the guest makes there belongs
    /// to the owner. Depends on the ids only, so it is kept.
    pub(crate) fn owner_map(&mut self, uid: u32, gid: u32, guest: u32) -> io::Result<&OwnedFd> {
        let key = (uid, gid, guest);
        if let Some(place) = self.owners.iter().position(|(known, _)| *known == key) {
            return Ok(&self.owners[place].1);
        }
        if self.owners.len() == OWNERS_MAX {
            self.owners.remove(0);
        }
        let outside = self.ids.guest(guest);
        let map = new_mapped(&format!("{uid} {outside} 1"), &format!("{gid} {outside} 1"))?;
        self.owners.push((key, map));
        Ok(&self.owners[self.owners.len() - 1].1)
    }
}

/// A new network namespace, owned by the server's user namespace, so that nobody in the box has powers over it.
fn new_net(template: &Template, network: Network) -> Result<Net> {
    let made = network::enter_new(network).and_then(|egress| {
        let namespace = open_ns("net").at("open the network namespace")?;
        Ok(Net { namespace, egress })
    });
    let back = raw::setns(template.net.as_fd(), libc::CLONE_NEWNET);
    back.at("return to the server's network namespace")?;
    made
}

fn new_user(map: &str) -> io::Result<OwnedFd> {
    new_mapped(map, map)
}

/// Bytes of stack for a process that does next to nothing.
const STACK: usize = 32 * 1024;

/// A mapped user namespace in which no further one can be made. A child that ends at once makes it; this process writes its
/// maps, because a process inside may not write more than its own id (EPERM).
fn new_mapped(uids: &str, gids: &str) -> io::Result<OwnedFd> {
    let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut stack = vec![0; STACK];
    let mut ends = [wait.as_raw_fd(), go.as_raw_fd()];
    // SAFETY: the function only makes system calls, by rustix, which knows no `errno`; its stack and argument are waited for.
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
        None => Err(io::Error::other("max_user_namespaces could not be set")),
    }
}

/// The child's part: a second lock behind the filter, ENOSPC for whoever gets that far, which works before the maps are
/// written; then it waits for those.
extern "C" fn lock_and_wait(ends: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the caller's argument, which it does not change.
    let [wait, go] = unsafe { *ends.cast::<[RawFd; 2]>() };
    // SAFETY: this process's own copy of the writing end, which nothing else of it uses.
    unsafe { rustix::io::close(go) };
    // SAFETY: open as long as this process lives.
    let wait = unsafe { BorrowedFd::borrow_raw(wait) };
    let locked = set_limit(c"/proc/sys/user/max_user_namespaces", b"0");
    for (limit, value) in INOTIFY_LIMITS {
        // A kernel without them has nothing to limit.
        let _ = set_limit(limit, value);
    }
    let _ = rustix::io::read(wait, &mut [0_u8]);
    locked.err().map_or(0, rustix::io::Errno::raw_os_error)
}

/// What users of a box may have to watch files with. Everything of the kind is also counted for whoever made the box's namespace,
/// who has 128 of the first for all programs.
const INOTIFY_LIMITS: [(&CStr, &[u8]); 2] = [
    (c"/proc/sys/user/max_inotify_instances", b"16"),
    (c"/proc/sys/user/max_inotify_watches", b"65536"),
];

fn set_limit(limit: &CStr, value: &[u8]) -> rustix::io::Result<()> {
    let limit = rustix::fs::open(limit, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(limit, value).map(drop)
}
