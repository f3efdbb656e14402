//! `system.*`: the server as a whole.

use std::collections::BTreeMap;
use std::fmt;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::actions;
use crate::time::UnixMs;

actions! {
    /// Returns the backend in use and its deficiencies. Always allowed, also during shutdown. The
    /// server probes the backend at most once a second.
    SystemHealth = "system.health": Empty => BackendInfo;

    /// Returns health, counts, limits, profile and recent errors. Always allowed.
    SystemStatus = "system.status": Empty => SystemStatusResult;

    /// Merges configuration into the current one, top-level member by member. The server keeps
    /// unknown members. Errors: `conflict` (another backend is requested while boxes exist).
    SystemConfigure = "system.configure": SystemConfigureParams => SystemConfigureResult;

    /// Ends every box within a time limit. Afterwards the server accepts calls again, or exits if
    /// requested.
    SystemShutdown = "system.shutdown": SystemShutdownParams => SystemShutdownResult;
}

/// The backend in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct BackendInfo {
    /// Name of the backend; `null` if none is available.
    pub name: Option<String>,
    /// Whether boxes can be created.
    pub available: bool,
    /// Features that work with restrictions on this machine.
    pub degraded: Vec<String>,
    /// Protections that the backend cannot provide on this machine.
    pub missing: Vec<String>,
}

/// Result of `system.status`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct SystemStatusResult {
    /// The backend in use.
    pub backend: BackendInfo,
    /// Number of existing boxes.
    pub active_boxes: u64,
    /// Number of running managed processes.
    pub managed_processes: u64,
    /// Idle time after which a box is deleted, in seconds.
    pub idle_ttl_sec: u64,
    /// Limits by name.
    pub limits: BTreeMap<String, u64>,
    /// Capacity for boxes.
    pub capacity: Capacity,
    /// The profile in use; absent from a runtime without a service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Number of entries in `recent_errors`.
    pub recent_error_count: u64,
    /// The most recent errors, oldest first.
    pub recent_errors: Vec<RecentError>,
}

/// Capacity for boxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Capacity {
    /// Maximum number of boxes.
    pub limit: u64,
    /// Number of existing boxes.
    pub used: u64,
    /// Number of boxes that can still be created.
    pub remaining: u64,
}

/// An error that the service has observed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RecentError {
    /// When the error occurred.
    pub timestamp: UnixMs,
    /// The class of the error: the name of an exception.
    #[serde(rename = "type")]
    pub class: String,
    /// The message.
    pub message: String,
    /// The query that failed; `null` if the error belongs to no query.
    #[serde(default)]
    pub query_id: Option<String>,
}

/// Parameters of `system.configure`: any members. Some contain keys of other services, therefore
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

/// Result of `system.configure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemConfigureResult {
    /// Whether the configuration is in effect.
    pub initialized: bool,
}

/// Parameters of `system.shutdown`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SystemShutdownParams {
    /// Whether the server also exits; `false` if absent.
    pub exit: bool,
    /// Time limit in milliseconds; the server's setting if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// Result of `system.shutdown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemShutdownResult {
    /// Number of boxes that were ended.
    pub ended: u64,
}
