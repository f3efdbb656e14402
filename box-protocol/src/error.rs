//! Errors: the twelve codes and the details that programs read beside them. Each protocol writes a
//! code in its own form; `box_rpc` has the numbers of JSON-RPC.

use serde::{Deserialize, Serialize};

pub use box_rpc::{Code, Fault, RpcError as BoxError};

/// What an error carries for programs. Every member is optional; readers ignore what they do not
/// know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Detail {
    /// The field at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What the error is about, where one word serves several nouns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
    /// An `unavailable` that will not pass: a primitive this machine does not have.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lasting: bool,
    /// A `not_found` for something that did exist, and was forgotten.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub expired: bool,
    /// The limit that is reached, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// That limit's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// The name of the system's error, as in `ENOENT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// The value that stands, in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub existing: Option<String>,
    /// The value that was asked for, in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Why the box of the call has ended. The call is not worth repeating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

impl Detail {
    /// Details that only name a subject.
    pub fn about(subject: Subject) -> Self {
        Self {
            subject: Some(subject),
            ..Self::default()
        }
    }

    /// Details that only name the field at fault.
    pub fn of_field(field: &str) -> Self {
        Self {
            field: Some(field.to_owned()),
            ..Self::default()
        }
    }

    /// The same, about a subject.
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
    /// Its files exceeded `workspace_quota_mb`.
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

/// Adds why the box of a call has ended to what an error says.
pub fn with_end(error: BoxError, why: Ended) -> BoxError {
    let detail = Detail {
        ended: Some(why),
        ..error.detail().unwrap_or_default()
    };
    error.with_detail(&detail)
}

/// The error of a workspace that holds more than its quota.
pub fn quota_exceeded(megabytes: u64, more: &str) -> BoxError {
    let message = format!("quota exceeded: {megabytes} MiB{more}");
    BoxError::capacity(message).with_detail(&Detail {
        field: Some("workspace_quota_mb".to_owned()),
        limit: Some("workspace_quota_mb".to_owned()),
        max: Some(megabytes),
        ..Detail::about(Subject::Disk)
    })
}

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_list))]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A box. Assumed where nothing is said.
    Box,
    /// A managed process.
    Process,
    /// A shell.
    Shell,
    /// A tenant's grant.
    Grant,
    /// Room on a disk.
    Disk,
    /// Whether the place is fit to be used at all.
    Readiness,
    /// A subject newer than this build.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests;
