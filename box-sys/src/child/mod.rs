//! The first process of a box, from the fork to its init.
//!
//! The order of steps makes it safe. The process builds everything with the server's privileges and
//! then enters a user namespace that owns none of it. Even a compromised init cannot remount,
//! unmount, change the host name or add an interface.

mod overlay;
mod root;

pub(crate) use self::root::UPPER;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, PidfdFlags, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::cgroup::Group;
use crate::error::{At, Error, Result};
use crate::init::{Init, Outer};
use crate::network::{self, EgressCookies, Net};
use crate::plan::{Guest, Mount, SandboxPlan};
use crate::raw;
use crate::server::Server;
use crate::server::layers::Layers;
use crate::server::overlays::Overlays;
use crate::server::template_mounts::open_ns;
use crate::wire::{Reply, next_length, receive_message, send_message};

/// Main function of a box's first process.
///
/// The function runs while the box is built and prepares state that needs no plan. It returns the
/// closure that runs when the box is complete. The box ends when the closure returns.
pub type InitMain = fn() -> Box<dyn FnOnce(Init)>;

/// Resources for a new box.
pub(crate) struct Resources<'a> {
    pub(crate) server: &'a Server,
    /// The plan's shape. Only the fields that `same_shape` compares are valid.
    pub(crate) shape: &'a SandboxPlan,
    /// The image and the snapshots below the private files.
    pub(crate) layers: Layers,
    /// File system or directory of the private files, if they are not in memory.
    pub(crate) scratch: Option<OwnedFd>,
    /// Network namespace, if the pool had one.
    pub(crate) net: Option<Net>,
    /// Overlays, if the pool had them.
    pub(crate) overlays: Option<Overlays>,
    pub(crate) user: OwnedFd,
    pub(crate) group: Option<&'a Group>,
}

/// The plan for a prepared box, with its descriptors.
#[derive(Debug)]
pub(crate) struct FinishRequest {
    pub(crate) plan: SandboxPlan,
    /// Host directories, parents first.
    pub(crate) trees: Vec<(OwnedFd, Mount)>,
    pub(crate) init_fds: Vec<OwnedFd>,
    /// Socket on which the client waits for the reply.
    pub(crate) reply: OwnedFd,
}

/// A box that waits for its plan.
struct PreparedBox {
    tree: root::RootBuilder,
    pidfd: OwnedFd,
    outer: Outer,
    /// `oom_score_adj` of this process.
    oom_score: OwnedFd,
    /// OOM events of the cgroup, if the kernel counts them.
    oom_events: Option<OwnedFd>,
    /// Egress sockets of its network.
    egress: Vec<OwnedFd>,
}

/// Builds the box around this process, replies to the client, and runs init.
pub(crate) fn run(mut resources: Resources<'_>, request: FinishRequest, main: InitMain) -> ! {
    let prepared = prepare(&mut resources, &request.trees).and_then(|prepared| {
        let trees = request.trees.iter().map(|(tree, _)| tree);
        let more = trees.chain(&request.init_fds).chain([&request.reply]);
        close_inherited(&resources, &prepared, more)?;
        Ok(prepared)
    });
    match prepared {
        Ok(prepared) => finish_and_run(&resources, prepared, request, main()),
        Err(error) => fail(&request.reply, &error),
    }
}

/// Completes the box and runs init.
fn finish_and_run(
    resources: &Resources<'_>,
    prepared: PreparedBox,
    request: FinishRequest,
    main: Box<dyn FnOnce(Init)>,
) -> ! {
    let Ok(reply) = raw::duplicate(request.reply.as_fd()) else {
        raw::exit_now(1)
    };
    match finish(resources, prepared, request) {
        Ok(init) => {
            drop(reply);
            main(init);
            std::process::exit(0)
        }
        Err(error) => fail(&reply, &error),
    }
}

fn fail(reply: &OwnedFd, error: &Error) -> ! {
    let _ = send_message(reply.as_fd(), &Reply::from_error(error), &[]);
    raw::exit_now(1)
}

// Functions before `main` are not inlined, because their stack would stay allocated in every box.

