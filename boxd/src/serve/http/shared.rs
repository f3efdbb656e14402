//! What every request of the port finds.

use std::sync::Arc;
use std::time::Instant;

use box_gateways::langbot::LangBot;
use box_rpc::Router;
use box_runtime::BoxRuntime;
use box_transports::places::Places;
use tokio::sync::watch;

use super::auth::Auth;
use super::browsers::Hosts;
use super::caps::Key;
use super::metrics::Counters;
use super::websocket::Sockets;

/// Where a server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It listens, and is not ready yet.
    Starting,
    /// It is.
    Serving,
    /// It ends what it has begun, and begins nothing.
    Draining,
}

/// Who may come to a port, how it is called, and what it is for.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) auth: Auth,
    pub(super) hosts: Hosts,
    /// Nothing but what LangBot's own runtime serves.
    pub(super) only_langbot: bool,
}

/// What every request finds.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) router: Router,
    pub(super) runtime: BoxRuntime,
    pub(super) auth: Auth,
    pub(super) hosts: Hosts,
    pub(super) key: Key,
    pub(super) counters: Counters,
    pub(super) sockets: Sockets,
    pub(super) langbot: Arc<LangBot>,
    /// Nothing but what LangBot's own runtime serves.
    pub(super) only_langbot: bool,
    /// Connections there may be at once.
    pub(super) places: Places,
    pub(super) started: Instant,
    phase: watch::Sender<Phase>,
}

impl Shared {
    pub(super) fn new(
        router: Router,
        runtime: BoxRuntime,
        langbot: Arc<LangBot>,
        terms: Terms,
        key: Key,
        limit: usize,
    ) -> Self {
        let Terms {
            auth,
            hosts,
            only_langbot,
        } = terms;
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
            places: Places::new(limit),
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

    /// Waits until it ends what it has begun.
    pub(super) async fn draining(&self) {
        let mut phase = self.phase.subscribe();
        // The sender is here.
        let _ = phase.wait_for(|phase| *phase == Phase::Draining).await;
    }
}
