//! `shell.*`: interpreters that keep their state between runs. A run is a command.

use serde::{Deserialize, Serialize};

use super::{
    AttachOptions, CommandChunk, CommandStartResult, OnDisconnect, OutputMode, Stdin, actions,
    is_default,
};
use crate::env::Env;
use crate::ids::{BoxId, CommandId, ShellId};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Creates a shell in a running box, or returns the existing one with this id. A given note
    /// replaces the old one. Errors: `not_found` (box), `unsupported` (the interpreter is not
    /// installed).
    ShellCreate = "shell.create": ShellCreateParams => ShellCreateResult;

    /// Runs a text in a shell after the runs queued before it. Errors: `not_found` (box or shell;
    /// nothing ran). With `attach` the call stays open, as for `command.start`.
    ShellRun = "shell.run": ShellRunParams => CommandStartResult | CommandChunk;

    /// Lists the shells of a box. The call does not wake the box and does not count as activity.
    /// Errors: `not_found` (box).
    ShellList = "shell.list": ShellListParams => ShellListResult;

    /// Ends a shell, its runs, and a creation in progress. A missing shell is not an error.
    ShellDelete = "shell.delete": ShellDeleteParams => ShellDeleteResult;
}

/// The language of a shell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// Bash.
    #[default]
    Bash,
    /// The POSIX shell `sh`.
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
    pub box_id: BoxId,
    /// The id of the shell; generated if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// The language; `bash` if absent.
    #[serde(default)]
    pub language: Language,
    /// Initial working directory; the default of the box if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Environment variables, which override those of the box.
    #[serde(default)]
    pub env: Env,
    /// Whether stdout and stderr of the runs are separate; `split` if absent.
    #[serde(default)]
    pub output: OutputMode,
    /// Whether state is kept between runs; `true` if absent. Otherwise each run is a new process in
    /// the same directory.
    #[serde(default = "yes")]
    pub persist: bool,
    /// Time without a run after which the shell ends, in milliseconds; never if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Data of the gateway, stored with the shell and returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

impl ShellCreateParams {
    /// A Bash shell with default settings.
    pub fn new(box_id: BoxId) -> Self {
        Self {
            box_id,
            shell_id: None,
            language: Language::default(),
            cwd: None,
            env: Env::new(),
            output: OutputMode::default(),
            persist: true,
            idle_ms: None,
            note: None,
        }
    }
}

fn yes() -> bool {
    true
}

/// Result of `shell.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellCreateResult {
    /// The shell.
    pub info: ShellInfo,
    /// Whether the shell existed before the call.
    pub existed: bool,
}

/// The state of a shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ShellState {
    /// Being created.
    Starting,
    /// Waiting for a run.
    Idle,
    /// Executing a run.
    Busy,
}

/// The record of a shell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellInfo {
    /// The box.
    pub box_id: BoxId,
    /// The shell.
    pub shell_id: ShellId,
    /// The language.
    pub language: Language,
    /// The state.
    pub state: ShellState,
    /// The current working directory.
    pub cwd: String,
    /// Whether state is kept between runs.
    pub persist: bool,
    /// The current run; absent while idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<CommandId>,
    /// The previous run; absent before the first one has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<CommandId>,
    /// Number of runs that the shell has begun to execute.
    #[serde(default)]
    pub executions: u64,
    /// When the shell was created.
    pub created_at: UnixMs,
    /// When the shell last executed a run.
    pub last_used_at: UnixMs,
    /// Data of the gateway, returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

/// Parameters of `shell.run`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellRunParams {
    /// The box.
    pub box_id: BoxId,
    /// The shell.
    pub shell_id: ShellId,
    /// The id of the run; generated if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// The text to run, in the language of the shell.
    pub text: String,
    /// Working directory of this run; that of the shell if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Whether the shell stays in the directory of this run; `false` if absent: the shell returns
    /// to its own directory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cwd_stays: bool,
    /// Environment variables of this run.
    #[serde(default)]
    pub env: Env,
    /// Whether stdin is open; `closed` if absent.
    #[serde(default)]
    pub stdin: Stdin,
    /// Maximum run time in milliseconds, and maximum time in the queue of the shell; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Maximum time without a reader, in milliseconds, from the start of the run; unlimited if
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// What happens when the caller disconnects; `kill` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_disconnect: OnDisconnect,
    /// How long the record is kept after the exit, in milliseconds; -1 for the life of the box. The
    /// server's setting if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// Size of the output log in bytes, as in `command.start`; 1 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// Data of the gateway, stored with the run and returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// How to stream the output; the call returns after the start if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

impl ShellRunParams {
    /// Runs a text in a shell with default settings.
    pub fn new(box_id: BoxId, shell_id: ShellId, text: impl Into<String>) -> Self {
        Self {
            box_id,
            shell_id,
            command_id: None,
            text: text.into(),
            cwd: None,
            cwd_stays: false,
            env: Env::new(),
            stdin: Stdin::Closed,
            timeout_ms: None,
            detached_ms: None,
            on_disconnect: OnDisconnect::Kill,
            retain_ms: None,
            log_bytes: None,
            note: None,
            attach: None,
        }
    }
}

/// Parameters of `shell.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellListParams {
    /// The box.
    pub box_id: BoxId,
    /// Only this shell; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
}

/// Result of `shell.list`.
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
    pub box_id: BoxId,
    /// The shell.
    pub shell_id: ShellId,
}

/// Result of `shell.delete`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellDeleteResult {
    /// Whether the shell existed.
    pub deleted: bool,
}
