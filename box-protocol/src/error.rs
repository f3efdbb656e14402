//! Error codes and their machine-readable details.
//!
//! Each protocol encodes a code in its own form; `box_rpc` has the numbers of JSON-RPC.

use serde::{Deserialize, Serialize};

pub use box_rpc::{Code, Fault, RpcError as BoxError};

use crate::catalog::CatalogKind;

/// Machine-readable details of an error. Every member is optional, and readers ignore unknown ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Detail {
    /// The invalid field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The kind of object that the error is about; a box if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
    /// Whether an `unavailable` is permanent: this machine lacks a primitive.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lasting: bool,
    /// Whether a `not_found` object existed and its record has expired.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub expired: bool,
    /// Name of the limit that was reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Value of the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Name of the system error, for example `ENOENT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// The existing value in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub existing: Option<String>,
    /// The requested value in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Number of boxes and items that use the object, if that is the reason of a conflict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_by: Option<u64>,
    /// Number of bytes of input that were written, if a command did not read the rest in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<u64>,
    /// The last lines of a command that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// Why the box of the call has ended. A client should not repeat the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

impl Detail {
    /// Details with a subject only.
    pub fn about(subject: Subject) -> Self {
        Self {
            subject: Some(subject),
            ..Self::default()
        }
    }

    /// Details with an invalid field only.
    pub fn of_field(field: &str) -> Self {
        Self {
            field: Some(field.to_owned()),
            ..Self::default()
        }
    }

    /// Sets the subject.
    pub fn of(mut self, subject: Subject) -> Self {
        self.subject = Some(subject);
        self
    }

    /// Details of a permanent `unavailable`.
    pub fn lasting() -> Self {
        Self {
            lasting: true,
            ..Self::default()
        }
    }
}

/// Why a box has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_list))]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// Its files exceeded `workspace_quota_mb` or `disk_mb`.
    Quota,
    /// Its processes exceeded `memory_mb`, and the kernel killed its agent.
    Memory,
    /// Its `expires_at` has passed.
    Expired,
    /// No caller used it for its idle time.
    Idle,
    /// A caller deleted it.
    Deleted,
    /// Its main command has ended.
    Main,
    /// The runtime shut down.
    Shutdown,
    /// Its agent is gone, and the runtime does not know why.
    Failed,
    /// A reason newer than this build.
    #[serde(other)]
    Other,
}

/// Adds the reason why the box ended to the details of an error.
pub fn with_end(error: BoxError, why: Ended) -> BoxError {
    let detail = Detail {
        ended: Some(why),
        ..error.detail().unwrap_or_default()
    };
    error.with_detail(&detail)
}

/// The error for a workspace that exceeds its quota.
pub fn quota_exceeded(megabytes: u64, more: &str) -> BoxError {
    let message = format!("workspace_quota_mb: the workspace exceeds {megabytes} MiB{more}");
    BoxError::capacity(message).with_detail(&Detail {
        field: Some("workspace_quota_mb".to_owned()),
        limit: Some("workspace_quota_mb".to_owned()),
        max: Some(megabytes),
        ..Detail::about(Subject::Disk)
    })
}

/// The error for private files that exceed the disk of their box.
pub fn disk_exceeded(megabytes: u64, more: &str) -> BoxError {
    let message = format!("disk_mb: the private files exceed {megabytes} MiB{more}");
    BoxError::capacity(message).with_detail(&Detail {
        field: Some("disk_mb".to_owned()),
        limit: Some("disk_mb".to_owned()),
        max: Some(megabytes),
        ..Detail::about(Subject::Disk)
    })
}

/// The kind of object that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_list))]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A box. The default.
    Box,
    /// A command.
    Command,
    /// A process that a gateway manages.
    Process,
    /// A shell.
    Shell,
    /// A file or directory of a box.
    File,
    /// A grant of a gateway's tenant.
    Grant,
    /// Disk space.
    Disk,
    /// Whether a location is usable at all.
    Readiness,
    /// An image.
    Image,
    /// A volume.
    Volume,
    /// A template.
    Template,
    /// A snapshot.
    Snapshot,
    /// A pool.
    Pool,
    /// A subject newer than this build.
    #[serde(other)]
    Other,
}

impl From<CatalogKind> for Subject {
    fn from(kind: CatalogKind) -> Self {
        match kind {
            CatalogKind::Image => Self::Image,
            CatalogKind::Volume => Self::Volume,
            CatalogKind::Template => Self::Template,
            CatalogKind::Snapshot => Self::Snapshot,
            CatalogKind::Pool => Self::Pool,
        }
    }
}

#[cfg(test)]
mod tests;
