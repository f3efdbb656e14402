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

/// Time limit for an admitted connection to arrive at the listener.
///
/// Only the kernel is involved, so a connection that has not arrived by then was closed by its
/// program during the dial.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Held connections of one box.
#[derive(Debug)]
pub(super) struct HeldConnections {
    queue: AsyncFd<box_sys::SynQueue>,
    /// Admitted connections that have not arrived yet, by their mark.
    expected: Mutex<HashMap<u32, Expected>>,
    next: AtomicU32,
}

#[derive(Debug)]
struct Expected {
    to: SocketAddr,
    arrives: oneshot::Sender<TcpStream>,
}

impl HeldConnections {
    #[expect(
        deprecated,
        reason = "sound for a queue, which keeps its descriptor; the replacement is `unsafe`"
    )]
    pub(super) fn new(queue: box_sys::SynQueue) -> io::Result<Self> {
        Ok(Self {
            queue: AsyncFd::with_interest(queue, Interest::READABLE)?,
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
    let Some(held) = &shared.held else {
        return;
    };
    while let Ok(mut ready) = held.queue.readable().await {
        match ready.try_io(|queue| queue.get_ref().receive()) {
            Ok(Ok(syn)) => {
                shared.rate_limit.lock().await.wait().await;
                shared.serve(Arrival::Held(HeldConnection {
                    shared: Arc::clone(&shared),
                    to: syn.to,
                    syn: Some(syn),
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
pub(super) struct HeldConnection {
    shared: Arc<Shared>,
    to: SocketAddr,
    /// The held packet, until the runtime gives a verdict.
    syn: Option<QueuedSyn>,
}

impl HeldConnection {
    /// Returns the destination.
    pub(super) fn to(&self) -> SocketAddr {
        self.to
    }

    /// Admits the connection and accepts it at the listener.
    ///
    /// Returns `None` if the program has given up.
    pub(super) async fn admit(&mut self) -> Option<TcpStream> {
        let shared = Arc::clone(&self.shared);
        let held = shared.held.as_ref()?;
        let listener = shared.listeners.get(usize::from(self.to.is_ipv6()))?;
        let (mark, arrival) = held.expect(self.to);
        self.decide(Verdict::Pass(mark));
        // The kernel has usually completed the connection by now, which saves a wakeup.
        if let Some(stream) = accept_ready(listener)
            && let Some(other) = held.claim(stream)
        {
            tokio::spawn(async move { shared.hand_over(other).await });
        }
        let arrived = tokio::time::timeout(ARRIVAL_TIMEOUT, arrival).await;
        if let (Err(_), Some(held)) = (&arrived, &self.shared.held) {
            held.expected().remove(&mark);
        }
        arrived.ok()?.ok()
    }

    /// Refuses the connection with the error code that matches the reason.
    pub(super) fn refuse(mut self, why: Option<Refusal>) {
        self.decide(why.map_or(Verdict::Refused, Refusal::verdict));
    }

    fn decide(&mut self, verdict: Verdict) {
        if let (Some(syn), Some(held)) = (self.syn.take(), &self.shared.held) {
            // A failed verdict means that the connection no longer exists.
            let _ = held.queue.get_ref().decide(&syn, verdict);
        }
    }
}

impl Drop for HeldConnection {
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
fn accept_ready(listener: &TcpListener) -> Option<TcpStream> {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    if rustix::event::poll(&mut polled, Some(&Timespec::default())).ok()? == 0 {
        return None;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let accepted = rustix::net::accept_with(listener, flags).ok()?;
    TcpStream::from_std(accepted.into()).ok()
}
