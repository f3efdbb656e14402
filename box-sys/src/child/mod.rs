//! The first process of a box, from the fork to its init: one step after another, each of which either works or ends it.
//!
//! The order is what makes it safe. Everything is built with the server's powers; then a user namespace is entered that owns
//! nothing of it. So even an init that has been taken over cannot remount, unmount, rename the host or add an interface.

mod root;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, PidfdFlags, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::cgroup::Group;
use crate::error::{At, Error, Result};
use crate::init::{Init, OuterNamespaces};
use crate::network::{self, EgressCookies, Net};
use crate::plan::{Mount, SandboxPlan};
use crate::raw;
use crate::server::Server;
use crate::server::overlays::Overlays;
use crate::server::template_mounts::open_ns;
use crate::wire::{Reply, next_length, receive_message, send_message};

/// What a box's first process does. It is called while the box is being built, to make ready what needs no plan, and gives what
/// to go on with once the box is closed behind it. The box ends when that returns.
pub type InitMain = fn() -> Box<dyn FnOnce(Init)>;

/// What a box is begun with.
pub(crate) struct Resources<'a> {
    pub(crate) server: &'a Server,
    /// A plan of which only the parts count that `Server::same_shape` compares.
    pub(crate) shape: &'a SandboxPlan,
    /// The given root directory.
    pub(crate) lower: Option<OwnedFd>,
    /// The network namespace, if there is one ready.
    pub(crate) net: Option<Net>,
    /// Its overlays, if they are ready.
    pub(crate) overlays: Option<Overlays>,
    pub(crate) user: OwnedFd,
    pub(crate) group: Option<&'a Group>,
}

/// What a box is finished with.
#[derive(Debug)]
pub(crate) struct FinishRequest {
    pub(crate) plan: SandboxPlan,
    /// Host directories, the outer ones first.
    pub(crate) trees: Vec<(OwnedFd, Mount)>,
    pub(crate) init_fds: Vec<OwnedFd>,
    /// On which the caller waits.
    pub(crate) reply: OwnedFd,
}

/// A box that only lacks its order.
struct PreparedBox {
    tree: root::RootBuilder,
    pidfd: OwnedFd,
    outer: OuterNamespaces,
    /// What this process is worth when memory runs out.
    oom_score: OwnedFd,
    /// How often it did, if somebody counts that.
    oom_events: Option<OwnedFd>,
    /// The sockets at the exits of its network.
    egress: Vec<OwnedFd>,
}

