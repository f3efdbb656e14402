//! The fork server: one small process with one thread, from which every box is forked.
//!
//! A fork copies the caller's memory map. From a daemon of a gigabyte that takes fifty times a spawn, and with threads it
//! copies locks that nobody will ever open. So boxes come from here.
//!
//! `world.rs` is what it lives in, `view.rs` how each box gets that for itself, `pools.rs` what it keeps ready, `launch.rs` how it makes a box of a plan; this file is
//! its loop.

mod launch;
pub(crate) mod overlays;
pub(crate) mod pools;
pub(crate) mod template_mounts;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, WaitOptions};

use crate::cgroup::{Cgroups, Group, Owner};
use crate::child::InitMain;
use crate::error::{At, Error, Result};
use crate::plan::SandboxPlan;
use crate::probe::{Primitives, privileged};
use crate::raw;
use crate::wire::{MESSAGE_MAX, Reply, Request, ServerConfig, receive_message, send_message};
use overlays::Overlays;
use pools::{Ids, Pools};
use template_mounts::Template;

/// Everything the server has.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) template: Template,
    pub(crate) cgroups: Cgroups,
    pub(crate) pools: Pools,
    pub(crate) ids: Ids,
    pub(crate) primitives: Primitives,
    /// The large filter and the one that closes a box.
    pub(crate) filter: Vec<libc::sock_filter>,
    pub(crate) closing: Vec<libc::sock_filter>,
    /// The plan last asked for, and boxes begun for others like it.
    shape: SandboxPlan,
    spares: Vec<Spare>,
    spares_wanted: usize,
    /// This process, for boxes that must not outlive it.
    pub(crate) pidfd: OwnedFd,
    boxes: HashMap<i32, RunningBox>,
    /// Cgroups of boxes that have ended while somebody still held a handle on them. They wait for its release: under the same
    /// name another box would be frozen or killed through the old handle.
    unreleased: HashSet<String>,
    init: InitMain,
}

/// A box that has not been reaped.
#[derive(Debug)]
struct RunningBox {
    /// The name of its cgroup. Not its descriptors: a thousand boxes would hold seven thousand.
    group: Option<String>,
    owned: bool,
    /// Whether somebody holds a handle on it.
    has_handle: bool,
    /// Its overlays, if they came from the pool.
    overlays: Option<Overlays>,
}

/// A box that waits for its plan.
#[derive(Debug)]
struct Spare {
    /// Where it waits; closed, it ends.
    socket: OwnedFd,
    pid: i32,
    /// Its cgroup, to set the plan's limits.
    group: Option<Group>,
}

/// Serves the socket until its other end is closed, then ends the process. `init` is what every box's first process runs.
pub(crate) fn serve(socket: &OwnedFd, init: InitMain) -> ! {
    let _ = rustix::thread::set_name(c"box-server");
    let code = match run(socket, init) {
        Ok(()) => 0,
        Err(error) => {
            // Nobody may be listening any more; there is no other place to say it.
            let _ = send_message(socket.as_fd(), &Reply::from_error(&error), &[]);
            1
        }
    };
    std::process::exit(code)
}

fn run(socket: &OwnedFd, init: InitMain) -> Result<()> {
    let mut buffer = vec![0; MESSAGE_MAX];
    let Some((Request::Configure(config), _)) = receive_message(socket.as_fd(), &mut buffer)?
    else {
        return Err(Error::Protocol("the first message configures".into()));
    };
    let signals = raw::signal_fd(&[libc::SIGCHLD]).at("make a signalfd")?;
    let mut server = Server::start(&config, init)?;
    let end = server.serve(socket, &signals, &mut buffer);
    server.finish();
    end
}

enum Event {
    Request,
    Child,
    Idle,
}

/// How long nobody must have asked for anything before the pools are filled up. What a box is made of and what the pools are
/// made of take the same locks in the kernel: filled at once, they would slow the box down that made them short.
const REFILL_DELAY_NANOS: i64 = 3_000_000;

