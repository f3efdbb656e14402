//! What a program that makes boxes holds: the way to the fork server, and a handle on each box.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cgroup::{Cgroups, Usage, start_time};
use crate::child::InitMain;
use crate::error::{At, Error, Result};
use crate::network::{EgressCookies, EgressSockets};
use crate::plan::{Mount, SandboxPlan};
use crate::probe::Primitives;
use crate::record::{SandboxRecord, has_ended, namespace, pid_of};
use crate::wire::{
    FDS_MAX, MESSAGE_MAX, Reply, Request, ServerConfig, next_length, receive_message, send_message,
    socket_pair,
};

/// The argument with which a program becomes its own fork server.
const ARGUMENT: &str = "--box-fork-server";

/// How the server, and so every box's first process, allocates. What a thread has freed glibc keeps for it out of reach of
/// [`crate::release_memory`], which is a sixth of all that an idle box takes, and a second thread would get an arena of its own.
const ALLOCATOR: &str = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1";

/// To be called first in `main`: if this process was started as a fork server it serves, and never returns. `init` is what the
/// first process of every box does.
pub fn serve_if_asked(init: InitMain) {
    if std::env::args_os()
        .nth(1)
        .is_none_or(|argument| argument != ARGUMENT)
    {
        return;
    }
    // The way to the caller is standard input, the one descriptor a child gets without further arrangement. It is moved out of
    // the way of whatever might read from or write to the standard ones.
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    let null = std::fs::File::open("/dev/null");
    if let (Ok(socket), Ok(null)) = (socket, null)
        && rustix::stdio::dup2_stdin(&null).is_ok()
    {
        drop(null);
        // Whatever this program's caller left open is not for boxes' forefather to keep.
        let keep = vec![std::os::fd::AsRawFd::as_raw_fd(&socket)];
        if crate::child::close_all_but(keep).is_err() {
            std::process::exit(1);
        }
        crate::raw::hide_arguments();
        crate::server::serve(&socket, init);
    }
    std::process::exit(1);
}

/// The way to a fork server. Shared by threads; dropping it ends the server, and with it the boxes that are `owned`.
#[derive(Debug)]
pub struct ForkServer {
    socket: Arc<OwnedFd>,
    process: Child,
    primitives: Primitives,
    cgroups: Arc<Cgroups>,
}

impl ForkServer {
    /// Starts `program`, whose `main` begins with [`serve_if_asked`], as a fork server. It gets none of
    /// this program's environment, so that no box can find that in its init.
    pub fn start(program: &Path, config: &ServerConfig) -> Result<Self> {
        let mut command = Command::new(program);
        // Every box sees it as its first process, and shall learn no path of the machine.
        command.arg0("box");
        Self::start_command(command, config)
    }

    /// The same, by a command that runs such a program: under another user, for one.
    pub fn start_command(mut command: Command, config: &ServerConfig) -> Result<Self> {
        let (socket, far) = socket_pair().at("make a socket pair")?;
        let process = command
            .arg(ARGUMENT)
            .env_clear()
            .env("GLIBC_TUNABLES", ALLOCATOR)
            .current_dir("/")
            // What ends this program's group, a Ctrl-C for one, must not end the server before it has cleared away.
            .process_group(0)
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()
            .at("start the fork server")?;
        // The command keeps a copy of the far end; as long as it lives, the server's death would not show.
        drop(command);
        send_message(socket.as_fd(), &Request::Configure(config.clone()), &[])?;
        let mut buffer = vec![0; MESSAGE_MAX];
        let hello = receive_message::<Reply>(socket.as_fd(), &mut buffer)?
            .ok_or(Error::ServerGone)?
            .0;
        let Reply::Hello(primitives) = hello.into_result()? else {
            return Err(Error::Protocol("no hello".into()));
        };
        let cgroups = Arc::new(Cgroups::open(&config.cgroup_parent));
        Ok(Self {
            socket: Arc::new(socket),
            process,
            primitives: *primitives,
            cgroups,
        })
    }

