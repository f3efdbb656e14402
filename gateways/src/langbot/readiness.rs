//! Readiness: `box_init`, `box_health`, `box_get_backend_info` and the probe.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::BoxError;
use serde_json::{Value, json};

use super::actions::{Connection, Data, members};
use super::admission::{Policy, managed_root};
use super::errors::readiness;
use super::sessions::backend_label;
use super::{Installation, LangBot};
use box_service::blocking;

/// Every guarantee of a grant, in the order of the answer.
const CHECKS: [&str; 14] = [
    "configuration",
    "required_backend",
    "workspace_mount",
    "backend_available",
    "cgroup_v2",
    "namespace_isolation",
    "mount_isolation",
    "network_isolation",
    "hard_workspace_quota",
    "hard_read_only_mount_quota",
    "bounded_ephemeral_storage",
    "inode_quota",
    "session_cap",
    "managed_process_cap",
];

/// The result of the last check, and whether disk quotas are optional.
#[derive(Debug)]
pub(super) struct Readiness {
    soft_storage: bool,
    last: Mutex<Option<(Instant, Value)>>,
}

impl Readiness {
    pub(super) fn new(soft_storage: bool) -> Self {
        Self {
            soft_storage,
            last: Mutex::default(),
        }
    }

    fn forget(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn recent(&self, policy: &Policy) -> Option<Value> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, found) = last.as_ref()?;
        let max_age = Duration::from_secs(policy.readiness_cache_sec);
        (at.elapsed() <= max_age).then(|| found.clone())
    }
}

pub(super) async fn init(connection: Connection, data: Data) -> Result<Value, BoxError> {
    let sections = members(&data)?;
    if sections.get("backend").and_then(Value::as_str) == Some("host") && !connection.guarded {
        return Err(BoxError::validation(
            "host backend requires local stdio control or WebSocket control protected by LANGBOT_BOX_CONTROL_TOKEN",
        ));
    }
    let installation = connection.installation;
    let config = Arc::new(installation.config().merged(sections)?);
    let (new, mount_policy) = (Arc::clone(&config), installation.mount_policy.clone());
    blocking(move || new.make_workspace(&mount_policy)).await?;
    installation.admission.configure(&config);
    installation.readiness.forget();
    *installation
        .config
        .write()
        .unwrap_or_else(PoisonError::into_inner) = config;
    Ok(json!({"initialized": true}))
}

pub(super) async fn health(connection: Connection) -> Result<Value, BoxError> {
    let installation = connection.installation;
    let Some(policy) = installation.admission.required() else {
        return Ok(installation.backend_info().await);
    };
    let found = installation.managed_readiness(&policy).await;
    if found["ready"] == true {
        Ok(found)
    } else {
        Err(readiness("managed sandbox isolation is not ready"))
    }
}

pub(super) async fn backend_info(connection: Connection) -> Result<Value, BoxError> {
    Ok(connection.installation.backend_info().await)
}

impl Installation {
    /// Returns the name of the backend and whether it is available.
    pub(super) async fn backend_info(&self) -> Value {
        if let Some(policy) = self.admission.required() {
            let found = self.managed_readiness(&policy).await;
            return json!({"name": found["backend"]["name"], "available": found["ready"], "readiness": found});
        }
        let info = self.runtime.health().await;
        let name = info.name.map(|name| backend_label(&name, &info.degraded));
        json!({"name": name, "available": info.available})
    }

    /// Returns an error if grants are required and their guarantees cannot be met.
    pub(super) async fn require_readiness(&self) -> Result<(), BoxError> {
        let Some(policy) = self.admission.required() else {
            return Ok(());
        };
        let found = self.managed_readiness(&policy).await;
        if found["ready"] == true {
            return Ok(());
        }
        let failed: Vec<_> = CHECKS
            .into_iter()
            .filter(|name| found["checks"][name] != true)
            .collect();
        Err(readiness(format!(
            "Managed sandbox isolation is not ready (failed checks: {})",
            failed.join(", ")
        )))
    }

    /// Returns the result of each check that grants depend on.
    async fn managed_readiness(&self, policy: &Policy) -> Value {
        if let Some(found) = self.readiness.recent(policy) {
            return found;
        }
        let info = self.runtime.health().await;
        let config = self.config();
        let workspace = blocking(move || managed_root(&config)).await;
        let fault = self.admission.fault();
        let has_feature =
            |name: &str| !info.missing.iter().any(|missing| missing.starts_with(name));
        let has_limits = ["cgroup.memory", "cgroup.pids", "cgroup.cpu"]
            .into_iter()
            .all(has_feature);
        let soft = self.readiness.soft_storage;
        let checks = BTreeMap::from([
            ("configuration", fault.is_none()),
            // The client accepts only one name for boxes of the local kernel.
            ("required_backend", info.available),
            ("workspace_mount", workspace.is_ok()),
            ("backend_available", info.available),
            ("cgroup_v2", info.available && has_limits),
            (
                "namespace_isolation",
                info.available && has_feature("namespace"),
            ),
            (
                "mount_isolation",
                info.available && has_feature("namespace"),
            ),
            (
                "network_isolation",
                info.available && has_feature("namespace"),
            ),
            ("hard_workspace_quota", soft),
            ("hard_read_only_mount_quota", soft || info.available),
            (
                "bounded_ephemeral_storage",
                soft || info.available && has_limits,
            ),
            ("inode_quota", soft),
            ("session_cap", policy.max_sessions <= 1),
            ("managed_process_cap", policy.max_managed_processes == 0),
        ]);
        let error = fault.or_else(|| workspace.err().map(|error| error.message().to_owned()));
        let mut found = json!({
            "ready": checks.values().all(|passed| *passed),
            "mode": "grant_enforced",
            "backend": {
                "name": info.name.as_ref().map(|_| policy.required_backend.as_str()),
                "available": info.available,
                "details": {"available": info.available, "implementation": info.name, "missing": info.missing},
            },
            "checks": checks,
            "unsafe_soft_storage_limits": soft,
        });
        if let Some(error) = error {
            found["error"] = error.into();
        }
        let mut last = self
            .readiness
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last = Some((Instant::now(), found.clone()));
        found
    }

    /// Returns the resource counts for monitoring.
    async fn resources(&self) -> (usize, usize, usize) {
        let sessions = self.sessions().await.map_or(0, |sessions| sessions.len());
        let (running, ended) = self.processes.counts();
        (sessions, running, ended)
    }
}

impl LangBot {
    /// Returns the resource counts of LangBot's health answers, over all installations.
    pub async fn resources(&self) -> Value {
        let mut sum = (0, 0, 0);
        for installation in self.all() {
            let (sessions, running, ended) = installation.resources().await;
            sum = (sum.0 + sessions, sum.1 + running, sum.2 + ended);
        }
        json!({
            "event_loop": {},
            "blocking_executor": {},
            "sessions": sum.0,
            "managed_processes": sum.1,
            "completed_processes": sum.2,
            "creating_session_tasks": 0,
            "closing_session_tasks": 0,
            "background_tasks": sum.1,
        })
    }

    /// Returns the answer to the readiness probe if an installation requires grants.
    ///
    /// The answer is that of the first installation that is not ready, or else of any one.
    pub async fn grants_readiness(&self) -> Option<Value> {
        let mut readiness = None;
        for installation in self.all() {
            let Some(policy) = installation.admission.required() else {
                continue;
            };
            let found = installation.managed_readiness(&policy).await;
            if found["ready"] != true {
                return Some(found);
            }
            readiness = Some(found);
        }
        readiness
    }
}