/// Closes inherited descriptors that the box no longer needs.
#[inline(never)]
fn close_inherited<'a>(
    resources: &'a Resources<'_>,
    prepared: &'a PreparedBox,
    more: impl Iterator<Item = &'a OwnedFd>,
) -> Result<()> {
    let keep = [
        &prepared.pidfd,
        &prepared.outer.user,
        &prepared.outer.mounts,
        &prepared.outer.upper,
        &prepared.oom_score,
        &resources.user,
        &resources.server.pidfd,
    ];
    let keep = keep
        .into_iter()
        .chain(&prepared.oom_events)
        .chain(&prepared.egress);
    let keep = keep.chain(prepared.tree.descriptors()).chain(more);
    close_all_but(keep.map(AsRawFd::as_raw_fd).collect())
}

/// Prepares a box without a plan, waits for the plan, and completes the box.
pub(crate) fn run_spare(mut resources: Resources<'_>, socket: OwnedFd, main: InitMain) -> ! {
    let prepared = match prepare(&mut resources, &[]) {
        Ok(prepared) => prepared,
        Err(error) => {
            // If a plan has already arrived, its client receives the error.
            if let Ok(true) = readable_now(&socket)
                && let Ok(Some(request)) = FinishRequest::receive(socket.as_fd())
            {
                let _ = send_message(request.reply.as_fd(), &Reply::from_error(&error), &[]);
            }
            raw::exit_now(1)
        }
    };
    // The inherited descriptors include the sockets of other spares. Those spares would not see the
    // server close them.
    if close_inherited(&resources, &prepared, [&socket].into_iter()).is_err() {
        raw::exit_now(1);
    }
    let main = main();
    // The receive also ends when the server exits. The spare then exits as well.
    let Ok(Some(request)) = FinishRequest::receive(socket.as_fd()) else {
        raw::exit_now(0)
    };
    drop(socket);
    finish_and_run(&resources, prepared, request, main)
}