    /// What the server found on this machine.
    pub fn primitives(&self) -> &Primitives {
        &self.primitives
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Makes a box and waits until its init is about to run. `init_fds` arrive there in this order; `sources` are what
    /// [`crate::Source::Fd`] counts in.
    pub fn create(
        &self,
        plan: &SandboxPlan,
        init_fds: &[BorrowedFd<'_>],
        sources: &[BorrowedFd<'_>],
    ) -> Result<Sandbox> {
        self.start_create(plan, init_fds, sources)?.finish()
    }

    /// As [`Self::create`], without waiting: for an event loop, which waits until what comes back is readable.
    pub fn start_create(
        &self,
        plan: &SandboxPlan,
        init_fds: &[BorrowedFd<'_>],
        sources: &[BorrowedFd<'_>],
    ) -> Result<PendingSandbox> {
        let (near, far) = socket_pair().at("make a socket pair")?;
        let mut fds = vec![far.as_fd()];
        fds.extend(sources.iter().chain(init_fds));
        if fds.len() > FDS_MAX {
            return Err(Error::Invalid(format!(
                "at most {} descriptors",
                FDS_MAX - 1
            )));
        }
        let request = Request::Create {
            plan: Box::new(plan.clone()),
            sources: sources.len(),
        };
        send_message(self.socket.as_fd(), &request, &fds)?;
        drop(fds);
        // If both the server and the box die now, this end learns it.
        drop(far);
        Ok(PendingSandbox {
            near,
            finished: false,
            guest: plan.guest.id,
            cgroups: self.cgroups.clone(),
            server: self.socket.clone(),
        })
    }

    /// Mounts into a running box. Who may write to a writable one is for its first process to say ([`Init::allow_writing`](crate::Init::allow_writing)).
    pub fn add_mount(
        &self,
        sandbox: &Sandbox,
        mount: &Mount,
        source: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let mut fds = vec![sandbox.mounts.as_fd()];
        fds.extend(source);
        self.ask(
            &Request::AddMount {
                mount: mount.clone(),
                guest: sandbox.guest,
            },
            &fds,
        )
    }

    /// Waits until what has ended is also cleared away: reaped, its overlays gone, and its cgroups removed or ready for another.
    pub fn settle(&self) -> Result<()> {
        self.ask(&Request::Settle, &[])
    }

    fn ask(&self, request: &Request, with: &[BorrowedFd<'_>]) -> Result<()> {
        let (near, far) = socket_pair().at("make a socket pair")?;
        let mut fds = vec![far.as_fd()];
        fds.extend(with);
        send_message(self.socket.as_fd(), request, &fds)?;
        drop(fds);
        drop(far);
        let mut buffer = vec![0; next_length(near.as_fd()).at("receive")?];
        receive_message::<Reply>(near.as_fd(), &mut buffer)?
            .ok_or(Error::ServerGone)?
            .0
            .into_result()?;
        Ok(())
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // The server ends when its socket does, after clearing away.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

/// A box on its way. Dropped before it is finished, the box ends.
#[derive(Debug)]
pub struct PendingSandbox {
    near: OwnedFd,
    finished: bool,
    guest: u32,
    cgroups: Arc<Cgroups>,
    server: Arc<OwnedFd>,
}

impl AsFd for PendingSandbox {
    /// Readable once [`Self::finish`] does not wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl PendingSandbox {
    /// Waits until the box's init is about to run.
    pub fn finish(mut self) -> Result<Sandbox> {
        self.finished = true;
        self.receive()
    }

    fn receive(&self) -> Result<Sandbox> {
        let mut buffer = vec![0; next_length(self.near.as_fd()).at("receive")?];
        let (reply, fds) =
            receive_message::<Reply>(self.near.as_fd(), &mut buffer)?.ok_or(Error::ServerGone)?;
        let mut fds = fds.into_iter();
        let reply = reply.into_result()?;
        let (
            Reply::Ready {
                cgroup,
                missing,
                cpu_before,
                egress: cookies,
            },
            [Some(pidfd), Some(mounts)],
        ) = (reply, [fds.next(), fds.next()])
        else {
            return Err(Error::Protocol("no answer of a box".into()));
        };
        let egress = cookies.find(fds);
        Ok(Sandbox {
            pidfd,
            mounts,
            pid: OnceLock::new(),
            started: OnceLock::new(),
            cgroup,
            missing,
            guest: self.guest,
            cpu_before,
            frozen: AtomicBool::new(false),
            cookies,
            egress: Mutex::new(egress),
            cgroups: self.cgroups.clone(),
            server: Some(self.server.clone()),
        })
    }
}

impl Drop for PendingSandbox {
    fn drop(&mut self) {
        if !self.finished {
            // From here on the box cannot say that it is ready, and ends. It may have said so before.
            let _ = rustix::net::shutdown(&self.near, rustix::net::Shutdown::Read);
            if let Ok(sandbox) = self.receive() {
                let _ = sandbox.kill();
            }
        }
    }
}

/// A running box. Dropping the handle does not end it.
#[derive(Debug)]
pub struct Sandbox {
    pidfd: OwnedFd,
    mounts: OwnedFd,
    /// Found out when first asked for.
    pid: OnceLock<i32>,
    started: OnceLock<Option<u64>>,
    cgroup: Option<String>,
    missing: Vec<String>,
    guest: u32,
    cpu_before: Duration,
    /// Whether it may be stopped, which a kill does not overcome on version 1.
    frozen: AtomicBool,
    cookies: EgressCookies,
    /// Until somebody takes them.
    egress: Mutex<Option<EgressSockets>>,
    cgroups: Arc<Cgroups>,
    /// To say that its cgroup may be used by another; a box that was adopted has no server.
    server: Option<Arc<OwnedFd>>,
}

impl Sandbox {
    /// What to keep for [`Sandbox::adopt`].
    pub fn record(&self) -> SandboxRecord {
        let pid = self.pid();
        SandboxRecord {
            pid,
            started: self.started(pid),
            mounts: namespace(&self.mounts).ok(),
            cgroup: self.cgroup.clone(),
            missing: self.missing.clone(),
            guest: self.guest,
            cpu_before: self.cpu_before,
            egress: self.cookies.clone(),
        }
    }

    /// The exits of its network, once; `None` if it has none, or somebody has them.
    pub fn take_egress_sockets(&self) -> Option<EgressSockets> {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        egress.take()
    }

    /// A handle on a box whose server is gone. `pidfd` and `mounts`, its mount namespace, come from its init, which was asked
    /// over a socket, and so do the sockets at its exits; `cgroups` are of the same parent. Dropped after its end, it removes its groups.
    pub fn adopt(
        pidfd: OwnedFd,
        mounts: OwnedFd,
        egress: Vec<OwnedFd>,
        record: SandboxRecord,
        cgroups: Arc<Cgroups>,
    ) -> Self {
        let SandboxRecord {
            pid,
            started,
            mounts: _,
            cgroup,
            missing,
            guest,
            cpu_before,
            egress: cookies,
        } = record;
        let egress = cookies.find(egress);
        Self {
            pidfd,
            mounts,
            pid: OnceLock::from(pid),
            started: OnceLock::from(started),
            cgroup,
            missing,
            guest,
            cpu_before,
            frozen: AtomicBool::new(true),
            cookies,
            egress: Mutex::new(egress),
            cgroups,
            server: None,
        }
    }

    /// Its mount namespace, to be kept by whoever may want to adopt the box later.
    pub fn mount_namespace(&self) -> BorrowedFd<'_> {
        self.mounts.as_fd()
    }

    /// Readable once the box has ended; for an event loop.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The process id of init, as the machine numbers it. Not positive if it had ended before anybody asked.
    pub fn pid(&self) -> i32 {
        *self.pid.get_or_init(|| pid_of(&self.pidfd).unwrap_or(-1))
    }

    /// When init was started, if procfs shows it.
    fn started(&self, pid: i32) -> Option<u64> {
        *self.started.get_or_init(|| {
            let started = start_time(pid.try_into().ok()?);
            // Of a process that has not ended, so the number was its own when the time was read.
            started.filter(|_| matches!(has_ended(&self.pidfd), Ok(false)))
        })
    }

    /// The name of its cgroups, below the server's parent.
    pub fn cgroup(&self) -> Option<&str> {
        self.cgroup.as_deref()
    }

    /// What this box goes without, by name.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Kills everything in the box. The kernel ends a pid namespace together with its first process, whatever its processes
    /// have forked, detached or ignored.
    pub fn kill(&self) -> Result<()> {
        let end = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        if let Some(name) = &self.cgroup
            && self.frozen.load(Ordering::Relaxed)
        {
            let _ = self.cgroups.freeze(name, false);
        }
        match end {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).at("kill the box"),
        }
    }

    /// Waits until the box has ended. `false` when the time ran out first.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, timeout.as_ref()))
            .at("wait for the box")?;
        Ok(ready > 0)
    }

    /// Kills the box and waits for its end. The server clears its cgroups away on its own time.
    pub fn destroy(self) -> Result<()> {
        self.kill()?;
        self.wait(None)?;
        Ok(())
    }

    /// What the box uses and has used.
    pub fn usage(&self) -> Usage {
        let mut usage = self
            .cgroup
            .as_deref()
            .map(|name| self.cgroups.usage(name))
            .unwrap_or_default();
        usage.cpu = usage.cpu.map(|cpu| cpu.saturating_sub(self.cpu_before));
        usage
    }

    /// Asks the kernel to stop everything in the box, init included. It does so soon: [`Self::is_frozen`].
    pub fn freeze(&self) -> Result<()> {
        self.set_frozen(true)
    }

    /// Continues what was stopped.
    pub fn thaw(&self) -> Result<()> {
        self.set_frozen(false)
    }

    /// Whether everything in a box that was frozen has come to a stop. What waits for a disk may take a while.
    pub fn is_frozen(&self) -> bool {
        let name = self.cgroup.as_deref();
        name.is_some_and(|name| self.cgroups.is_frozen(name))
    }

    fn set_frozen(&self, frozen: bool) -> Result<()> {
        let name = self
            .cgroup
            .as_deref()
            .ok_or_else(|| Error::Unavailable("cgroup.freeze".into()))?;
        if frozen {
            self.frozen.store(true, Ordering::Relaxed);
        }
        self.cgroups
            .freeze(name, frozen)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::Unsupported => Error::Unavailable("cgroup.freeze".into()),
                _ => Error::Step {
                    step: "freeze".into(),
                    source: error,
                },
            })
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let Some(cgroup) = &self.cgroup else {
            return;
        };
        match &self.server {
            Some(server) => {
                // A server that is gone has no use for it.
                let release = Request::Release {
                    cgroup: cgroup.clone(),
                };
                let _ = send_message(server.as_fd(), &release, &[]);
            }
            // No server knows of it, so nobody else removes it. One that lives stays: another program may adopt it.
            None if matches!(has_ended(&self.pidfd), Ok(true)) => self.cgroups.remove_last(cgroup),
            None => {}
        }
    }
}
