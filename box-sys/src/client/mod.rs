//! Client side: the connection to the fork server and a handle for each box.

mod changes;
mod pending;
mod sandbox;
mod snapshot;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::cgroup::Cgroups;
use crate::child::InitMain;
use crate::error::{At, Error, Result};
use crate::plan::{Mount, SandboxPlan};
use crate::probe::Primitives;
use crate::server::disks::DiskKind;
use crate::wire::{
    FDS_MAX, MESSAGE_MAX, Reply, Request, ServerConfig, next_length, receive_message, send_message,
    socket_pair,
};

pub use self::changes::{ChangesOf, PendingChanges};
pub use self::pending::PendingSandbox;
pub use self::sandbox::Sandbox;
pub use self::snapshot::PendingSnapshot;

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
            guest: (plan.guest.id, plan.guest.group),
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
        .map(drop)
    }

    /// The kind of disk that boxes of this server can have.
    ///
    /// The first call takes a moment, because the server makes a small disk.
    pub fn disk_kind(&self) -> Result<DiskKind> {
        match self.request(&Request::DiskKind, &[])? {
            Reply::Disk(kind) => Ok(kind),
            _ => Err(Error::Protocol("no kind of disk".into())),
        }
    }

    /// Waits until the server has cleaned up all boxes that have ended.
    ///
    /// It has then reaped them, dropped their overlays, and removed or recycled their cgroups.
    pub fn settle(&self) -> Result<()> {
        self.request(&Request::Settle, &[]).map(drop)
    }

    fn request(&self, asked: &Request, with: &[BorrowedFd<'_>]) -> Result<Reply> {
        request(&self.socket, asked, with)
    }
}

/// Sends a request to a server, and waits for its reply.
fn request(socket: &OwnedFd, request: &Request, with: &[BorrowedFd<'_>]) -> Result<Reply> {
    let (near, far) = socket_pair().at("create a socket pair")?;
    let mut fds = vec![far.as_fd()];
    fds.extend(with);
    match send_message(socket.as_fd(), request, &fds) {
        Err(Error::Step { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => {
            return Err(Error::ServerGone);
        }
        sent => sent?,
    }
    drop(fds);
    drop(far);
    let mut buffer = vec![0; next_length(near.as_fd()).at("receive")?];
    receive_message::<Reply>(near.as_fd(), &mut buffer)?
        .ok_or(Error::ServerGone)?
        .0
        .into_result()
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // The server cleans up and exits when its socket closes.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}
