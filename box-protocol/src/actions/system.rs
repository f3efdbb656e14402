//! `system.*`: the server as a whole.

use std::collections::BTreeMap;
use std::fmt;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::actions;
use crate::time::UnixMs;

actions! {
    /// Which backend there is and what it lacks. Always allowed, also while the server goes down.
    /// Probed at most once a second.
    SystemHealth = "system.health": Empty => BackendInfo;

    /// Health, counts, limits, profile and recent errors. Always allowed.
    SystemStatus = "system.status": Empty => SystemStatusResult;

    /// Merges configuration, member by member at the top; unknown members are kept. May be repeated;
    /// another backend only while there is no box (`conflict`).
    SystemConfigure = "system.configure": SystemConfigureParams => SystemConfigureResult;

    /// Ends every box, within a bound. Afterwards the server serves again, or exits if asked to.
    SystemShutdown = "system.shutdown": SystemShutdownParams => SystemShutdownResult;
}

/// The backend in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct BackendInfo {
    /// Its name; `null` if none is available.
    pub name: Option<String>,
    /// Whether boxes can be made.
    pub available: bool,
    /// What it does less well than it could.
    pub degraded: Vec<String>,
    /// Protections it cannot give on this machine.
    pub missing: Vec<String>,
}

/// Answer to `system.status`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct SystemStatusResult {
    /// The backend in use.
    pub backend: BackendInfo,
    /// Boxes that exist.
    pub active_sessions: u64,
    /// Managed processes that run.
    pub managed_processes: u64,
    /// Idle time after which a box is deleted.
    pub session_ttl_sec: u64,
    /// Limits by name.
    pub limits: BTreeMap<String, u64>,
    /// Room for boxes.
    pub capacity: Capacity,
    /// The profile in use; absent from a runtime without a policy layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// How many errors are in the list.
    pub recent_error_count: u64,
    /// The last errors, oldest first.
    pub recent_errors: Vec<RecentError>,
}

/// Room for boxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Capacity {
    /// The most there may be.
    pub limit: u64,
    /// How many there are.
    pub used: u64,
    /// How many more may be made.
    pub remaining: u64,
}

/// An error the policy layer has seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RecentError {
    /// When.
    pub timestamp: UnixMs,
    /// LangBot's class for it; see [`langbot_class`](crate::error::langbot_class).
    #[serde(rename = "type")]
    pub class: String,
    /// Its text.
    pub message: String,
    /// The query it answered.
    #[serde(default)]
    pub query_id: Option<String>,
}

/// Parameters of `system.configure`: any members. Some hold keys of other services, so
/// [`Debug`](fmt::Debug) shows names only.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SystemConfigureParams(pub Map<String, Value>);

impl fmt::Debug for SystemConfigureParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Answer to `system.configure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemConfigureResult {
    /// It holds now.
    pub initialized: bool,
}

/// Parameters of `system.shutdown`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SystemShutdownParams {
    /// The server exits, too.
    pub exit: bool,
    /// How long it may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// Answer to `system.shutdown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemShutdownResult {
    /// Boxes that were ended.
    pub ended: u64,
}
