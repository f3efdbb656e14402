//! The state that all requests of a port share.

use std::sync::Arc;
use std::time::Instant;

use box_gateways::http::capability::SigningKey;
use box_gateways::http::context::Server;
use box_gateways::langbot::LangBot;
use box_rpc::{Router, Turns};
use box_runtime::BoxRuntime;
use box_service::BoxService;
use box_transports::connection_limit::ConnectionLimit;
use tokio::sync::watch;

use super::auth::Auth;
use super::body::BodyLimit;
use super::metrics::Counters;
use super::origin::Hosts;
use super::pages::Origins;
use super::router::credential_headers;
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
    pub(super) origins: Origins,
    /// The operator's URL of the port, if any.
    pub(super) public_url: Option<String>,
    /// The operator's domain of boxes, if any.
    pub(super) box_domain: Option<String>,
    pub(super) max_body: BodyLimit,
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
    pub(super) origins: Origins,
    /// The operator's URL of the port, if any.
    pub(super) public_url: Option<String>,
    /// What the gateways use.
    pub(super) gateways: Arc<Server>,
    pub(super) counters: Counters,
    pub(super) sockets: Sockets,
    pub(super) langbot: Arc<LangBot>,
    pub(super) max_body: BodyLimit,
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
        (runtime, policy): (BoxRuntime, BoxService),
        langbot: Arc<LangBot>,
        settings: PortSettings,
        key: SigningKey,
        limit: usize,
    ) -> Self {
        let PortSettings {
            auth,
            hosts,
            origins,
            public_url,
            box_domain,
            max_body,
            only_langbot,
        } = settings;
        let sockets = Sockets::default();
        let gateways = Server {
            policy,
            runtime: runtime.clone(),
            key,
            tokens: auth.filter(credential_headers()),
            box_domain,
            closing: sockets.close_status(),
            turns: Turns::default(),
        };
        Self {
            router,
            runtime,
            auth,
            hosts,
            origins,
            public_url,
            gateways: Arc::new(gateways),
            counters: Counters::default(),
            sockets,
            langbot,
            max_body,
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
}
