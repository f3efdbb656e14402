//! `shell.*`: interpreters that keep their state between runs. A run is a command.

use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, CommandStartResult, OutputMode, Stdin, actions};
use crate::env::Env;
use crate::ids::{CommandId, SessionId, ShellId};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Makes a shell in a running box, or finds the one of this id; a given note replaces the old.
    /// `not_found` (box), `unsupported` (no such interpreter in the box).
    ShellCreate = "shell.create": ShellCreateParams => ShellCreateResult;

    /// Runs a text in a shell, after those before it. `not_found` (box or shell): then nothing ran.
    /// With `attach` the call stays open, as for `command.start`.
    ShellRun = "shell.run": ShellRunParams => CommandStartResult | CommandChunk;

    /// The shells of a box, as `command.list` does it: no wake, no use. `not_found` (box).
    ShellList = "shell.list": ShellListParams => ShellListResult;

    /// Ends a shell, its runs and a creation under way; one that is not there is no error.
    ShellDelete = "shell.delete": ShellDeleteParams => ShellDeleteResult;
}

/// What a shell speaks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// Bash.
    #[default]
    Bash,
    /// The plain shell.
    Sh,
    /// Python.
    Python,
    /// JavaScript.
    JavaScript,
}

/// Parameters of `shell.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellCreateParams {
    /// The box.
    pub session_id: SessionId,
    /// The shell; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// What it speaks.
    #[serde(default)]
    pub language: Language,
    /// Where it begins; the box's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Variables over the box's own.
    #[serde(default)]
    pub env: Env,
    /// Whether its runs' streams are kept apart.
    #[serde(default)]
    pub output: OutputMode,
    /// Keep state between runs; otherwise each run is a fresh process in the same directory.
    #[serde(default = "yes")]
    pub persist: bool,
    /// Ends after so long without a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

fn yes() -> bool {
    true
}

/// Answer to `shell.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellCreateResult {
    /// The shell.
    pub info: ShellInfo,
    /// It was there before.
    pub existed: bool,
}

/// Where a shell is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ShellState {
    /// Being made.
    Starting,
    /// Waiting for a run.
    Idle,
    /// Running one.
    Busy,
}

/// What is known of a shell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellInfo {
    /// Its box.
    pub session_id: SessionId,
    /// The shell.
    pub shell_id: ShellId,
    /// What it speaks.
    pub language: Language,
    /// Where it is in its life.
    pub state: ShellState,
    /// Where it stands.
    pub cwd: String,
    /// It keeps state between runs.
    pub persist: bool,
    /// The run under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<CommandId>,
    /// The run before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<CommandId>,
    /// When it was made.
    pub created_at: UnixMs,
    /// When it last had a run.
    pub last_used_at: UnixMs,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

/// Parameters of `shell.run`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellRunParams {
    /// The box.
    pub session_id: SessionId,
    /// The shell.
    pub shell_id: ShellId,
    /// The run; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// What to run, in the shell's language.
    pub text: String,
    /// Go there first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Variables for this run.
    #[serde(default)]
    pub env: Env,
    /// Whether it has input.
    #[serde(default)]
    pub stdin: Stdin,
    /// How long it may run; for ever if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Stay open and stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

/// Parameters of `shell.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellListParams {
    /// The box.
    pub session_id: SessionId,
    /// This shell only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
}

/// Answer to `shell.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellListResult {
    /// The shells, oldest first.
    pub items: Vec<ShellInfo>,
}

/// Parameters of `shell.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellDeleteParams {
    /// The box.
    pub session_id: SessionId,
    /// The shell.
    pub shell_id: ShellId,
}

/// Answer to `shell.delete`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellDeleteResult {
    /// There was one.
    pub deleted: bool,
}