/// Builds the box around this process, tells the caller, and becomes its init.
pub(crate) fn run(mut resources: Resources<'_>, request: FinishRequest, main: InitMain) -> ! {
    let prepared = prepare(&mut resources).and_then(|prepared| {
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

/// Closes the box and becomes its init.
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

// What is called on the way to `main` is not inlined: its part of the stack would stay with the box for good.

/// Closes what was inherited, all but what the box is still to be finished with.
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

/// Builds a box as far as it goes without a plan, waits for one, and goes on.
pub(crate) fn run_spare(mut resources: Resources<'_>, socket: OwnedFd, main: InitMain) -> ! {
    let prepared = match prepare(&mut resources) {
        Ok(prepared) => prepared,
        Err(error) => {
            // An order may have come already; whoever sent it shall learn why.
            if let Ok(true) = readable_now(&socket)
                && let Ok(Some(request)) = FinishRequest::receive(socket.as_fd())
            {
                let _ = send_message(request.reply.as_fd(), &Reply::from_error(&error), &[]);
            }
            raw::exit_now(1)
        }
    };
    // Other spares' sockets are among what was inherited; kept open here, their ends would never be noticed.
    if close_inherited(&resources, &prepared, [&socket].into_iter()).is_err() {
        raw::exit_now(1);
    }
    let main = main();
    // The end of the server is the end of what waits for it.
    let Ok(Some(request)) = FinishRequest::receive(socket.as_fd()) else {
        raw::exit_now(0)
    };
    drop(socket);
    finish_and_run(&resources, prepared, request, main)
}

#[inline(never)]
fn prepare(resources: &mut Resources<'_>) -> Result<PreparedBox> {
    // For people who look at the machine; costs nothing to get wrong.
    let _ = rustix::thread::set_name(c"box-init");
    let server = resources.server;
    if let Some(group) = resources.group {
        group.enter().at("enter the cgroup")?;
    }
    // After that, so that the box sees its own group as the root.
    raw::unshare(libc::CLONE_NEWCGROUP).at("unshare the cgroup namespace")?;
    let egress = match resources.net.take() {
        Some(net) => raw::setns(net.namespace.as_fd(), libc::CLONE_NEWNET)
            .map(|()| net.egress)
            .at("enter the network namespace")?,
        None => network::enter_new(resources.shape.network)?,
    };
    let this = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(this, PidfdFlags::empty()).at("open a pidfd")?;
    // While the machine's procfs is in sight.
    let outer = OuterNamespaces {
        user: server.template.user.try_clone().at("duplicate")?,
        mounts: open_ns("mnt").at("open the mount namespace")?,
    };
    let oom_score = rustix::fs::open(
        "/proc/self/oom_score_adj",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let oom_score = oom_score.at("open the OOM score")?;
    let oom_events = resources
        .group
        .and_then(|group| server.cgroups.oom_file(&group.name));
    let tree = root::prepare(resources)?;
    silence_stdio().at("open /dev/null")?;
    for (resource, most) in LIMITS {
        limit(resource, most).at("limit what whoever started the server may")?;
    }
    // The kernel passes a signal of the guest's to a first process that handles it, and drops all others. The handlers of the standard
    // library run on a small stack; a second signal meanwhile overflows it, which ends the process.
    raw::reset_signal_handlers();
    // A session of its own: no terminal of the server's can be reached.
    rustix::process::setsid().at("start a session")?;
    // Dear, and the same for every box. What is still to be done passes it.
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

/// What commands may not inherit. Of `Core`, 1 is less than any core file and the one value with which no crash handler of the
/// machine is started either, which would run outside the box, as root, on what the guest left it.
const LIMITS: [(Resource, u64); 5] = [
    (Resource::Core, 1),
    (Resource::Rtprio, 0),
    (Resource::Nice, 0),
    (Resource::Memlock, 8 << 20),
    (Resource::Sigpending, 4096),
];

/// For good: this, or what it is already if that is less.
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
    tree.finish(&plan, &trees)?;
    rustix::system::sethostname(plan.hostname.as_bytes()).at("set the host name")?;

    raw::setns(resources.user.as_fd(), libc::CLONE_NEWUSER).at("enter the user namespace")?;
    let two_uids = server.template.privileged;
    become_init(two_uids, plan.guest.id)?;
    let abi = if plan.landlock {
        server.primitives.landlock
    } else {
        0
    };
    let landlock = crate::init::ruleset(&plan, abi).at("make the Landlock ruleset")?;
    drop_capabilities(two_uids)?;
    let hidden = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    hidden.at("become non-dumpable")?;
    if plan.owned {
        end_with_server(&server.pidfd)?;
    }
    raw::load_filter(&server.closing).at("close the seccomp filter")?;

    let missing = server.primitives.missing();
    let ready = Reply::Ready {
        cgroup: resources.group.map(|group| group.name.clone()),
        missing: missing.clone(),
        cpu_before: resources
            .group
            .map_or(Duration::ZERO, |group| group.cpu_before),
        egress: EgressCookies::of(&egress).at("mark the egress")?,
    };
    let mut fds_sent = vec![pidfd.as_fd(), outer.mounts.as_fd()];
    fds_sent.extend(egress.iter().map(AsFd::as_fd));
    send_message(reply.as_fd(), &ready, &fds_sent)?;
    drop(fds_sent);
    drop((pidfd, reply, trees));
    for last in [&resources.user, &server.pidfd] {
        let fd = last.as_raw_fd();
        // SAFETY: they belong to copies of the server's in this process, which nobody drops: init never returns.
        unsafe { raw::close_between(fd, fd) }.at("close descriptors")?;
    }
    Ok(Init::new(
        plan, fds, outer, egress, two_uids, missing, landlock, oom_score, oom_events,
    ))
}

impl FinishRequest {
    /// Sends it to a spare box.
    pub(crate) fn send(&self, socket: BorrowedFd<'_>) -> Result<()> {
        let mounts: Vec<&Mount> = self.trees.iter().map(|(_, mount)| mount).collect();
        let mut fds = vec![self.reply.as_fd()];
        fds.extend(self.trees.iter().map(|(tree, _)| tree.as_fd()));
        fds.extend(self.init_fds.iter().map(AsFd::as_fd));
        send_message(socket, &(&self.plan, mounts), &fds)
    }

    #[inline(never)]
    fn receive(socket: BorrowedFd<'_>) -> Result<Option<Self>> {
        // As large as needed and no larger: what a spare touches here, its box keeps.
        let mut buffer = vec![0; next_length(socket).at("wait for an request")?];
        let message = receive_message::<(SandboxPlan, Vec<Mount>)>(socket, &mut buffer)?;
        let Some(((plan, mounts), mut fds)) = message else {
            return Ok(None);
        };
        if fds.len() < 1 + mounts.len() {
            return Err(Error::Protocol("an request without descriptors".into()));
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

/// Lets this process die with the server. To be called after the last change of ids, at which the kernel forgets it.
fn end_with_server(server: &OwnedFd) -> Result<()> {
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    set.at("tie the box to the server")?;
    // A server that died before that sends nothing any more.
    if readable_now(server).at("look at the server")? {
        return Err(Error::ServerGone);
    }
    Ok(())
}

/// Whether something can be read without waiting: of a pidfd, that its process has ended.
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

/// Takes init's ids. With two ids mapped it is 0, which owns nothing but may become the guest; with one it is the guest.
fn become_init(two_uids: bool, guest: u32) -> Result<()> {
    use rustix::process::{Gid, Uid};
    let id = if two_uids { 0 } else { guest };
    if two_uids {
        rustix::thread::set_thread_groups(&[]).at("drop supplementary groups")?;
    }
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_res_gid(gid, gid, gid).at("take init's group")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).at("take init's user")
}

/// What init keeps, over a user namespace that owns nothing: to become the guest, and to end the guest's processes. With one
/// id for both it needs neither.
fn init_capabilities(two_uids: bool) -> CapabilitySet {
    if two_uids {
        CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::KILL
    } else {
        CapabilitySet::empty()
    }
}

/// The last capability that every kernel this crate runs on knows (`CAP_CHECKPOINT_RESTORE`, 5.9).
const CAP_LAST: libc::c_ulong = 40;

/// Gives up every capability that is not init's, for good, and makes sure of it.
fn drop_capabilities(two_uids: bool) -> Result<()> {
    // No root, no ambient set, no keeping: each with its lock.
    const SECURE_BITS: libc::c_ulong = 0x01 | 0x02 | 0x20 | 0x40 | 0x80;
    raw::prctl(libc::PR_SET_SECUREBITS, SECURE_BITS).at("lock the secure bits")?;
    // Each drop that succeeds is its own proof; the first number the kernel does not know is past the last there is.
    let unknown = (0..64).find_map(|n| {
        raw::prctl(libc::PR_CAPBSET_DROP, n)
            .err()
            .map(|error| (n, error))
    });
    let bounded = !matches!(&unknown, Some((n, error)) if *n > CAP_LAST && error.raw_os_error() == Some(libc::EINVAL));
    let kept = init_capabilities(two_uids);
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets).at("drop capabilities")?;
    let now = rustix::thread::capabilities(None).at("read capabilities")?;
    if now != sets || bounded || !rustix::thread::no_new_privs().at("read no_new_privs")? {
        return Err(Error::Unavailable("dropping capabilities".into()));
    }
    Ok(())
}

/// Closes everything from 3 on that is not in the list.
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
    // SAFETY: what owned them is forgotten, or on the server's stack which this process never returns to.
    unsafe { raw::close_from(first) }.at("close descriptors")
}
