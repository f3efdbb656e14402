//! Queue of outgoing connections that the kernel holds during the dial.

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

/// Time limit for an admitted connection to arrive at the exit.
///
/// Only the kernel is involved, so a connection that has not arrived by then was closed by its
/// program during the dial.
const ARRIVES: Duration = Duration::from_secs(5);

/// Held connections of one box.
#[derive(Debug)]
pub(super) struct Gate {
    held: AsyncFd<box_sys::SynQueue>,
    /// Admitted connections that have not arrived yet, by their mark.
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

    /// Passes an accepted connection to the task that expects it, or returns it.
    pub(super) fn claim(&self, stream: TcpStream) -> Option<TcpStream> {
        let mark = box_sys::socket_mark(&stream).unwrap_or_default();
        let to = super::connection::destination(&stream);
        // A previous owner of the box may have given the same mark to another connection.
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

/// Serves held connections for the lifetime of the box.
///
/// Connections beyond the rate limit stay in the kernel's queue.
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

/// Connection held by the kernel.
///
/// If it is dropped without a verdict, the kernel keeps holding it for the next owner of the box.
#[derive(Debug)]
pub(super) struct Knock {
    shared: Arc<Shared>,
    to: SocketAddr,
    /// The held packet, until the runtime gives a verdict.
    held: Option<QueuedSyn>,
}

impl Knock {
    /// Returns the destination.
    pub(super) fn to(&self) -> SocketAddr {
        self.to
    }

    /// Admits the connection and accepts it at the exit.
    ///
    /// Returns `None` if the program has given up.
    pub(super) async fn let_in(&mut self) -> Option<TcpStream> {
        let shared = Arc::clone(&self.shared);
        let gate = shared.gate.as_ref()?;
        let exit = shared.exits.get(usize::from(self.to.is_ipv6()))?;
        let (mark, arrival) = gate.expect(self.to);
        self.decide(Verdict::Pass(mark));
        // The kernel has usually completed the connection by now, which saves a wakeup.
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

    /// Refuses the connection with the error code that matches the reason.
    pub(super) fn refuse(mut self, why: Option<Refusal>) {
        self.decide(why.map_or(Verdict::Refused, Refusal::verdict));
    }

    fn decide(&mut self, verdict: Verdict) {
        if let (Some(held), Some(gate)) = (self.held.take(), &self.shared.gate) {
            // A failed verdict means that the connection no longer exists.
            let _ = gate.held.get_ref().decide(&held, verdict);
        }
    }
}

impl Drop for Knock {
    fn drop(&mut self) {
        // A runtime that stops leaves the packet to its successor; a panic has no successor.
        if std::thread::panicking() {
            self.decide(Verdict::Refused);
        }
    }
}

/// Accepts a connection that has already arrived.
///
/// The function polls first, because the box's init shares the socket and its non-blocking flag.
fn arrived_at(exit: &TcpListener) -> Option<TcpStream> {
    let mut is_there = [PollFd::new(exit, PollFlags::IN)];
    if rustix::event::poll(&mut is_there, Some(&Timespec::default())).ok()? == 0 {
        return None;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let accepted = rustix::net::accept_with(exit, flags).ok()?;
    TcpStream::from_std(accepted.into()).ok()
}
