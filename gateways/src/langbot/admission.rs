//! Grants, for installations that require them.
//!
//! The gateway serves a workspace only while it has a grant, and only within the policy. Revisions and generations only
//! increase, and a revoked revision never becomes valid again.

mod managed;
mod micros;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use box_protocol::{BoxError, Invalid, UnixMs};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

pub(super) use self::managed::{managed_root, tenants};
pub(super) use self::micros::Micros;
use super::Installation;
use super::actions::{Connection, Data, run_to_completion};
use super::config::Config;
use super::context::Placement;
use super::errors::{admission, permission, readiness};

/// The interval between checks for expired grants.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(30);

/// The maximum that a grant can give, and the settings of every box.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Policy {
    pub(super) required: bool,
    pub(super) logical_session_id: String,
    pub(super) required_backend: String,
    pub(super) max_sessions: u64,
    pub(super) max_managed_processes: u64,
    max_grant_ttl_sec: u64,
    pub(super) max_timeout_sec: u64,
    pub(super) cpus: f64,
    pub(super) memory_mb: u64,
    pub(super) pids_limit: u64,
    pub(super) read_only_rootfs: bool,
    pub(super) workspace_quota_mb: u64,
    pub(super) readiness_cache_sec: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            required: false,
            logical_session_id: "global".to_owned(),
            required_backend: "nsjail".to_owned(),
            max_sessions: 1,
            max_managed_processes: 0,
            max_grant_ttl_sec: 300,
            max_timeout_sec: 120,
            cpus: 1.0,
            memory_mb: 512,
            pids_limit: 128,
            read_only_rootfs: true,
            workspace_quota_mb: 0,
            readiness_cache_sec: 15,
        }
    }
}

impl Policy {
    fn read(value: &Value) -> Result<Self, String> {
        let policy: Self = Self::deserialize(value).map_err(|error| error.to_string())?;
        let rules = [
            (
                policy.logical_session_id == "global",
                "logical_session_id must be global",
            ),
            (
                policy.required_backend == "nsjail",
                "required_backend must be nsjail",
            ),
            (
                policy.max_sessions <= 1,
                "max_sessions must be between 0 and 1",
            ),
            (
                policy.max_managed_processes == 0,
                "max_managed_processes must be 0",
            ),
            (
                policy.max_grant_ttl_sec > 0,
                "max_grant_ttl_sec must be greater than 0",
            ),
            (
                policy.max_timeout_sec > 0,
                "max_timeout_sec must be greater than 0",
            ),
            (policy.pids_limit > 0, "pids_limit must be greater than 0"),
            (policy.memory_mb >= 32, "memory_mb must be at least 32"),
            (
                policy.cpus.is_finite() && policy.cpus > 0.0,
                "cpus must be greater than 0",
            ),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(rule.to_owned()),
            None => Ok(policy),
        }
    }
}

/// A grant that admits a workspace until it expires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    workspace: String,
    generation: u64,
    revision: u64,
    expires: Micros,
    pub(super) max_sessions: u64,
    pub(super) max_managed_processes: u64,
}

/// All grants and revoked revisions.
#[derive(Debug, Default)]
pub(super) struct Admission(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    policy: Policy,
    /// The reason why the configuration is invalid.
    fault: Option<String>,
    records: HashMap<String, Record>,
}

/// The recorded state of a workspace; it is never removed.
#[derive(Debug, Default)]
struct Record {
    grant: Option<Grant>,
    revision: u64,
    generation: u64,
    revoked: u64,
    limits: Option<(u64, u64)>,
}

impl Admission {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Applies the policy of a configuration.
    ///
    /// An unreadable policy requires grants and admits no caller. A policy that required grants cannot be withdrawn.
    pub(super) fn configure(&self, config: &Config) {
        let (policy, fault) = match config.sections.get("admission") {
            None | Some(Value::Null) => (Policy::default(), None),
            Some(value) => match Policy::read(value) {
                Ok(policy) => (policy, None),
                Err(reason) => {
                    let required = Policy {
                        required: true,
                        ..Policy::default()
                    };
                    (required, Some(reason))
                }
            },
        };
        let mut state = self.state();
        if state.policy.required && !policy.required {
            state.fault =
                Some("Sandbox admission enforcement cannot be disabled without restarting the Box Runtime".to_owned());
            return;
        }
        (state.policy, state.fault) = (policy, fault);
    }

    /// Returns the policy if grants are required.
    pub(super) fn required(&self) -> Option<Policy> {
        let state = self.state();
        state.policy.required.then(|| state.policy.clone())
    }

