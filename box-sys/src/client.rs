//! Client side: the connection to the fork server and a handle for each box.

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

/// Argument that turns a program into its own fork server.
const ARGUMENT: &str = "--box-fork-server";

/// Allocator settings of the fork server, inherited by the init of every box.
///
/// Without the thread cache, [`crate::release_memory`] can return freed memory to the kernel. The
/// cache is a sixth of the memory of an idle box. One arena prevents a second one for a second
/// thread.
const ALLOCATOR: &str = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1";

/// Runs the fork server if this process was started as one, and never returns then.
///
/// The program calls it first in `main`. `init` is the main function of every box's first process.
pub fn serve_if_asked(init: InitMain) {
    if std::env::args_os()
        .nth(1)
        .is_none_or(|argument| argument != ARGUMENT)
    {
        return;
    }
    // The connection to the client is standard input, the one descriptor that every child inherits.
    // Move it away from 0, so that no code reads from it or writes to it by accident.
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    let null = std::fs::File::open("/dev/null");
    if let (Ok(socket), Ok(null)) = (socket, null)
        && rustix::stdio::dup2_stdin(&null).is_ok()
    {
        drop(null);
        // Boxes must not inherit descriptors that the caller of this program left open.
        let keep = vec![std::os::fd::AsRawFd::as_raw_fd(&socket)];
        if crate::child::close_all_but(keep).is_err() {
            std::process::exit(1);
        }
        crate::raw::hide_arguments();
        crate::server::serve(&socket, init);
    }
    std::process::exit(1);
}

/// Connection to a fork server. Threads can share it.
///
/// Dropping it ends the server and all boxes with `owned`.
#[derive(Debug)]
pub struct ForkServer {
    socket: Arc<OwnedFd>,
    process: Child,
    primitives: Primitives,
    cgroups: Arc<Cgroups>,
}

impl ForkServer {
    /// Starts `program` as a fork server. Its `main` begins with [`serve_if_asked`].
    ///
    /// The server gets an empty environment, so that no box can read the caller's environment from
    /// its init.
    pub fn start(program: &Path, config: &ServerConfig) -> Result<Self> {
        let mut command = Command::new(program);
        // The name is visible in every box. It must contain no path of the host.
        command.arg0("box");
        Self::start_command(command, config)
    }

    /// Starts a fork server with a prepared command, for example as another user.
    pub fn start_command(mut command: Command, config: &ServerConfig) -> Result<Self> {
        let (socket, far) = socket_pair().at("create a socket pair")?;
        let process = command
            .arg(ARGUMENT)
            .env_clear()
            .env("GLIBC_TUNABLES", ALLOCATOR)
            .current_dir("/")
            // Ctrl-C ends the process group of this program. The server must survive it to clean
            // up.
            .process_group(0)
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()
            .at("start the fork server")?;
        // The command holds a copy of `far`. With that copy open, the client would not see the
        // server end.
        drop(command);
        send_message(socket.as_fd(), &Request::Configure(config.clone()), &[])?;
        let mut buffer = vec![0; MESSAGE_MAX];
        let hello = receive_message::<Reply>(socket.as_fd(), &mut buffer)?
            .ok_or(Error::ServerGone)?
            .0;
        let Reply::Hello(primitives) = hello.into_result()? else {
            return Err(Error::Protocol("no hello message".into()));
        };
        let cgroups = Arc::new(Cgroups::open(&config.cgroup_parent));
        Ok(Self {
            socket: Arc::new(socket),
            process,
            primitives: *primitives,
            cgroups,
        })
    }

    /// What the server found on this host.
    pub fn primitives(&self) -> &Primitives {
        &self.primitives
    }

