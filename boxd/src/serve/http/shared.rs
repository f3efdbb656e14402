//! What every request of the port finds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use box_rpc::Router;
use box_runtime::BoxRuntime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::auth::Auth;
use super::browsers::Hosts;
use super::metrics::Counters;
use super::websocket::Sockets;

/// A place among the connections, held until the last who needs it is done.
pub(super) type Place = Arc<OwnedSemaphorePermit>;

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

/// What every request finds.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) router: Router,
    pub(super) runtime: BoxRuntime,
    pub(super) auth: Auth,
    pub(super) hosts: Hosts,
    pub(super) counters: Counters,
    pub(super) sockets: Sockets,
    /// Connections there may be at once.
    pub(super) limit: u32,
    /// Those there may still be.
    pub(super) places: Arc<Semaphore>,
    pub(super) started: Instant,
    phase: AtomicU8,
}

impl Shared {
    pub(super) fn new(
        router: Router,
        runtime: BoxRuntime,
        auth: Auth,
        hosts: Hosts,
        limit: usize,
    ) -> Self {
        let limit = u32::try_from(limit.min(Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
        Self {
            router,
            runtime,
            auth,
            hosts,
            counters: Counters::default(),
            sockets: Sockets::default(),
            limit,
            places: Arc::new(Semaphore::new(limit as usize)),
            started: Instant::now(),
            phase: AtomicU8::new(0),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Starting,
            1 => Phase::Serving,
            _ => Phase::Draining,
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        let number = match phase {
            Phase::Starting => 0,
            Phase::Serving => 1,
            Phase::Draining => 2,
        };
        self.phase.store(number, Ordering::Relaxed);
    }
}