/// How often in a row nothing can be received before the server ends, and how long it waits in between: ten seconds together.
const FAILURES_MAX: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_millis(10);

/// Requests first, then the dead, then work for later.
fn wait(socket: &OwnedFd, signals: &OwnedFd, refill_delay: Option<i64>) -> Result<Event> {
    let mut fds = [
        PollFd::new(socket, PollFlags::IN),
        PollFd::new(signals, PollFlags::IN),
    ];
    let refill_delay = refill_delay.map(|tv_nsec| rustix::event::Timespec { tv_sec: 0, tv_nsec });
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, refill_delay.as_ref()))
        .at("poll")?;
    if !fds[0].revents().is_empty() {
        return Ok(Event::Request);
    }
    Ok(if fds[1].revents().is_empty() {
        Event::Idle
    } else {
        Event::Child
    })
}

impl Server {
    fn start(config: &ServerConfig, init: InitMain) -> Result<Self> {
        let privileged = privileged(config.id_base);
        // For the first processes of boxes, too; commands have less.
        raw::raise_descriptor_limit();
        // Inherited by every box, which so goes before whoever asked for it when memory runs out. This process is small: the
        // boxes go before it, too.
        std::fs::write("/proc/self/oom_score_adj", "500").at("set the OOM score")?;
        // Boxes inherit the session keyring; this one is empty. The filter keeps them from all keyrings anyway.
        raw::new_session_keyring();
        let this = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(this, rustix::process::PidfdFlags::empty())
            .at("open a pidfd")?;
        let owner = Owner::this().ok_or_else(|| Error::Unavailable("procfs".into()))?;
        // Before the world is built: afterwards the machine's file systems are out of sight, and descriptors are all we have.
        let disk = config.disk.is_limited().then_some(config.disk);
        let cgroups = Cgroups::hold(&config.cgroup_parent, &owner, disk);
        cgroups.sweep();
        let (primitives, template) =
            Self::build_template(&cgroups, privileged).inspect_err(|_| cgroups.close())?;
        let ids = Ids::new(privileged, config.id_base);
        let mut pools = Pools::new(config.pool, ids, owner);
        while pools.refill(&template, &cgroups) {}
        let filter = crate::seccomp::program();
        Ok(Self {
            template,
            cgroups,
            pools,
            ids,
            primitives,
            filter,
            closing: crate::seccomp::closing_program(),
            shape: SandboxPlan::default(),
            spares: Vec::new(),
            spares_wanted: config.spares,
            pidfd,
            boxes: HashMap::new(),
            unreleased: HashSet::new(),
            init,
        })
    }

    /// What the machine has, and the place to build boxes in.
    fn build_template(cgroups: &Cgroups, privileged: bool) -> Result<(Primitives, Template)> {
        let mut primitives = Primitives::with(cgroups, privileged);
        let missing = primitives.missing_required();
        if !missing.is_empty() {
            return Err(Error::Unavailable(missing.join(", ")));
        }
        let template = Template::build(privileged, primitives.overlay)?;
        primitives.overlay = template.is_overlaid();
        Ok((primitives, template))
    }

    /// Answers until the other end of the socket is closed.
    fn serve(&mut self, socket: &OwnedFd, signals: &OwnedFd, buffer: &mut [u8]) -> Result<()> {
        let hello = Reply::Hello(Box::new(self.primitives.clone()));
        send_message(socket.as_fd(), &hello, &[])?;
        // How long to wait before filling up the pools, if they may be short.
        let mut refill_delay = Some(0);
        let mut failures = 0;
        loop {
            let event = wait(socket, signals, refill_delay)?;
            refill_delay = Some(REFILL_DELAY_NANOS);
            match event {
                Event::Request => match receive_message::<Request>(socket.as_fd(), buffer) {
                    Ok(Some((request, fds))) => {
                        failures = 0;
                        self.answer(request, fds);
                    }
                    Ok(None) => return Ok(()),
                    // One bad message is its sender's trouble: what that waits on is closed.
                    Err(Error::Protocol(_)) => {}
                    // So is one that nothing was left for; boxes do not end for it.
                    Err(_) if failures < FAILURES_MAX => {
                        failures += 1;
                        std::thread::sleep(PAUSE);
                    }
                    Err(error) => return Err(error),
                },
                Event::Child => self.reap(signals),
                Event::Idle => {
                    // Spares take from the pools, so they come first. What fails now fails, or works, when it is asked for.
                    let more = self.add_spare().unwrap_or(false)
                        || self.pools.refill(&self.template, &self.cgroups);
                    refill_delay = more.then_some(0);
                }
            }
        }
    }

