//! One outgoing connection, from its arrival to its end.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use box_protocol::Host;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::dial::Dialled;
use super::policy::Refusal;
use super::syn_queue::HeldConnection;
use super::{Current, Shared, dns_server, relay};

/// DNS port; the runtime answers connections to it.
const DNS_PORT: u16 = 53;

/// Outgoing connection before the decision.
pub(super) enum Arrival {
    /// The kernel holds the first packet, and the program waits in `connect`.
    Held(HeldConnection),
    /// The kernel has accepted the connection at a listener.
    Accepted(TcpStream),
}

impl Arrival {
    /// Returns the original destination.
    fn destination(&self) -> Option<SocketAddr> {
        match self {
            Self::Held(held) => Some(held.to()),
            Self::Accepted(stream) => destination(stream),
        }
    }

    /// Accepts the connection after a successful dial, if it is still held.
    async fn accept(&mut self) -> Result<&TcpStream, Refusal> {
        if let Self::Held(held) = self {
            *self = Self::Accepted(held.admit().await.ok_or(Refusal::Gone)?);
        }
        match self {
            Self::Accepted(stream) => Ok(stream),
            Self::Held(_) => Err(Refusal::Gone),
        }
    }

    /// Ends the connection: refuses a held one and resets an accepted one.
    fn end(self, refusal: Option<Refusal>) {
        match self {
            Self::Held(held) => held.refuse(refusal),
            Self::Accepted(stream) => relay::reset(stream),
        }
    }
}

/// Outgoing connection, counted as open until it is dropped.
pub(super) struct Connection {
    shared: Arc<Shared>,
    /// Bytes sent, for the log.
    sent: AtomicU64,
    received: AtomicU64,
}

/// Requested destination and actual remote address.
#[derive(Debug, Default)]
struct Route {
    host: Option<Host>,
    address: Option<IpAddr>,
    port: u16,
}

/// Formats the requested destination for the log.
impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(Host::Address(IpAddr::V6(address))) => write!(f, "[{address}]:{}", self.port),
            Some(host) => write!(f, "{host}:{}", self.port),
            None => write!(f, "port {}", self.port),
        }
    }
}

impl Connection {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.counts.open.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(shared),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Serves the connection to its end and logs the outcome.
    pub(super) async fn serve(self, mut arrival: Arrival) {
        let mut route = Route::default();
        let end = self.dial_and_relay(&mut arrival, &mut route).await;
        let counts = &self.shared.counts;
        let (why, broken) = match end {
            Ok(broken) => ("", broken),
            Err(refusal) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                self.shared.refusals.record(|| route.to_string(), refusal);
                (refusal.as_str(), true)
            }
        };
        if self.shared.dialer.config.audit {
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

    /// Dials and relays; returns whether the connection must be reset at the end.
    async fn dial_and_relay(
        &self,
        arrival: &mut Arrival,
        route: &mut Route,
    ) -> Result<bool, Refusal> {
        let shared = &self.shared;
        let to = arrival.destination().ok_or(Refusal::NotLeaving)?;
        route.port = to.port();
        if shared.counts.open.load(Ordering::Relaxed) > shared.dialer.config.connections {
            return Err(Refusal::Connections);
        }
        let mut policy = shared.policy.clone();
        if let Arrival::Accepted(stream) = arrival
            && to.port() == DNS_PORT
        {
            dns_server::serve_tcp(shared, stream).await;
            return Ok(false);
        }
        if to.ip().is_loopback() {
            return Err(Refusal::NotLeaving);
        }
        let host = shared.names.host_at(to.ip()).ok_or(Refusal::UnknownName)?;
        let host = route.host.insert(host);
        shared.check_byte_limit().map_err(|_| Refusal::Bytes)?;
        let policies = shared.dialer.policies(&policy.borrow_and_update());
        let dialling = shared
            .dialer
            .dial(&shared.permits, &policies, host, to.port());
        let Dialled {
            stream: far,
            address,
        } = dialling.await?;
        route.address = address;
        let near = arrival.accept().await?;
        for stream in [near, &far] {
            // Avoids the delay of small writes.
            let _ = stream.set_nodelay(true);
        }
        let moved = tokio::select! {
            moved = relay::relay(near, &far, self) => moved,
            () = self.revoked(&mut policy, host, address, to.port()) => Err(io::ErrorKind::PermissionDenied.into()),
        };
        if moved.is_err() {
            relay::reset(far);
        }
        Ok(moved.is_err())
    }

    /// Resolves when a policy forbids the connection or the runtime closes the network.
    async fn revoked(&self, policy: &mut Current, host: &Host, address: Option<IpAddr>, port: u16) {
        while policy.changed().await.is_ok() {
            let policies = self.shared.dialer.policies(&policy.borrow_and_update());
            let permitted = policies.check_dial(host, port).and_then(|()| {
                address.map_or(Ok(()), |address| policies.check_address(address, port))
            });
            if permitted.is_err() {
                return;
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.counts.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl relay::Count for Connection {
    fn large_pipes(&self) -> &Semaphore {
        &self.shared.large_pipes
    }

    fn sent(&self, bytes: u64) -> io::Result<()> {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.shared.counts.sent.fetch_add(bytes, Ordering::Relaxed);
        self.shared.check_byte_limit()
    }

    fn received(&self, bytes: u64) -> io::Result<()> {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.shared
            .counts
            .received
            .fetch_add(bytes, Ordering::Relaxed);
        self.shared.check_byte_limit()
    }
}

/// Returns the destination of a connection before its redirection.
pub(super) fn destination(stream: &TcpStream) -> Option<SocketAddr> {
    use rustix::net::sockopt::{ip_original_dst, ipv6_original_dst};
    match stream.local_addr().ok()? {
        SocketAddr::V4(_) => ip_original_dst(stream).ok().map(SocketAddr::V4),
        SocketAddr::V6(_) => ipv6_original_dst(stream).ok().map(SocketAddr::V6),
    }
}
