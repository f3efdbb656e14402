//! Selects the backend that creates the next box.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::BackendInfo;
use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxSpec, Network};
use futures::FutureExt as _;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::backend::{Availability, Backend};
use crate::config::RuntimeConfig;

/// How long the selector reuses the answer of an available backend.
const CACHE_TIME: Duration = Duration::from_secs(1);

/// Asks the backends in order and caches the answer for a second.
///
/// It does not cache the answer that no backend is available, so the next call asks again.
pub(crate) struct BackendSelector {
    backends: Vec<Arc<dyn Backend>>,
    probe_timeout: Duration,
    last: Mutex<Option<(Instant, Arc<Choice>)>>,
}

/// The answers of the backends.
pub(crate) struct Choice {
    backend: Option<Arc<dyn Backend>>,
    pub(crate) info: BackendInfo,
    /// Why the selector skipped each backend.
    refusals: Vec<String>,
}

impl BackendSelector {
    pub(crate) fn new(config: &RuntimeConfig) -> Self {
        Self {
            backends: config.backends.clone(),
            probe_timeout: config.probe_timeout,
            last: Mutex::default(),
        }
    }

    /// Returns the answers of the backends, at most a second old.
    pub(crate) async fn choose(&self) -> Arc<Choice> {
        let called = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((at, choice)) = &*last {
            let is_fresh = choice.backend.is_some() && at.elapsed() < CACHE_TIME;
            // A call that waited while another call asked takes that answer, also a negative one.
            if is_fresh || *at > called {
                return Arc::clone(choice);
            }
        }
        let choice = Arc::new(self.probe_all().await);
        *last = Some((Instant::now(), Arc::clone(&choice)));
        choice
    }

    async fn probe_all(&self) -> Choice {
        let mut refusals = Vec::new();
        let mut all_missing = Vec::new();
        for backend in &self.backends {
            let probe = AssertUnwindSafe(backend.availability()).catch_unwind();
            let availability = match timeout(self.probe_timeout, probe).await {
                Ok(Ok(availability)) => availability,
                Ok(Err(_)) => Availability::unavailable("its availability check panicked"),
                Err(_) => Availability::unavailable("its availability check timed out"),
            };
            match availability {
                Availability::Available { degraded, missing } => {
                    let info = BackendInfo {
                        name: Some(backend.name().to_owned()),
                        available: true,
                        degraded,
                        missing,
                    };
                    return Choice {
                        backend: Some(Arc::clone(backend)),
                        info,
                        refusals,
                    };
                }
                Availability::Unavailable { reason, missing } => {
                    tracing::debug!(backend = backend.name(), %reason, ?missing, "backend unavailable");
                    refusals.push(refusal(backend.name(), &reason, &missing));
                    all_missing.extend(missing);
                }
            }
        }
        all_missing.dedup();
        Choice {
            backend: None,
            info: BackendInfo {
                missing: all_missing,
                ..BackendInfo::default()
            },
            refusals,
        }
    }
}

fn refusal(name: &str, reason: &str, missing: &[String]) -> String {
    if missing.is_empty() {
        format!("{name}: {reason}")
    } else {
        format!("{name}: {reason} (missing: {})", missing.join(", "))
    }
}

impl Choice {
    /// Returns the backend, or the reason that none is available.
    pub(crate) fn backend(&self) -> Result<&Arc<dyn Backend>, BoxError> {
        self.backend.as_ref().ok_or_else(|| self.none())
    }

    /// Returns the backend for this spec, or the reason that none is available.
    pub(crate) fn backend_for(&self, spec: &BoxSpec) -> Result<&Arc<dyn Backend>, BoxError> {
        let backend = self.backend()?;
        let best_effort = spec.best_effort.as_deref().unwrap_or_default();
        let is_optional = best_effort.iter().any(|primitive| primitive == "network");
        if spec.network == Network::On && !backend.capabilities().network && !is_optional {
            let message = format!(
                "network: backend {} does not support it; set it to off",
                backend.name()
            );
            return Err(BoxError::unavailable(message).with_detail(&Detail {
                field: Some("network".to_owned()),
                ..Detail::lasting()
            }));
        }
        Ok(backend)
    }

    fn none(&self) -> BoxError {
        if self.refusals.is_empty() {
            return BoxError::unavailable("no backend is configured")
                .with_detail(&Detail::lasting());
        }
        let refusals = self.refusals.join("; ");
        BoxError::unavailable(format!("no backend is available: {refusals}"))
    }
}