    /// Process id of the server.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Creates a box and waits until its init is about to run.
    ///
    /// Init receives `init_fds` in this order. [`crate::Source::Fd`] is an index into `sources`.
    pub fn create(
        &self,
        plan: &SandboxPlan,
        init_fds: &[BorrowedFd<'_>],
        sources: &[BorrowedFd<'_>],
    ) -> Result<Sandbox> {
        self.start_create(plan, init_fds, sources)?.finish()
    }

    /// Like [`Self::create`], but returns at once. For event loops.
    ///
    /// The result is readable when the box is ready.
    pub fn start_create(
        &self,
        plan: &SandboxPlan,
        init_fds: &[BorrowedFd<'_>],
        sources: &[BorrowedFd<'_>],
    ) -> Result<PendingSandbox> {
        let (near, far) = socket_pair().at("create a socket pair")?;
        let mut fds = vec![far.as_fd()];
        fds.extend(sources.iter().chain(init_fds));
        if fds.len() > FDS_MAX {
            return Err(Error::Invalid(format!(
                "descriptors: {} are too many; the limit is {}",
                fds.len() - 1,
                FDS_MAX - 1
            )));
        }
        let request = Request::Create {
            plan: Box::new(plan.clone()),
            sources: sources.len(),
        };
        send_message(self.socket.as_fd(), &request, &fds)?;
        drop(fds);
        // With no copy left here, the client sees an end of file if both server and box die.
        drop(far);
        Ok(PendingSandbox {
            near,
            finished: false,
            guest: plan.guest.id,
            cgroups: self.cgroups.clone(),
            server: self.socket.clone(),
        })
    }

    /// Adds a mount to a running box.
    ///
    /// For a writable mount, init also has to call
    /// [`Init::allow_writing`](crate::Init::allow_writing).
    pub fn add_mount(
        &self,
        sandbox: &Sandbox,
        mount: &Mount,
        source: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let mut fds = vec![sandbox.mounts.as_fd()];
        fds.extend(source);
        self.request(
            &Request::AddMount {
                mount: mount.clone(),
                guest: sandbox.guest,
            },
            &fds,
        )
    }

    /// Waits until the server has cleaned up all boxes that have ended.
    ///
    /// It has then reaped them, dropped their overlays, and removed or recycled their cgroups.
    pub fn settle(&self) -> Result<()> {
        self.request(&Request::Settle, &[])
    }

    fn request(&self, request: &Request, with: &[BorrowedFd<'_>]) -> Result<()> {
        let (near, far) = socket_pair().at("create a socket pair")?;
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
        // The server cleans up and exits when its socket closes.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

/// A box under construction. Dropping it ends the box.
#[derive(Debug)]
pub struct PendingSandbox {
    near: OwnedFd,
    finished: bool,
    guest: u32,
    cgroups: Arc<Cgroups>,
    server: Arc<OwnedFd>,
}

impl AsFd for PendingSandbox {
    /// Readable when [`Self::finish`] does not block.
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
            return Err(Error::Protocol("invalid reply of a box".into()));
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
            // From now on the box cannot report that it is ready, and exits. It may have reported
            // before.
            let _ = rustix::net::shutdown(&self.near, rustix::net::Shutdown::Read);
            if let Ok(sandbox) = self.receive() {
                let _ = sandbox.kill();
            }
        }
    }
}

/// A running box. Dropping the handle does not end the box.
#[derive(Debug)]
pub struct Sandbox {
    pidfd: OwnedFd,
    mounts: OwnedFd,
    /// Read on first use.
    pid: OnceLock<i32>,
    started: OnceLock<Option<u64>>,
    cgroup: Option<String>,
    missing: Vec<String>,
    guest: u32,
    cpu_before: Duration,
    /// Whether the box may be frozen.
    ///
    /// With cgroup version 1, a frozen process survives a kill.
    frozen: AtomicBool,
    cookies: EgressCookies,
    /// `None` after the caller has taken them.
    egress: Mutex<Option<EgressSockets>>,
    cgroups: Arc<Cgroups>,
    /// Connection to release the cgroup for reuse. An adopted box has no server.
    server: Option<Arc<OwnedFd>>,
}

impl Sandbox {
    /// The record to store for [`Sandbox::adopt`].
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

    /// Takes the egress sockets. `None` if the box has none or they are already taken.
    pub fn take_egress_sockets(&self) -> Option<EgressSockets> {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        egress.take()
    }

    /// Creates a handle for a box after its server has ended.
    ///
    /// The box's init sent `pidfd`, the mount namespace `mounts` and the egress sockets over a
    /// socket. `cgroups` has the parent of the old server. If the box has ended, dropping the
    /// handle removes its cgroups.
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

    /// Mount namespace of the box. A program that adopts the box later needs it.
    pub fn mount_namespace(&self) -> BorrowedFd<'_> {
        self.mounts.as_fd()
    }

    /// Readable when the box has ended. For event loops.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Host pid of init. Not positive if init had already ended at the first call.
    pub fn pid(&self) -> i32 {
        *self.pid.get_or_init(|| pid_of(&self.pidfd).unwrap_or(-1))
    }

    /// Start time of init, if procfs shows it.
    fn started(&self, pid: i32) -> Option<u64> {
        *self.started.get_or_init(|| {
            let started = start_time(pid.try_into().ok()?);
            // The process still runs, so the pid was not reused before the time was read.
            started.filter(|_| matches!(has_ended(&self.pidfd), Ok(false)))
        })
    }

    /// Name of the box's cgroups, below the server's parent.
    pub fn cgroup(&self) -> Option<&str> {
        self.cgroup.as_deref()
    }

    /// Names of the primitives that this box lacks.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Kills all processes of the box.
    ///
    /// The kernel ends a pid namespace together with its first process. Forked, detached and
    /// signal-ignoring processes end as well.
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

    /// Waits until the box has ended. Returns `false` on timeout.
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

    /// Kills the box and waits for its end. The server removes its cgroups later.
    pub fn destroy(self) -> Result<()> {
        self.kill()?;
        self.wait(None)?;
        Ok(())
    }

    /// Resource usage of the box.
    pub fn usage(&self) -> Usage {
        let mut usage = self
            .cgroup
            .as_deref()
            .map(|name| self.cgroups.usage(name))
            .unwrap_or_default();
        usage.cpu = usage.cpu.map(|cpu| cpu.saturating_sub(self.cpu_before));
        usage
    }

    /// Asks the kernel to stop all processes of the box, init included.
    ///
    /// The kernel does so asynchronously; see [`Self::is_frozen`].
    pub fn freeze(&self) -> Result<()> {
        self.set_frozen(true)
    }

    /// Resumes all processes of the box.
    pub fn thaw(&self) -> Result<()> {
        self.set_frozen(false)
    }

    /// Whether all processes of a frozen box have stopped. Disk I/O can delay this.
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
                // If the server has ended, the send fails, and no server reuses the cgroup.
                let release = Request::Release {
                    cgroup: cgroup.clone(),
                };
                let _ = send_message(server.as_fd(), &release, &[]);
            }
            // No server knows an adopted box, so this handle removes its cgroup. While the box
            // runs, another program may still adopt it.
            None if matches!(has_ended(&self.pidfd), Ok(true)) => self.cgroups.remove_last(cgroup),
            None => {}
        }
    }
}
