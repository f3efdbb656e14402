//! Outgoing network of a box: the runtime filters, dials and relays connections.
//!
//! # Reading order
//! 1. [`EgressConfig`]: every setting.
//! 2. This file: `Egress`, the outgoing network of one box. `syn_queue`: held connections;
//!    `connection`: one connection from its arrival to its end.
//! 3. `policy`: permitted destinations; `dial`: from a host to a connection; `relay`: the byte
//!    transfer.
//! 4. `fake_ips`: the synthetic addresses of names; `dns_server`: the box's name server; `dns`: its
//!    messages.
//! 5. `rate_limit`: rate limits; `refusals`: recently refused destinations.
//!
//! # One connection
//! A box with a network has its own network namespace. Its egress sockets belong to the runtime: a
//! queue of held connections, listeners for redirected connections, and sockets for DNS queries.
//!
//! 1. A program in the box looks up `ok.example`. `dns_server` checks the name against the policies
//!    and answers with a synthetic address (`dns`, `fake_ips`).
//! 2. The program connects. The kernel holds the first packet and reports its destination to
//!    `syn_queue`.
//! 3. `fake_ips` maps the address to the name, and `policy` checks it: the operator's policy and
//!    the box's policy must both permit it. `dial` resolves the name, checks each address and
//!    connects, or asks the operator's proxy to connect.
//! 4. The runtime gives the held packet a mark, and the kernel redirects it to a listener. The mark
//!    identifies the accepted connection. `relay` then moves the bytes.
//! 5. A policy change makes every open connection check the policies again.
//!
//! A refused or failed connection gets the error that the program's kernel would report. On a
//! kernel that cannot hold packets, the runtime accepts a connection before it decides. A refusal
//! is then always a reset. The process that adopts a box receives its held packets again.

mod config;
mod connection;
mod dial;
pub(crate) mod dns;
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
use self::connection::{Arrival, Connection};
pub(crate) use self::dial::Dialer;
use self::dial::LookupPermits;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::dial::{accepts, head_of};
pub(crate) use self::fake_ips::FakeIps;
use self::rate_limit::RateLimit;
use self::refusals::Refusals;
use self::syn_queue::HeldConnections;

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
    dialer: Arc<Dialer>,
    names: FakeIps,
    permits: LookupPermits,
    policy: Current,
    /// Listeners for redirected connections: IPv4, then IPv6 if the box has it.
    listeners: Vec<TcpListener>,
    /// Queue of held connections, if the kernel supports it.
    held: Option<HeldConnections>,
    rate_limit: Mutex<RateLimit>,
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

/// Traffic of a box since this process opened its outgoing network.
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
        mut sockets: EgressSockets,
        dialer: Arc<Dialer>,
        names: FakeIps,
        policy: NetworkPolicy,
    ) -> io::Result<Self> {
        let (policy, current) = watch::channel(Arc::new(policy));
        let held = sockets
            .take_syn_queue()?
            .map(HeldConnections::new)
            .transpose()?;
        let connections = sockets.connections.into_iter().map(TcpListener::from_std);
        let rate_limit = RateLimit::new(dialer.config.connections_per_sec);
        let shared = Arc::new(Shared {
            id,
            dialer,
            names,
            permits: LookupPermits::new(),
            policy: current,
            listeners: connections.collect::<io::Result<_>>()?,
            held,
            rate_limit: Mutex::new(rate_limit),
            large_pipes: Semaphore::new(relay::LARGE_PIPES),
            counts: Counts::default(),
            refusals: Refusals::default(),
        });
        let mut tasks = vec![tokio::spawn(syn_queue::hold(Arc::clone(&shared))).abort_handle()];
        for index in 0..shared.listeners.len() {
            let accepting = accept(Arc::clone(&shared), index);
            tasks.push(tokio::spawn(accepting).abort_handle());
        }
        for socket in sockets.dns {
            let socket = UdpSocket::from_std(socket)?;
            let answering = dns_server::serve_udp(Arc::clone(&shared), socket);
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
    pub(crate) fn recheck_policy(&self) {
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

async fn accept(shared: Arc<Shared>, index: usize) {
    loop {
        match shared.listeners[index].accept().await {
            Ok((stream, _)) => shared.hand_over(stream).await,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

impl Shared {
    /// Passes an accepted connection to the task that expects it, or serves it.
    ///
    /// A connection that no task expects waits for the rate limit first.
    async fn hand_over(self: &Arc<Self>, stream: TcpStream) {
        let unclaimed = match &self.held {
            Some(held) => held.claim(stream),
            None => Some(stream),
        };
        if let Some(stream) = unclaimed {
            self.rate_limit.lock().await.wait().await;
            self.serve(Arrival::Accepted(stream));
        }
    }

    fn serve(self: &Arc<Self>, arrival: Arrival) {
        tokio::spawn(Connection::new(self).serve(arrival));
    }

    fn has_v6(&self) -> bool {
        self.listeners.len() > 1
    }

    /// Returns an error once the box has reached its byte limit.
    fn check_byte_limit(&self) -> io::Result<()> {
        let counts = &self.counts;
        let moved = counts.sent.load(Ordering::Relaxed) + counts.received.load(Ordering::Relaxed);
        match self.dialer.config.bytes {
            0 => Ok(()),
            most if moved < most => Ok(()),
            _ => Err(io::ErrorKind::QuotaExceeded.into()),
        }
    }
}

#[cfg(test)]
mod tests;
