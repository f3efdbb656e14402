//! The types of a spec's fields that are made of several values.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::env::Env;
use crate::time::UnixMs;

/// Visible, filterable marks of a record.
pub type Labels = BTreeMap<String, String>;

/// When a box ends by itself. `persistent` in the spec wins over `idle_ms`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Lifetime {
    /// At this time, whatever it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<UnixMs>,
    /// After so long without work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// What idleness does.
    pub on_idle: OnIdle,
    /// So long after it was stopped, it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_ms: Option<u64>,
    /// A call to a paused or stopped box wakes it first.
    pub wake: bool,
}

/// What becomes of an idle box.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnIdle {
    /// It is deleted.
    #[default]
    Delete,
    /// It is stopped: processes end, files stay.
    Stop,
}

/// What every command of a box gets unless it says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Variables, 128 KiB in all.
    pub env: Env,
    /// A file in the box with more variables, over those: read, as the guest, before each exec and
    /// command and before a shell is made, as [`Env::from_lines`](crate::Env::from_lines) says; at most
    /// 64 KiB. `~` and `$VAR` are taken. Without the file there are none; what is there and is no file
    /// that can be read is an error of whoever starts something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_file: Option<String>,
    /// The working directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The user, by name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The shell that runs texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
}

/// A command started with the box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Main {
    /// Program and arguments.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 1024)))]
    pub argv: Vec<String>,
    /// The box ends with it.
    #[serde(default)]
    pub ends_box: bool,
}

/// The guest in the box's own list of users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Guest {
    /// The user's name.
    pub name: String,
    /// The home directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    pub home: String,
}
