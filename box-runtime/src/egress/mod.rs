//! The way out of a box with a network: what arrives at its exits is looked at, decided on, dialled from here and relayed.
//!
//! # Reading order
//! 1. [`EgressConfig`]: every setting.
//! 2. This file: `Egress`, the way out of one box; what becomes of a connection, and of a question for a name.
//! 3. `policy`: who may be connected to; `dial`: from a host to a connection; `relay`: the bytes.
//! 4. `names`: the addresses a box is told; `answer`: its name server; `dns`: what that is asked and says.
//! 5. `pace`: how fast it may.
//!
//! # One connection, end to end
//! A program in the box asks for `ok.example` and is told an address that is nobody's (`dns`, `names`). It connects; the kernel
//! redirects that to the exit, where it is accepted here. The kernel says where it was going, `names` whom that means, `policy`
//! whether that may be, `dial` looks the name up, asks about what it finds and connects, and `relay` moves bytes. What may not be
//! or cannot be is reset: the kernel has accepted it long before anybody could decide.

mod answer;
mod config;
mod dial;
mod dns;
mod names;
mod pace;
mod policy;
mod relay;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::{Host, NetworkPolicy};
use box_sys::Exits;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

pub use self::config::{EgressConfig, Proxy};
use self::dial::Dialled;
pub(crate) use self::dial::Dialler;
pub(crate) use self::names::Names;
use self::pace::Pace;
use self::policy::Refusal;

/// The port of name servers, whose connections are answered here.
const DNS_PORT: u16 = 53;
/// How long to wait for a descriptor to become free.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

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
    has_v6: bool,
    counts: Counts,
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
        exits: Exits,
        dialler: Arc<Dialler>,
        names: Names,
        policy: NetworkPolicy,
    ) -> io::Result<Self> {
        let (policy, current) = watch::channel(Arc::new(policy));
        let shared = Arc::new(Shared {
            id,
            dialler,
            names,
            has_v6: exits.connections.len() > 1,
            counts: Counts::default(),
        });
        let mut tasks = Vec::new();
        for exit in exits.connections {
            let exit = TcpListener::from_std(exit)?;
            let accepting = accept(Arc::clone(&shared), exit, current.clone());
            tasks.push(tokio::spawn(accepting).abort_handle());
        }
        for exit in exits.questions {
            let exit = UdpSocket::from_std(exit)?;
            let answering = answer::messages(Arc::clone(&shared), exit, current.clone());
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

async fn accept(shared: Arc<Shared>, exit: TcpListener, policy: Current) {
    let mut pace = Pace::new(shared.dialler.config.connections_per_sec);
    loop {
        pace.wait().await;
        match exit.accept().await {
            Ok((stream, _)) => {
                let going = Going::new(&shared, stream);
                tokio::spawn(going.serve(policy.clone()));
            }
            Err(_) => tokio::time::sleep(OUT_OF_DESCRIPTORS).await,
        }
    }
}

impl Shared {
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

/// A connection on its way out. Counted as open until it is dropped.
struct Going {
    shared: Arc<Shared>,
    stream: TcpStream,
    /// What of it has moved, for the log.
    sent: AtomicU64,
    received: AtomicU64,
}

/// Where a connection was going, and where it went.
#[derive(Debug, Default)]
struct Route {
    host: Option<Host>,
    address: Option<IpAddr>,
    port: u16,
}

impl Going {
    fn new(shared: &Arc<Shared>, stream: TcpStream) -> Self {
        shared.counts.open.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(shared),
            stream,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Serves it to its end, and tells what came of it.
    async fn serve(mut self, mut policy: Current) {
        let mut route = Route::default();
        let end = self.pass(&mut route, &mut policy).await;
        let counts = &self.shared.counts;
        counts.open.fetch_sub(1, Ordering::Relaxed);
        let (why, broken) = match end {
            Ok(broken) => ("", broken),
            Err(refusal) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                (refusal.as_str(), true)
            }
        };
        if self.shared.dialler.config.audit {
            let host = route.host.as_ref().map(Host::to_string).unwrap_or_default();
            let address = route
                .address
                .map(|address| address.to_string())
                .unwrap_or_default();
            tracing::info!(
                target: "box_egress",
                box_id = %self.shared.id, host, address, port = route.port, why, broken,
                sent = self.sent.load(Ordering::Relaxed), received = self.received.load(Ordering::Relaxed),
                "{}", if end.is_ok() { "connected" } else { "not connected" }
            );
        }
        if broken {
            relay::reset(self.stream);
        }
    }

    /// Passes it on. Whether it is to be broken off at the end, or why there was no way.
    async fn pass(&mut self, route: &mut Route, policy: &mut Current) -> Result<bool, Refusal> {
        let shared = Arc::clone(&self.shared);
        let to = destination(&self.stream).ok_or(Refusal::NotLeaving)?;
        route.port = to.port();
        if shared.counts.open.load(Ordering::Relaxed) > shared.dialler.config.connections {
            return Err(Refusal::Connections);
        }
        if to.port() == DNS_PORT {
            answer::connection(&shared, &mut self.stream, policy).await;
            return Ok(false);
        }
        if to.ip().is_loopback() {
            return Err(Refusal::NotLeaving);
        }
        let host = shared.names.host_at(to.ip()).ok_or(Refusal::UnknownName)?;
        let host = route.host.insert(host);
        shared.enough().map_err(|_| Refusal::Bytes)?;
        let policies = shared.dialler.policies(&policy.borrow_and_update());
        let dialling = shared.dialler.dial(&policies, host, to.port());
        let Dialled {
            stream: far,
            address,
        } = dialling.await?;
        route.address = address;
        for stream in [&self.stream, &far] {
            // What is small is waited for.
            let _ = stream.set_nodelay(true);
        }
        let moved = tokio::select! {
            moved = relay::relay(&self.stream, &far, &*self) => moved,
            () = self.no_longer(policy, host, address, to.port()) => Err(io::ErrorKind::PermissionDenied.into()),
        };
        if moved.is_err() {
            relay::reset(far);
        }
        Ok(moved.is_err())
    }

    /// Resolves when the connection may not be any more, or the way out is closed.
    async fn no_longer(
        &self,
        policy: &mut Current,
        host: &Host,
        address: Option<IpAddr>,
        port: u16,
    ) {
        while policy.changed().await.is_ok() {
            let policies = self.shared.dialler.policies(&policy.borrow_and_update());
            let may = policies
                .may_dial(host, port)
                .and_then(|()| address.map_or(Ok(()), |address| policies.may_reach(address, port)));
            if may.is_err() {
                return;
            }
        }
    }
}

impl relay::Count for Going {
    fn sent(&self, bytes: u64) -> io::Result<()> {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.shared.counts.sent.fetch_add(bytes, Ordering::Relaxed);
        self.shared.enough()
    }

    fn received(&self, bytes: u64) -> io::Result<()> {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.shared
            .counts
            .received
            .fetch_add(bytes, Ordering::Relaxed);
        self.shared.enough()
    }
}

/// Where a connection was going before it was redirected.
fn destination(stream: &TcpStream) -> Option<SocketAddr> {
    use rustix::net::sockopt::{ip_original_dst, ipv6_original_dst};
    match stream.local_addr().ok()? {
        SocketAddr::V4(_) => ip_original_dst(stream).ok().map(SocketAddr::V4),
        SocketAddr::V6(_) => ipv6_original_dst(stream).ok().map(SocketAddr::V6),
    }
}

#[cfg(test)]
mod tests;
