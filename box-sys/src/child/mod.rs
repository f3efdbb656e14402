//! The first process of a box, from the fork to its init: one step after another, each of which either works or ends it.
//!
//! The order is what makes it safe. Everything is built with the server's powers; then a user namespace is entered that owns
//! nothing of it. So even an init that has been taken over cannot remount, unmount, rename the host or add an interface.

mod tree;

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::cgroup::Group;
use crate::error::{At, Error, Result};
use crate::inside::Init;
use crate::plan::{Mount, SandboxPlan};
use crate::raw;
use crate::server::Server;
use crate::wire::{Reply, send_message};

/// What a box's first process goes on with once the box is closed behind it. It must not return: the box ends with it.
pub type InitMain = fn(Init) -> !;

/// What the server prepared.
pub(crate) struct Context<'a> {
    pub(crate) server: &'a Server,
    pub(crate) plan: &'a SandboxPlan,
    /// The given root directory.
    pub(crate) lower: Option<OwnedFd>,
    pub(crate) trees: Vec<(OwnedFd, Mount)>,
    pub(crate) net: OwnedFd,
    pub(crate) user: OwnedFd,
    pub(crate) group: Option<&'a Group>,
    pub(crate) init_fds: Vec<OwnedFd>,
}

/// Builds the box around this process, tells the caller, and becomes its init.
pub(crate) fn run(context: Context<'_>, reply: &OwnedFd, main: InitMain) -> ! {
    match close_in(context, reply) {
        Ok(init) => main(init),
        Err(error) => {
            let _ = send_message(reply.as_fd(), &Reply::from_error(&error), &[]);
            raw::exit_now(1)
        }
    }
}

fn close_in(mut context: Context<'_>, reply: &OwnedFd) -> Result<Init> {
    let (server, plan) = (context.server, context.plan);
    if let Some(group) = context.group {
        group.enter().at("enter the cgroup")?;
    }
    // After that, so that the box sees its own group as the root.
    raw::unshare(libc::CLONE_NEWCGROUP).at("unshare the cgroup namespace")?;
    raw::setns(context.net.as_fd(), libc::CLONE_NEWNET).at("enter the network namespace")?;
    // While the machine's procfs is in sight.
    let pid = own_pid()?;
    let pidfd = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).at("open a pidfd")?;
    let mounts = crate::server::world::open_ns("mnt").at("open the mount namespace")?;
    // The box goes before the server and its caller when memory runs out.
    std::fs::write("/proc/self/oom_score_adj", "500").at("set the OOM score")?;

    tree::build(&mut context)?;
    rustix::system::sethostname(plan.hostname.as_bytes()).at("set the host name")?;
    silence_stdio().at("open /dev/null")?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).at("forbid core files")?;
    // A session of its own: no terminal of the server's can be reached.
    rustix::process::setsid().at("start a session")?;

    raw::setns(context.user.as_fd(), libc::CLONE_NEWUSER).at("enter the user namespace")?;
    let two_uids = server.world.privileged;
    become_init(two_uids, plan.guest.id)?;
    let landlock = if plan.landlock { crate::inside::ruleset(plan, server.primitives.landlock, &[]) } else { Ok(None) };
    let landlock = landlock.at("make the Landlock ruleset")?;
    drop_capabilities(two_uids)?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).at("become non-dumpable")?;
    if plan.owned {
        // Last but the filter: the kernel forgets it at every change of ids.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).at("tie the box to the server")?;
    }
    raw::load_filter(&server.filter).at("load the seccomp filter")?;

    let missing = server.primitives.missing();
    let cgroup = context.group.map(|group| group.name.clone());
    let ready = Reply::Ready { pid, cgroup, missing: missing.clone() };
    send_message(reply.as_fd(), &ready, &[pidfd.as_fd(), mounts.as_fd()])?;
    let fds = std::mem::take(&mut context.init_fds);
    let keep: Vec<RawFd> = fds.iter().chain(&landlock).map(AsRawFd::as_raw_fd).collect();
    // Their owners are the server's copies in this process, which nobody drops: init never returns.
    std::mem::forget((context, pidfd, mounts));
    close_all_but(keep)?;
    Ok(Init::new(plan.clone(), fds, two_uids, missing, landlock))
}

/// This process's pid as the server and its caller see it: procfs still is of their pid namespace.
fn own_pid() -> Result<i32> {
    let name = raw::read_link(c"/proc/self").at("read the pid")?;
    name.parse().map_err(|_| Error::Protocol("procfs has no pid".into()))
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

/// Gives up every capability that is not init's, for good, and makes sure of it.
fn drop_capabilities(two_uids: bool) -> Result<()> {
    // No root, no ambient set, no keeping: each with its lock.
    const SECURE_BITS: libc::c_ulong = 0x01 | 0x02 | 0x20 | 0x40 | 0x80;
    raw::prctl(libc::PR_SET_SECUREBITS, SECURE_BITS).at("lock the secure bits")?;
    for capability in 0..64 {
        // The first number the kernel does not know is past the last there is.
        if raw::prctl(libc::PR_CAPBSET_DROP, capability).is_err() {
            break;
        }
    }
    let kept = init_capabilities(two_uids);
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).at("drop capabilities")?;
    rustix::thread::set_no_new_privs(true).at("set no_new_privs")?;
    let now = rustix::thread::capabilities(None).at("read capabilities")?;
    let bounded = (0..64).any(|n| raw::prctl(libc::PR_CAPBSET_READ, n).is_ok() && bounding(n));
    if now != sets || bounded || !rustix::thread::no_new_privs().at("read no_new_privs")? {
        return Err(Error::Unavailable("dropping capabilities".into()));
    }
    Ok(())
}

fn bounding(capability: libc::c_ulong) -> bool {
    // SAFETY: takes numbers and answers 1, 0 or an error.
    unsafe { libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) == 1 }
}

/// Closes everything from 3 on that is not in the list.
fn close_all_but(mut keep: Vec<RawFd>) -> Result<()> {
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep {
        if fd > first {
            raw::close_between(first, fd - 1).at("close descriptors")?;
        }
        first = fd + 1;
    }
    // SAFETY: what owned them is forgotten, or on the server's stack which this process never returns to.
    unsafe { raw::close_from(first) }.at("close descriptors")
}

/// The box's root as its own first process may still see it: `Pid` is 1 here.
pub(crate) fn is_first() -> bool {
    rustix::process::getpid() == Pid::INIT
}
