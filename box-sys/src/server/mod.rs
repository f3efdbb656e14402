//! The fork server: one small process with one thread, from which every box is forked.
//!
//! A fork copies the caller's memory map. From a daemon of a gigabyte that takes fifty times a spawn, and with threads it
//! copies locks that nobody will ever open. So boxes come from here.
//!
//! `world.rs` is what it lives in, `pools.rs` what it keeps ready, `launch.rs` how it makes a box of a plan; this file is
//! its loop.

mod launch;
pub(crate) mod pools;
pub(crate) mod world;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, WaitOptions};

use crate::cgroup::{Cgroups, Group, Owner};
use crate::child::InitMain;
use crate::error::{At, Error, Result};
use crate::probe::{Primitives, privileged};
use crate::raw;
use crate::wire::{MESSAGE_MAX, Reply, Request, ServerConfig, receive_message, send_message};
use pools::{Ids, Pools};
use world::World;

/// Everything the server has.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) world: World,
    pub(crate) cgroups: Cgroups,
    pub(crate) pools: Pools,
    pub(crate) ids: Ids,
    pub(crate) primitives: Primitives,
    pub(crate) filter: Vec<libc::sock_filter>,
    boxes: HashMap<i32, Alive>,
    init: InitMain,
}

/// A box that has not been reaped.
#[derive(Debug)]
struct Alive {
    group: Option<Group>,
    owned: bool,
}

/// Serves the socket until its other end is closed, then ends the process. `init` is what every box's first process runs.
pub(crate) fn serve(socket: &OwnedFd, init: InitMain) -> ! {
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
    let Some((Request::Configure(config), _)) = receive_message(socket.as_fd(), &mut buffer)? else {
        return Err(Error::Protocol("the first message configures".into()));
    };
    let signals = raw::signal_fd(&[libc::SIGCHLD]).at("make a signalfd")?;
    let mut server = Server::start(&config, init)?;
    send_message(socket.as_fd(), &Reply::Hello(Box::new(server.primitives.clone())), &[])?;
    loop {
        match wait(socket, &signals, server.idle_work())? {
            Event::Request => match receive_message::<Request>(socket.as_fd(), &mut buffer) {
                Ok(None) => break,
                Ok(Some((request, fds))) => server.answer(request, fds),
                // One bad message is its sender's trouble.
                Err(Error::Protocol(_)) => {}
                Err(_) => break,
            },
            Event::Child => server.reap(&signals),
            Event::Idle => {}
        }
    }
    server.finish();
    Ok(())
}

enum Event {
    Request,
    Child,
    Idle,
}

/// Requests first, then the dead, then work for later.
fn wait(socket: &OwnedFd, signals: &OwnedFd, busy: bool) -> Result<Event> {
    let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, busy.then_some(&now))).at("poll")?;
    if !fds[0].revents().is_empty() {
        return Ok(Event::Request);
    }
    Ok(if fds[1].revents().is_empty() { Event::Idle } else { Event::Child })
}

impl Server {
    fn start(config: &ServerConfig, init: InitMain) -> Result<Self> {
        let privileged = privileged(config.id_base);
        let owner = Owner::this().ok_or_else(|| Error::Unavailable("procfs".into()))?;
        // Before the world is built: afterwards the machine's file systems are out of sight, and descriptors are all we have.
        let cgroups = Cgroups::open(&config.cgroup_parent);
        cgroups.sweep();
        let primitives = Primitives::with(&cgroups, privileged);
        let missing = primitives.missing_required();
        if !missing.is_empty() {
            return Err(Error::Unavailable(missing.join(", ")));
        }
        let ids = Ids::new(privileged, config.id_base);
        let world = World::build(privileged)?;
        let mut pools = Pools::new(config.pool, ids, owner);
        while pools.refill(&world, &cgroups) {}
        let filter = crate::seccomp::program();
        Ok(Self { world, cgroups, pools, ids, primitives, filter, boxes: HashMap::new(), init })
    }

    fn answer(&mut self, request: Request, mut fds: Vec<OwnedFd>) {
        // Where nobody waits for an answer there is nothing to do.
        if fds.is_empty() {
            return;
        }
        let reply = fds.remove(0);
        let result = match request {
            // The box's own first process answers.
            Request::Create { plan, sources } => match self.create(&plan, fds, sources, &reply) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::AddMount { mount, guest } => self.add_mount(&mount, guest, &fds),
            Request::Settle => {
                self.collect();
                Ok(())
            }
            Request::Configure(_) => Err(Error::Protocol("configured already".into())),
        };
        let answer = result.map_or_else(|error| Reply::from_error(&error), |()| Reply::Done);
        let _ = send_message(reply.as_fd(), &answer, &[]);
    }

    /// Does one piece of work that nobody waits for. `false` when there is none.
    fn idle_work(&mut self) -> bool {
        self.pools.refill(&self.world, &self.cgroups)
    }

    fn reap(&mut self, signals: &OwnedFd) {
        let mut record = [0_u8; 128];
        while rustix::io::read(signals, &mut record).is_ok() {}
        self.collect();
    }

    fn collect(&mut self) {
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.forget(pid.as_raw_pid());
        }
    }

    /// An init that is reaped was the last of its box: the kernel ends a pid namespace before its first process.
    fn forget(&mut self, pid: i32) {
        if let Some(alive) = self.boxes.remove(&pid)
            && let Some(group) = alive.group
        {
            self.pools.give_back(&self.cgroups, group);
        }
    }

    /// Whoever asked is gone. Boxes that belong to it go, too; the others live on.
    fn finish(&mut self) {
        let owned: Vec<i32> = self.boxes.iter().filter(|(_, alive)| alive.owned).map(|(pid, _)| *pid).collect();
        for pid in &owned {
            if let Some(pid) = Pid::from_raw(*pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        for pid in owned {
            let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::empty());
            self.forget(pid);
        }
        self.pools.clear(&self.cgroups);
        self.cgroups.close();
    }

    pub(crate) fn small(&self) -> BorrowedFd<'_> {
        self.world.small.as_fd()
    }
}