    pub(super) fn fault(&self) -> Option<String> {
        self.state().fault.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Only assignments run under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the grant of this placement if it is valid.
    fn grant(&self, placement: &Placement, now: UnixMs) -> Result<Grant, BoxError> {
        let state = self.state();
        state.require_valid()?;
        let record = state.records.get(&placement.workspace);
        let Some(grant) = record.and_then(|record| record.grant.clone()) else {
            return Err(admission("Sandbox admission grant is missing"));
        };
        let refusal = if grant.expires.is_past(now) {
            "Sandbox admission grant has expired"
        } else if grant.generation != placement.generation {
            "Sandbox admission grant belongs to another execution generation"
        } else if grant.max_sessions == 0 {
            "Sandbox admission grant does not permit sessions"
        } else if grant.max_sessions > state.policy.max_sessions
            || grant.max_managed_processes > state.policy.max_managed_processes
        {
            "Sandbox admission grant exceeds the active runtime policy"
        } else {
            return Ok(grant);
        };
        Err(admission(refusal))
    }

    /// Installs a grant.
    ///
    /// Returns the grant that is valid now, and whether the caller must delete the workspace's boxes first.
    fn install(&self, grant: &Grant, limit: usize, now: UnixMs) -> Result<(Grant, bool), BoxError> {
        let mut state = self.state();
        state.require_enabled()?;
        state.require_valid()?;
        let policy = &state.policy;
        let latest = now
            .0
            .saturating_add(policy.max_grant_ttl_sec.saturating_mul(1000));
        let (revoked, revision, generation, limits) =
            state
                .records
                .get(&grant.workspace)
                .map_or((0, 0, 0, None), |known| {
                    (
                        known.revoked,
                        known.revision,
                        known.generation,
                        known.limits,
                    )
                });
        let changed = limits.is_some_and(|limits| limits != grant.limits());
        let refusal = if grant.expires.is_past(now) {
            "Cannot install an expired sandbox admission grant"
        } else if grant.expires.0 / 1000 > latest {
            "Sandbox admission grant lifetime exceeds the configured maximum"
        } else if grant.max_sessions > policy.max_sessions {
            "Sandbox admission grant exceeds the session cap"
        } else if grant.max_managed_processes > policy.max_managed_processes {
            "Sandbox admission grant exceeds the managed-process cap"
        } else if !state.records.contains_key(&grant.workspace) && state.records.len() >= limit {
            RECORDS_FULL
        } else if grant.revision <= revoked {
            "Sandbox admission grant revision was revoked"
        } else if grant.revision < revision {
            "Sandbox admission grant revision is stale"
        } else if grant.generation < generation {
            "Sandbox admission execution generation is stale"
        } else if grant.revision == revision && changed {
            "Sandbox admission limits changed without a new entitlement revision"
        } else {
            let record = state.records.entry(grant.workspace.clone()).or_default();
            return Ok(record.install(grant));
        };
        Err(admission(refusal))
    }

    fn revoke(&self, workspace: &str, revision: u64, limit: usize) -> Result<(), BoxError> {
        let mut state = self.state();
        state.require_enabled()?;
        if !state.records.contains_key(workspace) && state.records.len() >= limit {
            return Err(admission(RECORDS_FULL));
        }
        let record = state.records.entry(workspace.to_owned()).or_default();
        if revision < record.revision.max(record.revoked) {
            return Err(admission("Sandbox admission revocation is stale"));
        }
        record.grant = None;
        record.revision = record.revision.max(revision);
        record.revoked = record.revoked.max(revision);
        Ok(())
    }

    /// Removes expired grants and returns their workspaces.
    fn expired(&self, now: UnixMs) -> Vec<String> {
        let mut state = self.state();
        let expired = state.records.iter_mut().filter_map(|(workspace, record)| {
            let past = record
                .grant
                .as_ref()
                .is_some_and(|grant| grant.expires.is_past(now));
            past.then(|| {
                record.grant = None;
                workspace.clone()
            })
        });
        expired.collect()
    }
}

const RECORDS_FULL: &str =
    "Sandbox admission record capacity reached; refusing an unbounded Workspace fence allocation";

impl State {
    fn require_enabled(&self) -> Result<(), BoxError> {
        if self.policy.required {
            Ok(())
        } else {
            Err(admission("Sandbox admission enforcement is not enabled"))
        }
    }

