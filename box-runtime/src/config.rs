//! The limits of a runtime: names, defaults and the effect of exceeding them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use box_catalog::Catalog;

use crate::backend::Backend;
#[cfg(feature = "native")]
use crate::images::ImagesConfig;

/// The configuration of a runtime. An error names a limit by its field.
#[derive(Clone)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The backends in order of preference. The first available one creates a box.
    pub backends: Vec<Arc<dyn Backend>>,
    /// Idle time after which the runtime deletes a box that sets no lifetime.
    pub idle_ttl: Duration,
    /// How long an ended command is kept with its output, by default.
    pub command_retention: Duration,
    /// Maximum number of boxes, including those being created or ended.
    ///
    /// Beyond: `capacity`.
    pub max_boxes: usize,
    /// Maximum number of boxes of one caller; `None` means no limit.
    ///
    /// The limit does not apply to callers that see all boxes. Beyond: `capacity`.
    pub max_boxes_per_caller: Option<usize>,
    /// Maximum number of calls that wait for one box. Beyond: `capacity`.
    pub queued_calls: usize,
    /// Maximum time to start a box. Beyond: `timeout`.
    pub start_timeout: Duration,
    /// Maximum time to end a box.
    ///
    /// Beyond: the caller gets an error, and the backend continues to end the box.
    pub stop_timeout: Duration,
    /// Maximum time of a backend's availability check and of a box's liveness check.
    ///
    /// Beyond: the runtime treats the backend as unavailable or the box as dead.
    pub probe_timeout: Duration,
    /// Maximum time between a command's timeout and the agent's report of it.
    ///
    /// Beyond: the runtime ends the box.
    pub timeout_grace: Duration,
    /// Maximum time of a shutdown, unless the call sets another.
    ///
    /// Beyond: the runtime abandons the boxes that still run.
    pub shutdown_within: Duration,
    /// Silence after which the runtime pings an agent; `None` disables pings.
    pub agent_heartbeat: Option<Duration>,
    /// The file that stores why boxes ended, for a later process.
    ///
    /// With `None` the runtime keeps the reasons in memory only.
    pub ends_file: Option<PathBuf>,
    /// The store of items that outlive boxes.
    ///
    /// With `None` the runtime has no items.
    pub catalog: Option<Arc<Catalog>>,
    /// Whether a policy layer decides the specs of the boxes in pools.
    ///
    /// A pool then starts no box before the policy layer has decided, also after a restart.
    pub decided_pools: bool,
    /// The private directory of snapshots and of stopped boxes.
    ///
    /// With `None` the runtime uses a temporary directory, and its stopped boxes end with it.
    pub state_dir: Option<PathBuf>,
    /// Maximum time of a snapshot, during which no process of its box runs.
    ///
    /// Beyond: `timeout`, and the box continues.
    pub snapshot_timeout: Duration,
    /// The images of boxes. With `None`, the backend resolves the image of a spec.
    #[cfg(feature = "native")]
    pub images: Option<ImagesConfig>,
}

impl RuntimeConfig {
    /// Returns the defaults with these backends.
    pub fn new(backends: Vec<Arc<dyn Backend>>) -> Self {
        Self {
            backends,
            idle_ttl: Duration::from_mins(5),
            command_retention: Duration::from_mins(10),
            max_boxes: 64,
            max_boxes_per_caller: None,
            queued_calls: 128,
            start_timeout: Duration::from_mins(2),
            stop_timeout: Duration::from_secs(10),
            probe_timeout: Duration::from_secs(5),
            timeout_grace: Duration::from_secs(2),
            shutdown_within: Duration::from_secs(15),
            agent_heartbeat: Some(Duration::from_secs(15)),
            ends_file: None,
            catalog: None,
            decided_pools: false,
            state_dir: None,
            snapshot_timeout: Duration::from_mins(5),
            #[cfg(feature = "native")]
            images: None,
        }
    }

    /// Returns the defaults with one backend.
    pub fn with(backend: impl Backend) -> Self {
        Self::new(vec![Arc::new(backend)])
    }
}

impl fmt::Debug for RuntimeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backends: Vec<_> = self.backends.iter().map(|backend| backend.name()).collect();
        f.debug_struct("RuntimeConfig")
            .field("backends", &backends)
            .field("idle_ttl", &self.idle_ttl)
            .field("max_boxes", &self.max_boxes)
            .field("queued_calls", &self.queued_calls)
            .finish_non_exhaustive()
    }
}
