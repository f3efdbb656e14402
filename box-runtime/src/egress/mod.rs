//! Outgoing network of a box: the runtime filters, dials and relays connections.
//!
//! # Reading order
//! 1. [`EgressConfig`]: every setting.
//! 2. This file: `Egress`, the outgoing network of one box. `syn_queue`: held connections;
//!    `connection`: the life of one connection.
//! 3. `policy`: permitted destinations; `dial`: from a host to a connection; `relay`: the byte
//!    transfer.
//! 4. `fake_ips`: the synthetic addresses of names; `dns_server`: the box's name server; `dns`: its
//!    messages.
//! 5. `rate_limit`: rate limits; `refusals`: recently refused destinations.
//!
//! # One connection, end to end
//! 1. A program in the box looks up `ok.example`. The name server answers with a synthetic address
//!    (`dns`, `fake_ips`).
//! 2. The program connects. The kernel holds the first packet and reports its destination to
//!    `syn_queue`.
//! 3. `fake_ips` maps the address to the name, and `policy` checks it. `dial` resolves the name,
//!    checks each address and connects.
//! 4. The kernel releases the packet and redirects it to the exit, where the runtime accepts the
//!    connection. `relay` then moves the bytes.
//!
//! A refused or failed connection gets the error that the program's kernel would report. On a
//! kernel that cannot hold packets, the runtime accepts a connection before it decides. A refusal
//! is then always a reset.

mod config;
mod connection;
mod dial;
mod dns;
mod dns_server;
mod fake_ips;
mod policy;
mod rate_limit;
mod refusals;
mod relay;
mod syn_queue;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::NetworkPolicy;
use box_protocol::actions::RefusedConnection;
use box_sys::EgressSockets;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::AbortHandle;
use uuid::Uuid;

pub use self::config::{EgressConfig, Proxy};
use self::connection::{Arrival, Going};
use self::dial::Asker;
pub(crate) use self::dial::Dialler;
pub(crate) use self::fake_ips::Names;
use self::rate_limit::Pace;
use self::refusals::Refusals;
use self::syn_queue::Gate;

/// Delay before a retry after a lack of descriptors or memory.
const RETRY: Duration = Duration::from_millis(100);

/// Outgoing network of one box. Dropping it resets all its connections.
#[derive(Debug)]
pub(crate) struct Egress {
    shared: Arc<Shared>,
    policy: watch::Sender<Arc<NetworkPolicy>>,
    tasks: Vec<AbortHandle>,
}

#[derive(Debug)]
struct Shared {
    id: Uuid,
    dialler: Arc<Dialler>,
    names: Names,
    asker: Asker,
    policy: Current,
    /// Listeners for redirected connections: IPv4, then IPv6 if the box has it.
    exits: Vec<TcpListener>,
    /// Queue of held connections, if the kernel supports it.
    gate: Option<Gate>,
    pace: Mutex<Pace>,
    large_pipes: Semaphore,
    counts: Counts,
    refusals: Refusals,
}

/// Traffic counters.
#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    refused: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// Traffic through the exits of a box since this process opened them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) open: u64,
    pub(crate) refused: u64,
}

impl Egress {
    /// Opens the outgoing network of a box.
    pub(crate) fn open(
        id: Uuid,
        mut exits: EgressSockets,
        dialler: Arc<Dialler>,
        names: Names,
        policy: NetworkPolicy,
    ) -> io::Result<Self> {
        let (policy, current) = watch::channel(Arc::new(policy));
        let gate = exits.take_syn_queue()?.map(Gate::new).transpose()?;
        let connections = exits.connections.into_iter().map(TcpListener::from_std);
        let pace = Pace::new(dialler.config.connections_per_sec);
        let shared = Arc::new(Shared {
            id,
            dialler,
            names,
            asker: Asker::new(),
            policy: current,
            exits: connections.collect::<io::Result<_>>()?,
            gate,
            pace: Mutex::new(pace),
            large_pipes: Semaphore::new(relay::LARGE_PIPES),
            counts: Counts::default(),
            refusals: Refusals::default(),
        });
        let mut tasks = vec![tokio::spawn(syn_queue::hold(Arc::clone(&shared))).abort_handle()];
        for place in 0..shared.exits.len() {
            let accepting = accept(Arc::clone(&shared), place);
            tasks.push(tokio::spawn(accepting).abort_handle());
        }
        for exit in exits.dns {
            let exit = UdpSocket::from_std(exit)?;
            let answering = dns_server::messages(Arc::clone(&shared), exit);
            tasks.push(tokio::spawn(answering).abort_handle());
        }
        Ok(Self {
            shared,
            policy,
            tasks,
        })
    }

    /// Replaces the policy of the box and resets connections that it forbids.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) {
        self.policy.send_replace(Arc::new(policy));
    }

    /// Resets connections that a changed operator policy forbids.
    pub(crate) fn look_again(&self) {
        self.policy.send_modify(|_| {});
    }

    /// Returns the recently refused destinations.
    pub(crate) fn refused(&self) -> Vec<RefusedConnection> {
        self.shared.refusals.list()
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let counts = &self.shared.counts;
        Traffic {
            sent: counts.sent.load(Ordering::Relaxed),
            received: counts.received.load(Ordering::Relaxed),
            open: counts.open.load(Ordering::Relaxed) as u64,
            refused: counts.refused.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        // Each connection watches the policy itself and ends when the policy forbids it.
    }
}

type Current = watch::Receiver<Arc<NetworkPolicy>>;

async fn accept(shared: Arc<Shared>, place: usize) {
    loop {
        match shared.exits[place].accept().await {
            Ok((stream, _)) => shared.take_in(stream).await,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

impl Shared {
    /// Passes an accepted connection to the task that expects it, or serves it.
    ///
    /// A connection that no task expects waits for the rate limit first.
    async fn take_in(self: &Arc<Self>, stream: TcpStream) {
        let unclaimed = match &self.gate {
            Some(gate) => gate.claim(stream),
            None => Some(stream),
        };
        if let Some(stream) = unclaimed {
            self.pace.lock().await.wait().await;
            self.serve(Arrival::Accepted(stream));
        }
    }

    fn serve(self: &Arc<Self>, arrival: Arrival) {
        tokio::spawn(Going::new(self).serve(arrival));
    }

    fn has_v6(&self) -> bool {
        self.exits.len() > 1
    }

    /// Returns an error once the box has reached its byte limit.
    fn enough(&self) -> io::Result<()> {
        let counts = &self.counts;
        let moved = counts.sent.load(Ordering::Relaxed) + counts.received.load(Ordering::Relaxed);
        match self.dialler.config.bytes {
            0 => Ok(()),
            most if moved < most => Ok(()),
            _ => Err(io::ErrorKind::QuotaExceeded.into()),
        }
    }
}

#[cfg(test)]
mod tests;
