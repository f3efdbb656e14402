//! Composite types of the fields of a spec.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::command::Program;
use crate::actions::is_default;
use crate::env::Env;
use crate::time::UnixMs;

/// Labels to filter by.
pub type Labels = BTreeMap<String, String>;

/// When the server ends a box. `persistent` in the spec overrides `idle_ms`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Lifetime {
    /// When `on_expiry` applies regardless of activity; never if absent. `stop` and `pause` wait for
    /// the exec that runs, and remove `expires_at`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<UnixMs>,
    /// What happens to a box at `expires_at`; `delete` if absent.
    #[serde(skip_serializing_if = "is_default")]
    pub on_expiry: LifetimeAction,
    /// Idle time after which `on_idle` applies, in milliseconds; the server's setting if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// What happens to an idle box; `delete` if absent.
    pub on_idle: LifetimeAction,
    /// Time after a stop until the server deletes the box, in milliseconds; never if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_ms: Option<u64>,
    /// Whether a call to a paused or stopped box resumes or starts it first; `false` if absent.
    pub wake: bool,
}

/// What happens to a box that is idle or has expired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum LifetimeAction {
    /// The server deletes it.
    #[default]
    Delete,
    /// The server stops it: processes end, files are kept.
    Stop,
    /// The server pauses it: processes are frozen and keep their memory.
    Pause,
}

/// When the server asks the registry for an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PullPolicy {
    /// If the server does not have the image.
    Missing,
    /// Each time: a tag may have moved.
    Always,
    /// Never: a missing image is an error.
    Never,
}

/// Defaults of every command of a box, which a command can override.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Environment variables, at most 128 KiB in total.
    pub env: Env,
    /// A file in the box with further variables, which override `env`; at most 64 KiB. The agent
    /// reads it as the guest user before each exec, command and shell creation, in the format of
    /// [`Env::from_lines`](crate::Env::from_lines). `~` and `$VAR` are expanded. A missing file is
    /// not an error; an unreadable one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_file: Option<String>,
    /// The working directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User name or uid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The shell that runs texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
}

/// A command that starts with the box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Main {
    /// Program and arguments; if empty, the entrypoint and the command of the image.
    #[cfg_attr(feature = "schema", schemars(length(max = 1024)))]
    pub argv: Vec<String>,
    /// Whether the box ends when the command exits; `false` if absent.
    #[serde(default)]
    pub ends_box: bool,
}

/// Commands that run before a box counts as running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Prepare {
    /// The commands, which run one after the other with the defaults of the box. If one fails, the
    /// box ends, and the error contains its last lines.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 64)))]
    pub commands: Vec<Program>,
    /// Time limit of all commands together, in seconds; 300 if absent.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "prepare_timeout")]
    pub timeout_sec: u64,
}

impl Prepare {
    /// These commands, with the default time limit.
    pub fn new(commands: Vec<Program>) -> Self {
        Self {
            commands,
            timeout_sec: prepare_timeout(),
        }
    }
}

fn prepare_timeout() -> u64 {
    300
}

/// The guest user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Guest {
    /// The user name.
    pub name: String,
    /// The home directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    pub home: String,
}
