//! The gate of a box: connections are held there until somebody has dialled for them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_sys::{FIRST_MARK, QueuedSyn, Verdict};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::connection::Arrival;
use super::policy::Refusal;
use super::{RETRY, Shared};

/// How long a connection that was let in may take to arrive. Nothing is between but the kernel, so one that has not come by
/// then was given up by its program while somebody dialled.
const ARRIVES: Duration = Duration::from_secs(5);

/// Where the connections of one box are held.
#[derive(Debug)]
pub(super) struct Gate {
    held: AsyncFd<box_sys::SynQueue>,
    /// Those that were let in and have not arrived, by the mark they were given.
    expected: Mutex<HashMap<u32, Expected>>,
    next: AtomicU32,
}

#[derive(Debug)]
struct Expected {
    to: SocketAddr,
    arrives: oneshot::Sender<TcpStream>,
}

impl Gate {
    #[expect(
        deprecated,
        reason = "sound for a gate, whose descriptor stays the same; the new way is `unsafe` for the sake of others"
    )]
    pub(super) fn new(gate: box_sys::SynQueue) -> io::Result<Self> {
        Ok(Self {
            held: AsyncFd::with_interest(gate, Interest::READABLE)?,
            expected: Mutex::default(),
            next: AtomicU32::new(FIRST_MARK),
        })
    }

    fn expected(&self) -> MutexGuard<'_, HashMap<u32, Expected>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an accepted connection to whoever expects it, or back.
    pub(super) fn claim(&self, stream: TcpStream) -> Option<TcpStream> {
        let mark = box_sys::socket_mark(&stream).unwrap_or_default();
        let to = super::connection::destination(&stream);
        // Whoever had the box before may have given the same mark to another.
        let is_the_same = |expected: &Expected| {
            to.is_some_and(|to| (to.ip(), to.port()) == (expected.to.ip(), expected.to.port()))
        };
        let mut all = self.expected();
        let expected = all.get(&mark).is_some_and(is_the_same);
        let expected = expected.then(|| all.remove(&mark)).flatten();
        drop(all);
        match expected {
            Some(expected) => expected.arrives.send(stream).err(),
            None => Some(stream),
        }
    }

    fn expect(&self, to: SocketAddr) -> (u32, oneshot::Receiver<TcpStream>) {
        let (arrives, arrival) = oneshot::channel();
        let mark = self.next.fetch_add(1, Ordering::Relaxed).max(FIRST_MARK);
        self.expected().insert(mark, Expected { to, arrives });
        (mark, arrival)
    }
}

/// Serves what is held, for as long as the box lives. What comes faster than it may stays where it is, in the kernel.
pub(super) async fn hold(shared: Arc<Shared>) {
    let Some(gate) = &shared.gate else {
        return;
    };
    while let Ok(mut ready) = gate.held.readable().await {
        match ready.try_io(|held| held.get_ref().receive()) {
            Ok(Ok(held)) => {
                shared.pace.lock().await.wait().await;
                shared.serve(Arrival::Held(Knock {
                    shared: Arc::clone(&shared),
                    to: held.to,
                    held: Some(held),
                }));
                tokio::task::coop::consume_budget().await;
            }
            Ok(Err(_)) => tokio::time::sleep(RETRY).await,
            Err(_not_yet) => {}
        }
    }
}

/// A connection at the gate. Dropped undecided, it stays there for whoever has the box next.
#[derive(Debug)]
pub(super) struct Knock {
    shared: Arc<Shared>,
    to: SocketAddr,
    /// Until it is decided about.
    held: Option<QueuedSyn>,
}

impl Knock {
    /// Where it is going.
    pub(super) fn to(&self) -> SocketAddr {
        self.to
    }

    /// Lets it in: its program is connected, to us. `None` if it has not waited.
    pub(super) async fn let_in(&mut self) -> Option<TcpStream> {
        let shared = Arc::clone(&self.shared);
        let gate = shared.gate.as_ref()?;
        let exit = shared.exits.get(usize::from(self.to.is_ipv6()))?;
        let (mark, arrival) = gate.expect(self.to);
        self.decide(Verdict::Pass(mark));
        // The kernel has made the connection meanwhile, as a rule: nobody has to be woken for it.
        if let Some(stream) = arrived_at(exit)
            && let Some(stray) = gate.claim(stream)
        {
            tokio::spawn(async move { shared.take_in(stray).await });
        }
        let arrived = tokio::time::timeout(ARRIVES, arrival).await;
        if let (Err(_), Some(gate)) = (&arrived, &self.shared.gate) {
            gate.expected().remove(&mark);
        }
        arrived.ok()?.ok()
    }

    /// Tells its program why there is no connection, in the words that a program can be told.
    pub(super) fn refuse(mut self, why: Option<Refusal>) {
        self.decide(why.map_or(Verdict::Refused, Refusal::verdict));
    }

    fn decide(&mut self, verdict: Verdict) {
        if let (Some(held), Some(gate)) = (self.held.take(), &self.shared.gate) {
            // What cannot be told is gone.
            let _ = gate.held.get_ref().decide(&held, verdict);
        }
    }
}

impl Drop for Knock {
    fn drop(&mut self) {
        // Whoever stops leaves it to the next; who has failed has no next.
        if std::thread::panicking() {
            self.decide(Verdict::Refused);
        }
    }
}

/// A connection that has arrived by now. Looked for first: whether accepting waits is for the socket to say, of which the box's init
/// has a copy.
fn arrived_at(exit: &TcpListener) -> Option<TcpStream> {
    let mut is_there = [PollFd::new(exit, PollFlags::IN)];
    if rustix::event::poll(&mut is_there, Some(&Timespec::default())).ok()? == 0 {
        return None;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let accepted = rustix::net::accept_with(exit, flags).ok()?;
    TcpStream::from_std(accepted.into()).ok()
}
