//! The way out of a box with a network: what arrives at its exits is looked at, decided on, dialled from here and relayed.
//!
//! # Reading order
//! 1. [`EgressConfig`]: every setting.
//! 2. This file: `Egress`, the way out of one box. `gate`: where its connections are held; `going`: what becomes of one.
//! 3. `policy`: who may be connected to; `dial`: from a host to a connection; `relay`: the bytes.
//! 4. `names`: the addresses a box is told; `answer`: its name server; `dns`: what that is asked and says.
//! 5. `pace`: how fast it may; `refusals`: the destinations that were refused.
//!
//! # One connection, end to end
//! A program in the box asks for `ok.example` and is told an address that is nobody's (`dns`, `names`). It connects; the kernel
//! holds the first packet and tells `gate` where it is going. `names` says whom that means, `policy` whether that may be, `dial`
//! looks the name up, asks about what it finds and connects. Then the packet may pass: the kernel redirects it to the exit, where the
//! connection is accepted here, and `relay` moves bytes. What may not be or cannot be is told to the program as its kernel would. Where
//! the kernel has no gate, a connection is accepted first and decided on then; all that can be told by that time is a reset.

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

/// How long to wait before something is tried again that failed for want of descriptors or memory.
const RETRY: Duration = Duration::from_millis(100);

/// The way out of one box. Dropped, it is closed, and what goes through it is broken off.
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
    /// Where connections arrive: those of IPv4, then those of IPv6, if the box has it.
    exits: Vec<TcpListener>,
    /// Where they are held before.
    gate: Option<Gate>,
    pace: Mutex<Pace>,
    large_pipes: Semaphore,
    counts: Counts,
    refusals: Refusals,
}

/// What has gone through.
#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    refused: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// What has gone through the exits of a box since this process has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) open: u64,
    pub(crate) refused: u64,
}

impl Egress {
    /// Opens the way out of a box.
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

    /// Changes to whom the box may connect. What it may not any more is broken off.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) {
        self.policy.send_replace(Arc::new(policy));
    }

    /// Breaks off what may not be any more after a change of the operator's policy.
    pub(crate) fn look_again(&self) {
        self.policy.send_modify(|_| {});
    }

    /// The destinations that were refused lately.
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
        // Connections end with the policy that they are made under.
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
    /// Gives a connection that was accepted to whoever has dialled for it, or begins to serve it when its turn has come.
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

    /// An error once the box has moved as many bytes as it may.
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
