//! Every limit of a runtime: its name, its default, what happens beyond it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;

/// How a runtime is set up. A limit's field is the name printed in its error.
#[derive(Clone)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The backends, best first: a new box is made by the first that is available.
    pub backends: Vec<Arc<dyn Backend>>,
    /// Idle time after which a box is deleted, unless its lifetime says otherwise.
    pub idle_ttl: Duration,
    /// How long the record and the output of an ended command are kept, unless it says so itself.
    pub command_retention: Duration,
    /// Boxes there may be, those being made and those on their way out included. Beyond: `capacity`.
    pub max_boxes: usize,
    /// Boxes one caller may have of them; `None` is no limit. Whoever sees all boxes has none either. Beyond: `capacity`.
    pub max_boxes_per_caller: Option<usize>,
    /// Calls that may wait for one box. Beyond: `capacity`.
    pub queued_calls: usize,
    /// How long a box may take to start. Beyond: `timeout`.
    pub start_timeout: Duration,
    /// How long a box may take to end. Beyond: the caller is told so, and its backend waits on.
    pub stop_timeout: Duration,
    /// How long a backend may take to say whether it is available, or a box alive. Beyond: it is not.
    pub probe_timeout: Duration,
    /// How long after a command's timeout its agent may take to say so. Beyond: the box is ended.
    pub timeout_grace: Duration,
    /// How long a shutdown may take that does not say so itself. Beyond: what is left is given up.
    pub shutdown_within: Duration,
    /// Silence after which an agent is pinged; `None` pings none.
    pub agent_heartbeat: Option<Duration>,
    /// The file in which it is kept why boxes ended, for a later process; `None` keeps that in memory only.
    pub ends_file: Option<PathBuf>,
}

impl RuntimeConfig {
    /// The defaults, with these backends.
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
        }
    }

    /// The defaults, with one backend.
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
