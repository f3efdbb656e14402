//! The fork server: a small process with a single thread that forks every box.
//!
//! A fork copies the memory map of the caller. For a daemon of a gigabyte this takes fifty times as
//! long as a spawn. In a daemon with threads it also copies locks that stay locked forever.
//!
//! `template_mounts.rs` builds the mounts that every box starts from, with the `/etc` of `etc.rs`,
//! `overlays.rs` gives each box separate inodes of them, `pools.rs` prepares parts in advance, `spares.rs` keeps boxes that wait
//! for a plan, `disks.rs` makes disks, `layers.rs` keeps images and layers, `snapshots.rs` makes
//! layers, `changes.rs` compares files, and `launch.rs` creates a box from a plan. This file
//! contains the main loop.

mod changes;
pub(crate) mod disks;
mod etc;
mod launch;
pub(crate) mod layers;
pub(crate) mod overlays;
pub(crate) mod pools;
mod snapshots;
mod spares;
pub(crate) mod template_mounts;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions};

use crate::cgroup::{Cgroups, Owner};
use crate::child::InitMain;
use crate::error::{At, Error, Result};
use crate::probe::{Primitives, privileged};
use crate::raw;
use crate::wire::{MESSAGE_MAX, Reply, Request, ServerConfig, receive_message, send_message};
use disks::{DiskHandle, Disks};
use layers::KeptLayers;
use overlays::Overlays;
use pools::{Ids, Pools};
use spares::Shapes;
use template_mounts::Template;

/// State of the server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) template: Template,
    pub(crate) cgroups: Cgroups,
    pub(crate) pools: Pools,
    pub(crate) ids: Ids,
    pub(crate) primitives: Primitives,
    /// The main filter, and the filter that completes a box.
    pub(crate) filter: Vec<libc::sock_filter>,
    pub(crate) closing: Vec<libc::sock_filter>,
    disks: Disks,
    layers: KeptLayers,
    /// Spare boxes by shape.
    shapes: Shapes,
    /// This process, for boxes that must end with it.
    pub(crate) pidfd: OwnedFd,
    boxes: HashMap<i32, RunningBox>,
    /// Cgroups of ended boxes for which a client still has a handle.
    ///
    /// The server does not reuse them before the release. Otherwise the old handle could freeze or
    /// kill another box.
    unreleased: HashSet<String>,
    init: InitMain,
}

/// A box that has not been reaped.
#[derive(Debug)]
struct RunningBox {
    /// Name of its cgroup.
    ///
    /// Open descriptors would be seven thousand for a thousand boxes.
    group: Option<String>,
    owned: bool,
    /// Whether it has a plan. Otherwise it is a spare.
    assigned: bool,
    /// Whether a client has a handle of it.
    has_handle: bool,
    /// Its overlays, if they came from the pool.
    overlays: Option<Overlays>,
    /// Its disk, if the server made one that ends with the box.
    disk: Option<DiskHandle>,
    /// Its layers that are disks.
    disk_layers: Vec<PathBuf>,
}

