//! One connection on its way out, from where it arrives to its end.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use box_protocol::Host;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::dial::Dialled;
use super::policy::Refusal;
use super::syn_queue::Knock;
use super::{Current, Shared, dns_server, relay};

/// The port of name servers, whose connections are answered here.
const DNS_PORT: u16 = 53;

/// Where a connection is before anybody has decided about it.
pub(super) enum Arrival {
    /// At the gate: its program waits to be told.
    Held(Knock),
    /// At the exit: the kernel has accepted it, and its program knows no more than that.
    Accepted(TcpStream),
}

impl Arrival {
    /// Where it was going.
    fn destination(&self) -> Option<SocketAddr> {
        match self {
            Self::Held(knock) => Some(knock.to()),
            Self::Accepted(stream) => destination(stream),
        }
    }

    /// Lets it in, if it is not; somebody is there now.
    async fn enter(&mut self) -> Result<&TcpStream, Refusal> {
        if let Self::Held(knock) = self {
            *self = Self::Accepted(knock.let_in().await.ok_or(Refusal::Gone)?);
        }
        match self {
            Self::Accepted(stream) => Ok(stream),
            Self::Held(_) => Err(Refusal::Gone),
        }
    }

    /// Tells its program that it is no connection, or none any more.
    fn end(self, refusal: Option<Refusal>) {
        match self {
            Self::Held(knock) => knock.refuse(refusal),
            Self::Accepted(stream) => relay::reset(stream),
        }
    }
}

/// A connection on its way out. Counted as open until it is dropped.
pub(super) struct Going {
    shared: Arc<Shared>,
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

/// Where it was going, as people write it.
impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(Host::Address(IpAddr::V6(address))) => write!(f, "[{address}]:{}", self.port),
            Some(host) => write!(f, "{host}:{}", self.port),
            None => write!(f, "port {}", self.port),
        }
    }
}

impl Going {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.counts.open.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(shared),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Serves it to its end, and tells what came of it.
    pub(super) async fn serve(self, mut arrival: Arrival) {
        let mut route = Route::default();
        let end = self.pass(&mut arrival, &mut route).await;
        let counts = &self.shared.counts;
        let (why, broken) = match end {
            Ok(broken) => ("", broken),
            Err(refusal) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                self.shared.refusals.tell(|| route.to_string(), refusal);
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
            arrival.end(end.err());
        }
    }

    /// Passes it on. Whether it is to be broken off at the end, or why there was no way.
    async fn pass(&self, arrival: &mut Arrival, route: &mut Route) -> Result<bool, Refusal> {
        let shared = &self.shared;
        let to = arrival.destination().ok_or(Refusal::NotLeaving)?;
        route.port = to.port();
        if shared.counts.open.load(Ordering::Relaxed) > shared.dialler.config.connections {
            return Err(Refusal::Connections);
        }
        let mut policy = shared.policy.clone();
        if let Arrival::Accepted(stream) = arrival
            && to.port() == DNS_PORT
        {
            dns_server::connection(shared, stream).await;
            return Ok(false);
        }
        if to.ip().is_loopback() {
            return Err(Refusal::NotLeaving);
        }
        let host = shared.names.host_at(to.ip()).ok_or(Refusal::UnknownName)?;
        let host = route.host.insert(host);
        shared.enough().map_err(|_| Refusal::Bytes)?;
        let policies = shared.dialler.policies(&policy.borrow_and_update());
        let dialling = shared
            .dialler
            .dial(&shared.asker, &policies, host, to.port());
        let Dialled {
            stream: far,
            address,
        } = dialling.await?;
        route.address = address;
        let near = arrival.enter().await?;
        for stream in [near, &far] {
            // What is small is waited for.
            let _ = stream.set_nodelay(true);
        }
        let moved = tokio::select! {
            moved = relay::relay(near, &far, self) => moved,
            () = self.no_longer(&mut policy, host, address, to.port()) => Err(io::ErrorKind::PermissionDenied.into()),
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

impl Drop for Going {
    fn drop(&mut self) {
        self.shared.counts.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl relay::Count for Going {
    fn large_pipes(&self) -> &Semaphore {
        &self.shared.large_pipes
    }

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
pub(super) fn destination(stream: &TcpStream) -> Option<SocketAddr> {
    use rustix::net::sockopt::{ip_original_dst, ipv6_original_dst};
    match stream.local_addr().ok()? {
        SocketAddr::V4(_) => ip_original_dst(stream).ok().map(SocketAddr::V4),
        SocketAddr::V6(_) => ipv6_original_dst(stream).ok().map(SocketAddr::V6),
    }
}
