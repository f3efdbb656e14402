//! From the fork to the first call: descriptors, connections and reaping.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use box_rpc::{Caller, Codecs, Limits, Options, Router, Session};
use box_sys::Init;
use box_transports::unix;
use rustix::fs::FileType;
use rustix::process::Signal;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::agent::Agent;
use crate::calls::router;
use crate::log_file::LogFile;
use crate::pipe::async_fd;
use crate::shm::ShmPool;

/// Maximum number of connected runtimes: the current one and those that take over.
const CONNECTIONS: usize = 4;

/// Maximum number of calls in flight on one connection, and of open streams.
const CALLS: usize = 256;

/// Events per poll. The runtime of tokio allocates a table of this size in advance.
const EVENTS: usize = 64;

/// How long no process may have ended before the agent frees its spare memory.
const QUIET: Duration = Duration::from_millis(100);

/// Precedes the first message to a runtime that takes over.
///
/// With it the agent passes the box's mount namespace, the shared memory and the egress sockets.
const GREETING: &[u8] = b"box1";

/// The inherited descriptors by purpose.
struct Descriptors {
    connection: UnixStream,
    listener: Option<UnixListener>,
    shm: Option<OwnedFd>,
    log_file: Option<OwnedFd>,
    record_event: Option<RecordEvent>,
}

impl Descriptors {
    fn new(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let mut fds = fds.into_iter();
        let connection = UnixStream::from(fds.next().ok_or(io::ErrorKind::InvalidInput)?);
        let (mut listener, mut shm, mut log_file, mut record_event) = (None, None, None, None);
        for fd in fds {
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
            if kind == FileType::Socket {
                // Listened on here and not by the runtime: the kernel reports the listening process to a peer, and that
                // must be the agent.
                rustix::net::listen(&fd, 4)?;
                listener = Some(UnixListener::from(fd));
            } else if shm.is_none() {
                shm = Some(fd);
            } else if log_file.is_none() {
                log_file = Some(fd);
            } else {
                record_event = Some(RecordEvent(fd));
            }
        }
        Ok(Self {
            connection,
            listener,
            shm,
            log_file,
            record_event,
        })
    }
}

/// An event that the runtime signals once it has persisted the box.
///
/// If the runtime exits before that, no other runtime knows of the box.
struct RecordEvent(OwnedFd);

impl RecordEvent {
    fn has_record(&self) -> bool {
        rustix::io::read(&self.0, &mut [0_u8; 8]).is_ok()
    }
}

/// An agent that has no box yet.
pub(crate) struct PreparedAgent {
    runtime: Runtime,
    children: AsyncFd<OwnedFd>,
}

impl PreparedAgent {
    pub(crate) fn new() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_io_events_per_tick(EVENTS)
            .build()?;
        let entered = runtime.enter();
        let children = async_fd(box_sys::signal_fd(&[Signal::CHILD.as_raw()])?)?;
        drop(entered);
        Ok(Self { runtime, children })
    }

    /// Serves calls until the box ends.
    pub(crate) fn serve(self, mut init: Init) -> io::Result<()> {
        let Descriptors {
            connection,
            listener,
            shm,
            log_file,
            record_event,
        } = Descriptors::new(std::mem::take(&mut init.fds))?;
        let Self { runtime, children } = self;
        let serving = Box::pin(async move {
            let agent = Agent::new(init, ShmPool::new(shm), log_file.map(LogFile::new))?;
            let agent = Arc::new(agent);
            let router = router(&agent);
            let abandoned = serve_first(connection, router.clone(), record_event)?;
            if let Some(listener) = listener {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                tokio::spawn(accept(listener, Arc::clone(&agent), router));
            }
            tokio::select! {
                ended = reap(&agent, &children) => ended,
                Ok(()) = abandoned => Ok(()),
            }
        });
        runtime.block_on(serving)
    }
}

/// Accepts later runtimes.
///
/// Only the host user that created the box can reach the socket.
async fn accept(listener: tokio::net::UnixListener, agent: Arc<Agent>, router: Router) {
    let permits = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                // A runtime that takes over needs these, and only this process has them.
                let sent = {
                    let init = agent.init();
                    let outer = [&init.outer.mounts, &init.outer.upper].into_iter();
                    let fds = outer.chain(agent.shm().file()).chain(&init.egress);
                    let fds: Vec<_> = fds.map(AsFd::as_fd).collect();
                    box_sys::send(stream.as_fd(), GREETING, &fds).is_ok()
                };
                if !sent {
                    continue;
                }
                let session = session(stream, router.clone());
                tokio::spawn(async move {
                    session.closed().await;
                    drop(permit);
                });
            }
            // Most likely the process is out of descriptors until another connection closes.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Serves the first connection until it closes.
///
/// The returned receiver fires if the connection closes before the box is persisted; otherwise the agent continues.
fn serve_first(
    stream: UnixStream,
    router: Router,
    record_event: Option<RecordEvent>,
) -> io::Result<oneshot::Receiver<()>> {
    stream.set_nonblocking(true)?;
    let session = session(tokio::net::UnixStream::from_std(stream)?, router);
    let (abandon, abandoned) = oneshot::channel();
    tokio::spawn(async move {
        session.closed().await;
        if record_event.is_some_and(|record_event| !record_event.has_record()) {
            let _ = abandon.send(());
        }
    });
    Ok(abandoned)
}

fn session(stream: tokio::net::UnixStream, router: Router) -> Session {
    let mut limits = Limits::in_process();
    // More than a runtime sends into one box at once, so its own calls always fit.
    limits.in_flight = CALLS;
    limits.open_streams = CALLS;
    // A lost runtime reads no replies: its pending calls end at once.
    limits.drain = Duration::ZERO;
    let options = Options {
        codecs: Codecs::JSON_RPC,
        limits,
        ..Options::new(Caller::Local)
    };
    Session::start(unix::over(stream, &options.limits), router, options)
}

/// Reaps the processes of the box.
///
/// The kernel reparents every orphan of the box to the agent. After a quiet period the agent frees its spare memory.
async fn reap(agent: &Agent, children: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut memory_freed = false;
    loop {
        let child = async {
            let mut ready = children.readable().await?;
            let mut record = [0_u8; 512];
            // Pending signals of one kind are merged, so one read consumes all of them.
            let _ = rustix::io::read(children.as_fd(), &mut record);
            ready.clear_ready();
            Ok::<_, io::Error>(())
        };
        if memory_freed {
            child.await?;
        } else if let Ok(ended) = tokio::time::timeout(QUIET, child).await {
            ended?;
        } else {
            box_transports::free_thread_buffers();
            box_rpc::buffer_pool::clear();
            box_sys::release_memory();
            memory_freed = true;
            continue;
        }
        memory_freed = false;
        agent.reap();
    }
}
