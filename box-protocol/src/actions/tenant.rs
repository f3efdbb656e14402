//! `tenant.*`: who may use the server, when grants are enforced.

use serde::{Deserialize, Serialize};

use super::actions;
use crate::time::UnixMs;

actions! {
    /// Lets a tenant in, up to these amounts. `denied` where grants are not enabled, and for a
    /// revision or generation older than the one known.
    TenantGrant = "tenant.grant": TenantGrantParams => TenantGrantResult;

    /// Takes a grant back; that revision never comes again. `denied` as above.
    TenantRevoke = "tenant.revoke": TenantRevokeParams => TenantRevokeResult;
}

/// Whose call it is: travels beside the parameters of any action. A lower generation than the known
/// one is `denied`; a higher one first cancels the calls and deletes the boxes of the older.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    /// The tenant's namespace.
    pub namespace: String,
    /// Only rises.
    pub generation: u64,
}

/// Parameters of `tenant.grant`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TenantGrantParams {
    /// Who is let in.
    pub tenant: Tenant,
    /// Only rises.
    pub revision: u64,
    /// When the grant ends by itself.
    pub expires_at: UnixMs,
    /// The most boxes.
    pub max_sessions: u64,
    /// The most managed processes.
    pub max_managed_processes: u64,
}

/// Answer to `tenant.grant`: what holds now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TenantGrantResult {
    /// Who is let in.
    pub tenant: Tenant,
    /// The grant's revision.
    pub revision: u64,
    /// When it ends by itself.
    pub expires_at: UnixMs,
    /// The most boxes.
    pub max_sessions: u64,
    /// The most managed processes.
    pub max_managed_processes: u64,
}

/// Parameters of `tenant.revoke`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TenantRevokeParams {
    /// Whose grant.
    pub namespace: String,
    /// The revision that takes it back.
    pub revision: u64,
}

/// Answer to `tenant.revoke`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TenantRevokeResult {
    /// Whose grant.
    pub namespace: String,
    /// The revision that holds.
    pub revision: u64,
}