    fn answer(&mut self, request: Request, mut fds: Vec<OwnedFd>) {
        if let Request::Release { cgroup } = request {
            return self.release(&cgroup);
        }
        // Where nobody waits for an answer there is nothing to do.
        if fds.is_empty() {
            return;
        }
        let reply = fds.remove(0);
        let result = match request {
            // The box's own first process answers.
            Request::Create { plan, sources } => match raw::duplicate(reply.as_fd())
                .at("duplicate")
                .and_then(|reply| self.create(&plan, fds, sources, reply))
            {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::AddMount { mount, guest } => self.add_mount(&mount, guest, &fds),
            Request::Settle => {
                self.collect();
                self.pools.drop_retired();
                Ok(())
            }
            Request::Configure(_) | Request::Release { .. } => {
                Err(Error::Protocol("configured already".into()))
            }
        };
        let answer = result.map_or_else(|error| Reply::from_error(&error), |()| Reply::Done);
        let _ = send_message(reply.as_fd(), &answer, &[]);
    }

    fn reap(&mut self, signals: &OwnedFd) {
        let mut record = [0_u8; 128];
        while rustix::io::read(signals, &mut record).is_ok() {}
        self.collect();
    }

    fn collect(&mut self) {
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.remove_box(pid.as_raw_pid());
        }
    }

    /// An init that is reaped was the last of its box: the kernel ends a pid namespace before its first process.
    fn remove_box(&mut self, pid: i32) {
        self.spares.retain(|spare| spare.pid != pid);
        let Some(running) = self.boxes.remove(&pid) else {
            return;
        };
        self.pools.retire_overlays(running.overlays);
        if let Some(group) = running.group {
            if running.has_handle {
                self.unreleased.insert(group);
            } else {
                self.pools.return_group(&self.cgroups, &group);
            }
        }
    }

    fn release(&mut self, cgroup: &str) {
        if self.unreleased.remove(cgroup) {
            return self.pools.return_group(&self.cgroups, cgroup);
        }
        let named = |running: &&mut RunningBox| running.group.as_deref() == Some(cgroup);
        if let Some(running) = self.boxes.values_mut().find(named) {
            running.has_handle = false;
        }
    }

    /// Whoever asked is gone. Boxes that belong to it go, too; the others live on.
    fn finish(&mut self) {
        self.spares.clear();
        let owned: Vec<i32> = self
            .boxes
            .iter()
            .filter(|(_, running)| running.owned)
            .map(|(pid, _)| *pid)
            .collect();
        for pid in &owned {
            if let Some(pid) = Pid::from_raw(*pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        for pid in owned {
            // Frozen by version 1 it would not die, and be waited for for ever.
            if let Some(group) = self
                .boxes
                .get(&pid)
                .and_then(|running| running.group.as_ref())
            {
                let _ = self.cgroups.freeze(group, false);
            }
            let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::empty());
            self.remove_box(pid);
        }
        for name in &self.unreleased {
            let _ = self.cgroups.remove(name);
        }
        self.pools.clear(&self.cgroups);
        self.cgroups.close();
    }

    pub(crate) fn template_mounts(&self) -> BorrowedFd<'_> {
        self.template.mounts.as_fd()
    }
}
