//! Progress of pulls and imports.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::digest::Digest;

/// Minimum time between two reports about the bytes of one layer.
const INTERVAL: Duration = Duration::from_millis(50);

/// Report about a pull or an import.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The manifest is known.
    Resolved {
        /// Digest of the manifest.
        digest: Digest,
        /// Layers in order: digest and compressed size.
        layers: Vec<(Digest, u64)>,
    },
    /// A layer makes progress.
    Layer {
        /// Digest of the layer.
        digest: Digest,
        /// What happens to it.
        phase: Phase,
        /// Compressed bytes that have passed this phase.
        done: u64,
        /// Compressed bytes in all.
        total: u64,
    },
    /// A request is repeated after a failure.
    Retry {
        /// The failure.
        reason: String,
        /// Milliseconds until the next attempt.
        wait_ms: u64,
    },
    /// The image is complete and is written to the disk.
    Saving,
}

/// Phase of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Bytes arrive.
    Download,
    /// Files are written.
    Unpack,
    /// The layer is complete and has the right digests.
    Done,
}

/// Receiver of reports. It must not block.
#[derive(Clone)]
pub struct Progress {
    report: Arc<dyn Fn(Event) + Send + Sync>,
}

impl Progress {
    /// Creates a receiver.
    pub fn new(report: impl Fn(Event) + Send + Sync + 'static) -> Self {
        let report = Arc::new(report);
        Self { report }
    }

    /// Creates a receiver that ignores everything.
    pub fn none() -> Self {
        Self::new(|_| {})
    }

    pub(crate) fn report(&self, event: Event) {
        (self.report)(event);
    }

    /// Returns the reporter of one phase of a layer.
    pub(crate) fn layer(&self, digest: Digest, phase: Phase, total: u64) -> LayerProgress {
        LayerProgress {
            progress: self.clone(),
            digest,
            phase,
            total,
            last: Mutex::new(None),
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::none()
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// Reporter of one phase of a layer.
#[derive(Debug)]
pub(crate) struct LayerProgress {
    progress: Progress,
    digest: Digest,
    phase: Phase,
    total: u64,
    last: Mutex<Option<Instant>>,
}

impl LayerProgress {
    /// Reports bytes, unless the last report is recent.
    pub(crate) fn at(&self, done: u64) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = last.is_some_and(|last| last.elapsed() < INTERVAL);
        if recent && done < self.total {
            return;
        }
        *last = Some(Instant::now());
        let (digest, phase, total) = (self.digest, self.phase, self.total);
        self.progress.report(Event::Layer {
            digest,
            phase,
            done,
            total,
        });
    }
}