#[inline(never)]
fn prepare(resources: &mut Resources<'_>, trees: &[(OwnedFd, Mount)]) -> Result<PreparedBox> {
    // The name only helps operators on the host.
    let _ = rustix::thread::set_name(c"box-init");
    let server = resources.server;
    if let Some(group) = resources.group {
        group.enter().at("enter the cgroup")?;
    }
    // After joining the cgroup, so that the box sees it as the root.
    raw::unshare(libc::CLONE_NEWCGROUP).at("unshare the cgroup namespace")?;
    let egress = match resources.net.take() {
        Some(net) => raw::setns(net.namespace.as_fd(), libc::CLONE_NEWNET)
            .map(|()| net.egress)
            .at("enter the network namespace")?,
        None => network::enter_new(resources.shape.network)?,
    };
    let this = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(this, PidfdFlags::empty()).at("open a pidfd")?;
    // While the host's procfs is still mounted.
    let mounts = open_ns("mnt").at("open the mount namespace")?;
    let oom_score = rustix::fs::open(
        "/proc/self/oom_score_adj",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let oom_score = oom_score.at("open the OOM score")?;
    let oom_events = resources
        .group
        .and_then(|group| server.cgroups.oom_file(&group.name));
    let (tree, upper) = root::prepare(resources, trees)?;
    let outer = Outer {
        user: server.template.user.try_clone().at("duplicate")?,
        mounts,
        upper,
    };
    silence_stdio().at("open /dev/null")?;
    for (resource, most) in LIMITS {
        limit(resource, most).at("lower a resource limit")?;
    }
    // The kernel delivers a guest's signal to pid 1 only if pid 1 handles it. The handlers of the
    // standard library have a small stack, and a second signal would overflow it and end the
    // process.
    raw::reset_signal_handlers();
    // A new session has no access to the server's terminal.
    rustix::process::setsid().at("start a session")?;
    // Loading takes long and is the same for every box, so it happens before the plan arrives. The
    // filter allows the remaining steps.
    rustix::thread::set_no_new_privs(true).at("set no_new_privs")?;
    raw::load_filter(&server.filter).at("load the seccomp filter")?;
    Ok(PreparedBox {
        tree,
        pidfd,
        outer,
        oom_score,
        oom_events,
        egress,
    })
}

/// Limits that all commands inherit.
///
/// A `Core` limit of 1 is below the size of any core file. It is also the only value at which the
/// kernel starts no crash handler. A handler would run on the host as root with data of the guest.
const LIMITS: [(Resource, u64); 5] = [
    (Resource::Core, 1),
    (Resource::Rtprio, 0),
    (Resource::Nice, 0),
    (Resource::Memlock, 8 << 20),
    (Resource::Sigpending, 4096),
];

/// Lowers a soft and hard limit to `most`. Keeps a lower value.
fn limit(resource: Resource, most: u64) -> rustix::io::Result<()> {
    let before = rustix::process::getrlimit(resource).maximum;
    let value = Some(before.map_or(most, |before| before.min(most)));
    let new = Rlimit {
        current: value,
        maximum: value,
    };
    rustix::process::setrlimit(resource, new)
}

#[inline(never)]
fn finish(
    resources: &Resources<'_>,
    prepared: PreparedBox,
    request: FinishRequest,
) -> Result<Init> {
    let server = resources.server;
    let PreparedBox {
        tree,
        pidfd,
        outer,
        oom_score,
        oom_events,
        egress,
    } = prepared;
    let FinishRequest {
        plan,
        trees,
        init_fds: fds,
        reply,
    } = request;
    let workspace = tree
        .workspace_device()
        .at("read the workspace's metadata")?;
    tree.finish(&plan, &trees)?;
    rustix::system::sethostname(plan.hostname.as_bytes()).at("set the host name")?;

    raw::setns(resources.user.as_fd(), libc::CLONE_NEWUSER).at("enter the user namespace")?;
    let two_uids = server.template.privileged;
    become_init(two_uids, &plan.guest)?;
    let abi = if plan.landlock {
        server.primitives.landlock
    } else {
        0
    };
    let landlock = crate::init::ruleset(&plan, abi).at("create the Landlock ruleset")?;
    drop_capabilities(two_uids)?;
    let hidden = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    hidden.at("become non-dumpable")?;
    if plan.owned {
        end_with_server(&server.pidfd)?;
    }
    raw::load_filter(&server.closing).at("load the closing seccomp filter")?;

    let mut missing = server.primitives.missing();
    if !resources.layers.has_owners {
        missing.push(crate::probe::IMAGE_OWNERS.into());
    }
    let ready = Reply::Ready {
        cgroup: resources.group.map(|group| group.name.clone()),
        missing: missing.clone(),
        cpu_before: resources
            .group
            .map_or(Duration::ZERO, |group| group.cpu_before),
        egress: EgressCookies::of(&egress).at("read the egress cookies")?,
        workspace,
    };
    let mut fds_sent = vec![pidfd.as_fd(), outer.mounts.as_fd(), outer.upper.as_fd()];
    fds_sent.extend(egress.iter().map(AsFd::as_fd));
    send_message(reply.as_fd(), &ready, &fds_sent)?;
    drop(fds_sent);
    drop((pidfd, reply, trees));
    for last in [&resources.user, &server.pidfd] {
        let fd = last.as_raw_fd();
        // SAFETY: the owners are copies of the server's structures in this process. They are never
        // dropped, because init does not return.
        unsafe { raw::close_between(fd, fd) }.at("close descriptors")?;
    }
    Ok(Init::new(
        plan, fds, outer, egress, two_uids, missing, landlock, oom_score, oom_events,
    ))
}

impl FinishRequest {
    /// Sends the request to a spare box.
    pub(crate) fn send(&self, socket: BorrowedFd<'_>) -> Result<()> {
        let mounts: Vec<&Mount> = self.trees.iter().map(|(_, mount)| mount).collect();
        let mut fds = vec![self.reply.as_fd()];
        fds.extend(self.trees.iter().map(|(tree, _)| tree.as_fd()));
        fds.extend(self.init_fds.iter().map(AsFd::as_fd));
        send_message(socket, &(&self.plan, mounts), &fds)
    }

    #[inline(never)]
    fn receive(socket: BorrowedFd<'_>) -> Result<Option<Self>> {
        // No larger than needed, because the box keeps the memory that a spare touches.
        let mut buffer = vec![0; next_length(socket).at("wait for a request")?];
        let message = receive_message::<(SandboxPlan, Vec<Mount>)>(socket, &mut buffer)?;
        let Some(((plan, mounts), mut fds)) = message else {
            return Ok(None);
        };
        if fds.len() < 1 + mounts.len() {
            return Err(Error::Protocol("request without descriptors".into()));
        }
        let init_fds = fds.split_off(1 + mounts.len());
        let trees = fds.drain(1..).zip(mounts).collect();
        Ok(fds.pop().map(|reply| Self {
            plan,
            trees,
            init_fds,
            reply,
        }))
    }
}

/// Ends this process when the server ends.
///
/// The kernel clears this setting when the ids change, so the call comes after that.
fn end_with_server(server: &OwnedFd) -> Result<()> {
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    set.at("set the parent death signal")?;
    // A server that ended earlier sends no signal.
    if readable_now(server).at("check the server")? {
        return Err(Error::ServerGone);
    }
    Ok(())
}

/// Whether a read would not block. For a pidfd: whether the process has ended.
fn readable_now(fd: &OwnedFd) -> std::io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    Ok(rustix::event::poll(&mut fds, Some(&now))? > 0)
}

