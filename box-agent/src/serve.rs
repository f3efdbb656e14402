//! From the fork to the first call: the descriptors the agent was handed, its connections, and the dead.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use box_rpc::{Dialect, Limits, Options, Router, Session};
use box_sys::Init;
use box_transports::unix;
use rustix::fs::FileType;
use rustix::process::Signal;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::agent::Agent;
use crate::calls::router;
use crate::pipe::watched;
use crate::slot::Slots;
use crate::store::Store;

/// Runtimes that may be connected at once: one, and another that takes over.
const CONNECTIONS: usize = 4;

/// Calls of one connection at once, and as many streams.
const CALLS: usize = 256;

/// What is learned from the kernel at once: a table of as many is written before anything happens.
const EVENTS: usize = 64;

/// How long nothing must have ended before memory is given back.
const QUIET: Duration = Duration::from_millis(100);

/// What comes before the first message to a runtime that takes over, with the box's mount namespace, the slots and the
/// sockets at its exits.
const GREETING: &[u8] = b"box1";

/// What the agent was handed, told apart.
struct Handed {
    connection: UnixStream,
    listener: Option<UnixListener>,
    slots: Option<OwnedFd>,
    store: Option<OwnedFd>,
    newborn: Option<Newborn>,
}

impl Handed {
    fn new(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let mut fds = fds.into_iter();
        let connection = UnixStream::from(fds.next().ok_or(io::ErrorKind::InvalidInput)?);
        let (mut listener, mut slots, mut store, mut newborn) = (None, None, None, None);
        for fd in fds {
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
            if kind == FileType::Socket {
                // Not by the runtime: whoever connects learns from the kernel who listens, and must learn of this process.
                rustix::net::listen(&fd, 4)?;
                listener = Some(UnixListener::from(fd));
            } else if slots.is_none() {
                slots = Some(fd);
            } else if store.is_none() {
                store = Some(fd);
            } else {
                newborn = Some(Newborn(fd));
            }
        }
        Ok(Self {
            connection,
            listener,
            slots,
            store,
            newborn,
        })
    }
}

/// An event that the runtime has told once the box has a record. A runtime that is gone before that is followed by none: no other
/// knows of the box.
struct Newborn(OwnedFd);

impl Newborn {
    fn has_record(&self) -> bool {
        rustix::io::read(&self.0, &mut [0_u8; 8]).is_ok()
    }
}

/// An agent that lacks its box.
pub(crate) struct Ready {
    runtime: Runtime,
    children: AsyncFd<OwnedFd>,
}

impl Ready {
    pub(crate) fn new() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_io_events_per_tick(EVENTS)
            .build()?;
        let entered = runtime.enter();
        let children = watched(box_sys::signal_fd(&[Signal::CHILD.as_raw()])?)?;
        drop(entered);
        Ok(Self { runtime, children })
    }

    /// Serves until the box ends.
    pub(crate) fn serve(self, mut init: Init) -> io::Result<()> {
        let Handed {
            connection,
            listener,
            slots,
            store,
            newborn,
        } = Handed::new(std::mem::take(&mut init.fds))?;
        let Self { runtime, children } = self;
        let serving = Box::pin(async move {
            let agent = Agent::new(init, Slots::new(slots), store.map(Store::new))?;
            let agent = Arc::new(agent);
            let router = router(&agent);
            let left_alone = attend(connection, router.clone(), newborn)?;
            if let Some(listener) = listener {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                tokio::spawn(accept(listener, Arc::clone(&agent), router));
            }
            tokio::select! {
                ended = reap(&agent, &children) => ended,
                Ok(()) = left_alone => Ok(()),
            }
        });
        runtime.block_on(serving)
    }
}

/// Whoever can reach the socket is the machine's user, who made the box.
async fn accept(listener: tokio::net::UnixListener, agent: Arc<Agent>, router: Router) {
    let places = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                // What only this process has and another runtime needs.
                let mounts = agent.init().outer.mounts.try_clone();
                let sent = mounts.is_ok_and(|mounts| {
                    let init = agent.init();
                    let fds = [&mounts].into_iter().chain(agent.slots().file());
                    let fds: Vec<_> = fds.chain(&init.exits).map(AsFd::as_fd).collect();
                    box_sys::send(stream.as_fd(), GREETING, &fds).is_ok()
                });
                if !sent {
                    continue;
                }
                let session = session(stream, router.clone());
                tokio::spawn(async move {
                    session.closed().await;
                    drop(place);
                });
            }
            // Out of descriptors, most likely: somebody will close one.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Serves the first connection, to its end. The agent lives on after that, unless its box has no record by then: that is told.
fn attend(
    stream: UnixStream,
    router: Router,
    newborn: Option<Newborn>,
) -> io::Result<oneshot::Receiver<()>> {
    stream.set_nonblocking(true)?;
    let session = session(tokio::net::UnixStream::from_std(stream)?, router);
    let (alone, left_alone) = oneshot::channel();
    tokio::spawn(async move {
        session.closed().await;
        if newborn.is_some_and(|newborn| !newborn.has_record()) {
            let _ = alone.send(());
        }
    });
    Ok(left_alone)
}

fn session(stream: tokio::net::UnixStream, router: Router) -> Session {
    let mut limits = Limits::in_process();
    // Each more than a runtime lets into one box at once, so that its own calls always find room.
    limits.in_flight = CALLS;
    limits.open_streams = CALLS;
    // Nobody reads the answers of a runtime that is gone: what it was waiting for ends at once.
    limits.drain = Duration::ZERO;
    let options = Options {
        dialect: Some(Dialect::JsonRpc),
        limits,
        ..Options::default()
    };
    Session::start(unix::over(stream, &options.limits), router, options)
}

/// Every orphan of the box becomes a child of this process, which must see it off. When none has ended for a while, memory is
/// given back.
async fn reap(agent: &Agent, children: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut resting = false;
    loop {
        let child = async {
            let mut ready = children.readable().await?;
            let mut record = [0_u8; 512];
            // Signals of one kind do not queue up, so one read takes all there are.
            let _ = rustix::io::read(children.as_fd(), &mut record);
            ready.clear_ready();
            Ok::<_, io::Error>(())
        };
        if resting {
            child.await?;
        } else if let Ok(ended) = tokio::time::timeout(QUIET, child).await {
            ended?;
        } else {
            box_transports::free_spare_buffers();
            box_rpc::large::free();
            box_sys::rest();
            resting = true;
            continue;
        }
        resting = false;
        agent.reap();
    }
}