/// Serves until the client closes the socket, then exits.
///
/// `init` is the main function of every box's first process.
pub(crate) fn serve(socket: &OwnedFd, init: InitMain) -> ! {
    let _ = rustix::thread::set_name(c"box-server");
    let code = match run(socket, init) {
        Ok(()) => 0,
        Err(error) => {
            // The client may have closed the socket. The error cannot be reported elsewhere.
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
        return Err(Error::Protocol(
            "the first message must be the configuration".into(),
        ));
    };
    let signals = raw::signal_fd(&[libc::SIGCHLD]).at("create a signalfd")?;
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

/// Idle time before the server refills its pools.
///
/// Creating a box and filling the pools take the same kernel locks. Refilling at once would slow
/// down the box that was just created.
const REFILL_DELAY_NANOS: i64 = 3_000_000;

/// Failed receives in a row before the server exits, and the pause between them.
///
/// Together they are ten seconds.
const FAILURES_MAX: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_millis(10);

/// Waits for the next event: requests first, then ended children, then idle time.
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
        // Also for the init of every box. Commands have a lower limit.
        raw::raise_descriptor_limit();
        // Every box inherits the score, so that the kernel kills it before the client when memory
        // runs out. This process is small, so the kernel prefers the boxes to it as well.
        std::fs::write("/proc/self/oom_score_adj", "500").at("set the OOM score")?;
        // Boxes inherit the session keyring, so start an empty one. The filter also denies all
        // keyring calls.
        raw::new_session_keyring();
        let this = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(this, rustix::process::PidfdFlags::empty())
            .at("open a pidfd")?;
        let owner = Owner::this().ok_or_else(|| Error::Unavailable("procfs".into()))?;
        // Before the template is built, because the host's file systems are not visible afterwards.
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
            disks: Disks::new(config.disks.clone()),
            layers: KeptLayers::default(),
            shapes: Shapes::new(config.spares),
            pidfd,
            boxes: HashMap::new(),
            unreleased: HashSet::new(),
            init,
        })
    }

    /// Probes the host and builds the template.
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

    /// Serves requests until the client closes the socket.
    fn serve(&mut self, socket: &OwnedFd, signals: &OwnedFd, buffer: &mut [u8]) -> Result<()> {
        let hello = Reply::Hello(Box::new(self.primitives.clone()));
        send_message(socket.as_fd(), &hello, &[])?;
        // Delay before the next refill, if the pools may be short.
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
                    // The sender of an invalid message sees its reply socket close.
                    Err(Error::Protocol(_)) => {}
                    // The server may be out of descriptors. That must not end boxes.
                    Err(_) if failures < FAILURES_MAX => {
                        failures += 1;
                        std::thread::sleep(PAUSE);
                    }
                    Err(error) => return Err(error),
                },
                Event::Child => self.reap(signals),
                Event::Idle => {
                    // Spares take from the pools, so they come first. An error here appears again,
                    // or not, when a client needs the part.
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
        // Without a reply socket the request has no effect.
        if fds.is_empty() {
            return;
        }
        let reply = fds.remove(0);
        let result = match request {
            // The box's first process replies.
            Request::Create { plan, sources } => match raw::duplicate(reply.as_fd())
                .at("duplicate")
                .and_then(|reply| self.create(&plan, fds, sources, reply))
            {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::AddMount { mount, guest } => self.add_mount(&mount, guest, &fds),
            Request::Settle => {
                self.reap_all();
                self.pools.drop_retired();
                Ok(())
            }
            Request::DiskKind => {
                let privileged = self.template.privileged;
                let kind = self.in_host_mounts(|server| Ok(server.disks.kind(privileged)));
                let answer = kind.map_or_else(|error| Reply::from_error(&error), Reply::Disk);
                let _ = send_message(reply.as_fd(), &answer, &[]);
                return;
            }
            // A process of its own replies.
            Request::Snapshot { limits } => match self.start_snapshot(&fds, &reply, limits) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Merge { layers, limits } => {
                match self.start_merge(&layers, &fds, &reply, limits) {
                    Ok(()) => return,
                    Err(error) => Err(error),
                }
            }
            Request::KeepDisk { pid } => self.keep_disk(pid),
            Request::Changes {
                comparison,
                selection,
                task,
            } => match self.start_changes(*comparison, selection, *task, &fds, &reply) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Configure(_) | Request::Release { .. } => {
                Err(Error::Protocol("already configured".into()))
            }
        };
        let answer = result.map_or_else(|error| Reply::from_error(&error), |()| Reply::Done);
        let _ = send_message(reply.as_fd(), &answer, &[]);
    }

    fn reap(&mut self, signals: &OwnedFd) {
        let mut record = [0_u8; 128];
        while rustix::io::read(signals, &mut record).is_ok() {}
        self.reap_all();
    }

    fn reap_all(&mut self) {
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.remove_box(pid.as_raw_pid());
        }
    }

    /// Removes a reaped box.
    ///
    /// Its init was its last process, because the kernel ends a pid namespace before its first
    /// process.
    fn remove_box(&mut self, pid: i32) {
        self.shapes.forget(pid);
        let Some(running) = self.boxes.remove(&pid) else {
            return;
        };
        if let Some(disk) = running.disk {
            disk.discard();
        }
        self.drop_unused(&running.disk_layers);
        self.pools.retire_overlays(running.overlays);
        if let Some(group) = running.group {
            if running.has_handle {
                self.unreleased.insert(group);
            } else {
                self.pools.return_group(&self.cgroups, &group);
            }
        }
    }

    /// Keeps the disk of a box after its end.
    fn keep_disk(&mut self, pid: i32) -> Result<()> {
        let running = self.boxes.get_mut(&pid);
        let running = running.ok_or(Errno::SRCH).at("keep the disk of a box")?;
        running.disk = None;
        Ok(())
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

    /// Cleans up after the client has closed.
    ///
    /// Ends the owned boxes; the others continue to run.
    fn finish(&mut self) {
        self.shapes.clear();
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
            // With cgroup version 1, a frozen box does not die, and the wait would never end.
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