fn silence_stdio() -> std::io::Result<()> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

/// Id of init beside a guest with id 0.
const BESIDE_ROOT: u32 = *crate::plan::RESERVED_IDS.start();

/// Switches to the ids of init.
///
/// With two mapped ids, init is 0, or another id beside a guest with id 0: it owns nothing but can
/// become the guest. With one, init is the guest.
fn become_init(two_uids: bool, guest: &Guest) -> Result<()> {
    use rustix::process::{Gid, Uid};
    let (user, group) = match (two_uids, guest.id) {
        (true, 0) => (BESIDE_ROOT, BESIDE_ROOT),
        (true, _) => (0, 0),
        (false, _) => (guest.id, guest.group),
    };
    if two_uids {
        rustix::thread::set_thread_groups(&[]).at("drop supplementary groups")?;
    }
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(group));
    rustix::thread::set_thread_res_gid(gid, gid, gid).at("take init's group")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).at("take init's user")
}

/// Capabilities of init, in a user namespace that owns nothing.
///
/// Init needs them to become the guest and to kill the guest's processes. With one id it needs
/// none.
fn init_capabilities(two_uids: bool) -> CapabilitySet {
    if two_uids {
        CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::KILL
    } else {
        CapabilitySet::empty()
    }
}

/// Last capability of the oldest supported kernel (`CAP_CHECKPOINT_RESTORE`, 5.9).
const CAP_LAST: libc::c_ulong = 40;

/// Drops every capability that init does not need, and verifies it.
fn drop_capabilities(two_uids: bool) -> Result<()> {
    // noroot, no ambient capabilities and no keepcaps, each locked.
    const SECURE_BITS: libc::c_ulong = 0x01 | 0x02 | 0x20 | 0x40 | 0x80;
    raw::prctl(libc::PR_SET_SECUREBITS, SECURE_BITS).at("lock the secure bits")?;
    // Every successful drop proves itself. The first failure must be the first unknown number.
    let unknown = (0..64).find_map(|n| {
        raw::prctl(libc::PR_CAPBSET_DROP, n)
            .err()
            .map(|error| (n, error))
    });
    let bounded = !matches!(&unknown, Some((n, error)) if *n > CAP_LAST && error.raw_os_error() == Some(libc::EINVAL));
    let init_caps = init_capabilities(two_uids);
    let sets = CapabilitySets {
        effective: init_caps,
        permitted: init_caps,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets).at("drop capabilities")?;
    let now = rustix::thread::capabilities(None).at("read capabilities")?;
    if now != sets || bounded || !rustix::thread::no_new_privs().at("read no_new_privs")? {
        return Err(Error::Unavailable("dropping capabilities".into()));
    }
    Ok(())
}

/// Closes all descriptors from 3 on, except those in the list.
pub(crate) fn close_all_but(mut keep: Vec<RawFd>) -> Result<()> {
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep {
        if fd > first {
            // SAFETY: as below.
            unsafe { raw::close_between(first, fd - 1) }.at("close descriptors")?;
        }
        first = fd + 1;
    }
    // SAFETY: the owners are forgotten, or on the server's stack, to which this process never
    // returns.
    unsafe { raw::close_from(first) }.at("close descriptors")
}
