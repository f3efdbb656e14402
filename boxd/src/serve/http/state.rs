//! The state that all requests of a port share.

use std::sync::Arc;
use std::time::Instant;

use box_gateways::langbot::LangBot;
use box_rpc::Router;
use box_runtime::BoxRuntime;
use box_transports::connection_limit::ConnectionLimit;
use tokio::sync::watch;

use super::auth::Auth;
use super::metrics::Counters;
use super::origin::Hosts;
use super::signed_url::SigningKey;
use super::websocket::Sockets;

/// The phase of a server's lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The server listens and is not ready yet.
    Starting,
    /// The server is ready.
    Serving,
    /// The server finishes running work and starts no more.
    Draining,
}

/// The settings of a port: its callers, its host names and its purpose.
#[derive(Debug)]
pub(super) struct PortSettings {
    pub(super) auth: Auth,
    pub(super) hosts: Hosts,
    /// Whether the port serves only the routes of LangBot's own runtime.
    pub(super) only_langbot: bool,
}

/// The state that all requests share.
#[derive(Debug)]
pub(super) struct HttpState {
    pub(super) router: Router,
    pub(super) runtime: BoxRuntime,
    pub(super) auth: Auth,
    pub(super) hosts: Hosts,
    pub(super) key: SigningKey,
    pub(super) counters: Counters,
    pub(super) sockets: Sockets,
    pub(super) langbot: Arc<LangBot>,
    /// Whether the port serves only the routes of LangBot's own runtime.
    pub(super) only_langbot: bool,
    /// The limit of simultaneous connections.
    pub(super) permits: ConnectionLimit,
    pub(super) started: Instant,
    phase: watch::Sender<Phase>,
}

impl HttpState {
    pub(super) fn new(
        router: Router,
        runtime: BoxRuntime,
        langbot: Arc<LangBot>,
        settings: PortSettings,
        key: SigningKey,
        limit: usize,
    ) -> Self {
        let PortSettings {
            auth,
            hosts,
            only_langbot,
        } = settings;
        Self {
            router,
            runtime,
            auth,
            hosts,
            key,
            counters: Counters::default(),
            sockets: Sockets::default(),
            langbot,
            only_langbot,
            permits: ConnectionLimit::new(limit),
            started: Instant::now(),
            phase: watch::Sender::new(Phase::Starting),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Returns once the server is draining.
    pub(super) async fn draining(&self) {
        let mut phase = self.phase.subscribe();
        // `self` owns the sender, so the channel cannot be closed.
        let _ = phase.wait_for(|phase| *phase == Phase::Draining).await;
    }
}