    fn require_valid(&self) -> Result<(), BoxError> {
        match &self.fault {
            None => Ok(()),
            Some(reason) => Err(readiness(format!(
                "Invalid sandbox admission configuration: {reason}"
            ))),
        }
    }
}

impl Record {
    fn install(&mut self, grant: &Grant) -> (Grant, bool) {
        if let Some(current) = &self.grant
            && (grant.revision, grant.generation) == (current.revision, current.generation)
            && grant.expires < current.expires
        {
            // If two callers renew the same grant, the later expiry applies.
            return (current.clone(), false);
        }
        let same_placement = self
            .grant
            .as_ref()
            .is_some_and(|current| current.generation == grant.generation);
        self.revision = grant.revision;
        self.generation = grant.generation;
        self.limits = Some(grant.limits());
        self.grant = Some(grant.clone());
        (grant.clone(), !same_placement || grant.max_sessions == 0)
    }
}

impl Grant {
    fn limits(&self) -> (u64, u64) {
        (self.max_sessions, self.max_managed_processes)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrantRequest {
    instance_uuid: String,
    workspace_uuid: String,
    execution_generation: u64,
    entitlement_revision: u64,
    expires_at: String,
    max_sessions: u64,
    max_managed_processes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevocationRequest {
    instance_uuid: String,
    workspace_uuid: String,
    entitlement_revision: u64,
}

fn read<'a, T: Deserialize<'a>>(data: &'a RawValue) -> Result<T, BoxError> {
    serde_json::from_str(data.get()).map_err(|error| Invalid::from(error).into())
}

fn non_empty(field: &'static str, text: &str) -> Result<String, BoxError> {
    match text.trim() {
        "" => Err(Invalid::new(field, "must not be empty").into()),
        text => Ok(text.to_owned()),
    }
}

fn positive(field: &'static str, number: u64) -> Result<u64, BoxError> {
    match number {
        0 => Err(Invalid::new(field, "must be greater than or equal to 1").into()),
        number => Ok(number),
    }
}

pub(super) async fn upsert(connection: Connection, data: Data) -> Result<Value, BoxError> {
    let installation = connection.installation;
    let request: GrantRequest = read(&data)?;
    let grant = Grant {
        workspace: non_empty("workspace_uuid", &request.workspace_uuid)?,
        generation: positive("execution_generation", request.execution_generation)?,
        revision: positive("entitlement_revision", request.entitlement_revision)?,
        expires: Micros::from_text(&request.expires_at)
            .ok_or_else(|| Invalid::new("expires_at", "must be a time with a timezone"))?,
        max_sessions: request.max_sessions,
        max_managed_processes: request.max_managed_processes,
    };
    if non_empty("instance_uuid", &request.instance_uuid)? != installation.instance {
        return Err(permission(
            "Sandbox admission grant does not match the trusted instance",
        ));
    }
    run_to_completion(async move {
        let limit = installation.config().limits.max_admission_records;
        let (installed, clear) = installation
            .admission
            .install(&grant, limit, UnixMs::now())?;
        let placement = Placement::new(&installation.instance, &grant.workspace, grant.generation);
        if clear {
            installation.end_workspace(&placement).await?;
        }
        installation.fence.observe(&placement, 0, limit)?;
        Ok(json!({
            "installed": true,
            "workspace_uuid": installed.workspace,
            "execution_generation": installed.generation,
            "entitlement_revision": installed.revision,
            "max_sessions": installed.max_sessions,
            "max_managed_processes": installed.max_managed_processes,
            "expires_at": installed.expires.to_text(),
        }))
    })
    .await
}

pub(super) async fn revoke(connection: Connection, data: Data) -> Result<Value, BoxError> {
    let installation = connection.installation;
    let request: RevocationRequest = read(&data)?;
    let workspace = non_empty("workspace_uuid", &request.workspace_uuid)?;
    let revision = positive("entitlement_revision", request.entitlement_revision)?;
    if non_empty("instance_uuid", &request.instance_uuid)? != installation.instance {
        return Err(permission(
            "Sandbox admission revocation does not match the trusted instance",
        ));
    }
    run_to_completion(async move {
        let limit = installation.config().limits.max_admission_records;
        installation.admission.revoke(&workspace, revision, limit)?;
        let placement = Placement::new(&installation.instance, &workspace, 1);
        installation.end_workspace(&placement).await?;
        Ok(json!({"revoked": true, "workspace_uuid": workspace, "entitlement_revision": revision}))
    })
    .await
}

/// Checks for expired grants periodically until the installation is dropped.
pub(super) fn end_with_expired_grants(installation: Weak<Installation>) {
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(EXPIRY_INTERVAL).await;
            let Some(installation) = installation.upgrade() else {
                return;
            };
            if let Err(error) = installation.end_expired(UnixMs::now()).await {
                tracing::warn!(%error, "cannot delete the boxes of an expired grant");
            }
        }
    });
}

impl Installation {
    /// Returns the grant that admits this placement if grants are required.
    pub(super) async fn require_grant(
        &self,
        placement: &Placement,
    ) -> Result<Option<Grant>, BoxError> {
        if self.admission.required().is_none() {
            return Ok(None);
        }
        self.require_readiness().await?;
        let now = UnixMs::now();
        self.end_expired(now).await?;
        self.admission.grant(placement, now).map(Some)
    }

    /// Deletes the boxes of workspaces with expired grants.
    async fn end_expired(&self, now: UnixMs) -> Result<(), BoxError> {
        for workspace in self.admission.expired(now) {
            let expired = Placement::new(&self.instance, &workspace, 1);
            self.end_workspace(&expired).await?;
        }
        Ok(())
    }

    /// Deletes every box of a workspace, in all placements.
    async fn end_workspace(&self, placement: &Placement) -> Result<(), BoxError> {
        let mut all = self.sessions().await?;
        all.retain(|info| placement.generation_of(info.box_id.as_str()).is_some());
        self.end(all).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
