//! The gate of a box: connections are held there until somebody has dialled for them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_sys::{FIRST_MARK, Held, Verdict};
use rustix::net::SocketFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::going::Arrival;
use super::policy::Refusal;
use super::{OUT_OF_DESCRIPTORS, Shared};

/// How long a connection that was let in may take to arrive. Nothing is between but the kernel, so one that has not come by
/// then was given up by its program while somebody dialled.
const ARRIVES: Duration = Duration::from_secs(5);

/// Where the connections of one box are held.
#[derive(Debug)]
pub(super) struct Gate {
    held: AsyncFd<box_sys::Gate>,
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
    pub(super) fn new(gate: box_sys::Gate) -> io::Result<Self> {
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
        let mark = box_sys::mark_of(&stream).unwrap_or_default();
        let expected = self.expected().remove(&mark);
        match expected {
            // Whoever had the box before may have given the same mark to another.
            Some(expected) if super::going::destination(&stream) == Some(expected.to) => {
                expected.arrives.send(stream).err()
            }
            _ => Some(stream),
        }
    }

    fn expect(&self, to: SocketAddr) -> (u32, oneshot::Receiver<TcpStream>) {
        let (arrives, arrival) = oneshot::channel();
        let mark = self.next.fetch_add(1, Ordering::Relaxed).max(FIRST_MARK);
        self.expected().insert(mark, Expected { to, arrives });
        (mark, arrival)
    }
}

/// Serves what is held, for as long as the box lives.
pub(super) async fn hold(shared: Arc<Shared>) {
    let Some(gate) = &shared.gate else {
        return;
    };
    while let Ok(mut ready) = gate.held.readable().await {
        match ready.try_io(|held| held.get_ref().receive()) {
            Ok(Ok(held)) => shared.serve(Arrival::Held(Knock {
                shared: Arc::clone(&shared),
                to: held.to,
                held: Some(held),
            })),
            Ok(Err(_)) => tokio::time::sleep(OUT_OF_DESCRIPTORS).await,
            Err(_not_yet) => {}
        }
    }
}

/// A connection at the gate. Dropped undecided, it is refused.
#[derive(Debug)]
pub(super) struct Knock {
    shared: Arc<Shared>,
    to: SocketAddr,
    /// Until it is decided about.
    held: Option<Held>,
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
        let (mark, arrival) = gate.expect(self.to);
        self.decide(Verdict::Pass(mark));
        // The kernel has made the connection meanwhile, as a rule: nobody has to be woken for it.
        let exit = shared.exits.get(usize::from(self.to.is_ipv6()))?;
        if let Ok(accepted) =
            rustix::net::accept_with(exit, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            && let Ok(stream) = TcpStream::from_std(accepted.into())
        {
            shared.arrived(stream);
        }
        let arrived = tokio::time::timeout(ARRIVES, arrival).await;
        if arrived.is_err() {
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
        self.decide(Verdict::Refused);
    }
}
