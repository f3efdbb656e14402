//! `command.*`: commands with an id, a log and an exit status. A command outlives the call that
//! started it.

use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, ReadEnd, ReadFrom, Until, View, actions};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::{BoxId, CommandId};
use crate::model::{Adjusted, CommandInfo, Program, Role};
use crate::note::Note;

actions! {
    /// Starts a command in a running box. If the id exists, the call attaches to that command; with
    /// `replace` it ends that command and takes over its id. Errors: `not_found` (box), `capacity`,
    /// `validation` (blank program, missing working directory), `denied` (user not mapped),
    /// `conflict` (the existing command was started with another program, directory, user or
    /// environment). With `attach` the call stays open: the first chunk is `started`, the rest is
    /// as for `command.attach`.
    CommandStart = "command.start": CommandStartParams => CommandStartResult | CommandChunk;

    /// Reads the log of a running or ended command until it ends or `until` is met. Errors:
    /// `not_found`, `conflict` (another exclusive reader is attached).
    CommandAttach = "command.attach": CommandAttachParams => CommandAttachResult | CommandChunk;

    /// Returns the record of a command, even in a stopped box. Neither this call nor `command.list`
    /// wakes the box or counts as activity. Errors: `not_found` (with `expired` in the details if
    /// the command existed), `conflict` (the box is paused), `unavailable` (the box has failed).
    CommandGet = "command.get": CommandKey => CommandInfo;

    /// Lists the commands of a box. Errors: those of `command.get`.
    CommandList = "command.list": CommandListParams => CommandListResult;

    /// Writes to the stdin of a running command, closes it, or resizes the terminal. Errors:
    /// `not_found`, `conflict` (the command has ended, its stdin is closed, or it has no terminal).
    CommandInput = "command.input": CommandInputParams => CommandInputResult;

    /// Sends a signal to a command and kills its process tree after the grace period. The call does
    /// nothing if the command has ended. Errors: `not_found`.
    CommandKill = "command.kill": CommandKillParams => CommandKillResult;
}

/// Identifies a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandKey {
    /// The box.
    pub box_id: BoxId,
    /// The command.
    pub command_id: CommandId,
}

/// Whether the stdin of a command is open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Stdin {
    /// At end of file from the start.
    #[default]
    Closed,
    /// The client writes it with `command.input`.
    Open,
}

/// Whether stdout and stderr are separate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputMode {
    /// Separate streams.
    #[default]
    Split,
    /// Both in stdout, in the order written.
    Merged,
}

/// What happens to a command when its caller disconnects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnDisconnect {
    /// The runtime kills its process tree. A crash of the server does not count as a disconnect: a
    /// client can attach again to a command with `attach` and `detached_ms` within that time.
    #[default]
    Kill,
    /// The command continues.
    Keep,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// Parameters of `command.start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandStartParams {
    /// The box.
    pub box_id: BoxId,
    /// The id of the command; generated if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// The program to run.
    pub program: Program,
    /// Working directory; the default of the box if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Environment variables, which override those of the box.
    #[serde(default)]
    pub env: Env,
    /// User name or uid; the guest user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether stdin is open; `closed` if absent.
    #[serde(default)]
    pub stdin: Stdin,
    /// Whether stdout and stderr are separate; `split` if absent.
    #[serde(default)]
    pub output: OutputMode,
    /// Size of the terminal; no terminal if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// Whether to delay the start until the first reader attaches; `false` if absent.
    #[serde(default)]
    pub hold: bool,
    /// Maximum run time in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Maximum time without a reader, in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// How long the log keeps what a lost reader has not received, in milliseconds; 0 if absent.
    ///
    /// Meanwhile a command whose log is full waits. A reader is lost if its connection breaks or its
    /// call is cancelled; one that attaches at an offset takes its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_reader_ms: Option<u64>,
    /// What happens when the caller disconnects; `kill` if absent.
    #[serde(default)]
    pub on_disconnect: OnDisconnect,
    /// How long the record is kept after the exit, in milliseconds; -1 for the life of the box. The
    /// server's setting if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// Size of the output log in bytes, from 4 KiB to 64 MiB; 1 MiB if absent. The oldest output is
    /// dropped first. If an attached reader still needs it, the command waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// The role of the command; `command` if absent.
    #[serde(default)]
    pub role: Role,
    /// Whether to end a running command with the same id first; `false` if absent.
    #[serde(default)]
    pub replace: bool,
    /// Memory limit of each process of the command, in MiB; only that of the box if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Data of the gateway, stored with the command and returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// How to stream the output; the call returns after the start if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

impl CommandStartParams {
    /// Runs a program in a box with default settings.
    pub fn new(box_id: BoxId, program: Program) -> Self {
        Self {
            box_id,
            command_id: None,
            program,
            cwd: None,
            env: Env::new(),
            user: None,
            stdin: Stdin::Closed,
            output: OutputMode::Split,
            pty: None,
            hold: false,
            timeout_ms: None,
            detached_ms: None,
            lost_reader_ms: None,
            on_disconnect: OnDisconnect::Kill,
            retain_ms: None,
            log_bytes: None,
            role: Role::Command,
            replace: false,
            memory_mb: None,
            note: None,
            attach: None,
        }
    }
}

/// Result of `command.start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandStartResult {
    /// The command.
    pub info: CommandInfo,
    /// Whether the command existed before; it was not started again.
    pub existed: bool,
    /// How reading ended; absent without `attach`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<ReadEnd>,
    /// Fields of the request that the profile changed; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjusted: Vec<Adjusted>,
}

/// What an exclusive reader does about another exclusive reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Exclusive {
    /// The new reader gets `conflict`.
    Refuse,
    /// The new reader takes over; the call of the other one ends with `taken`.
    Take,
}

/// Parameters of `command.attach`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandAttachParams {
    /// The box.
    pub box_id: BoxId,
    /// The command.
    pub command_id: CommandId,
    /// Where reading starts; at the first byte if absent.
    #[serde(default)]
    pub from: ReadFrom,
    /// How chunks carry the output; `text` if absent.
    #[serde(default)]
    pub view: View,
    /// When to stop before the exit of the command; never if absent.
    #[serde(default)]
    pub until: Until,
    /// Makes this call the only reader; shared if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<Exclusive>,
    /// Terminal size with which to start a held command; unchanged if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
}

impl CommandAttachParams {
    /// Reads the text of a command from the start to its exit.
    pub fn new(box_id: BoxId, command_id: CommandId) -> Self {
        Self {
            box_id,
            command_id,
            from: ReadFrom::default(),
            view: View::default(),
            until: Until::default(),
            exclusive: None,
            pty: None,
        }
    }
}

/// Result of `command.attach`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandAttachResult {
    /// The command when reading ended.
    pub info: CommandInfo,
    /// How reading ended.
    pub read: ReadEnd,
}

/// Parameters of `command.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandListParams {
    /// The box.
    pub box_id: BoxId,
    /// Only commands with this role; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// `true` for running commands only, `false` for ended ones only; both if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<bool>,
    /// Only commands with this process id inside the box; any if absent. A run in a shell has the
    /// process id of its shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

impl CommandListParams {
    /// All commands of a box.
    pub fn new(box_id: BoxId) -> Self {
        Self {
            box_id,
            role: None,
            running: None,
            pid: None,
        }
    }
}

/// Result of `command.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandListResult {
    /// The commands, oldest first.
    pub items: Vec<CommandInfo>,
}

/// Parameters of `command.input`. The agent applies `size`, `data` and `close` in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandInputParams {
    /// The box.
    pub box_id: BoxId,
    /// The command.
    pub command_id: CommandId,
    /// The new size of the terminal; unchanged if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// Bytes to write to stdin; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// Whether to close stdin; `false` if absent.
    #[serde(default)]
    pub close: bool,
    /// Time in milliseconds that the command has to read `data`; as long as it runs if absent.
    ///
    /// After it, the call fails with `timeout`. `detail.accepted` is the number of bytes that were written; the agent
    /// writes no more of them, and does not close stdin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

impl CommandInputParams {
    /// Writes nothing yet.
    pub fn new(box_id: BoxId, command_id: CommandId) -> Self {
        Self {
            box_id,
            command_id,
            size: None,
            data: None,
            close: false,
            wait_ms: None,
        }
    }
}

/// Result of `command.input`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandInputResult {
    /// Number of bytes written.
    pub accepted: u64,
}

/// Parameters of `command.kill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandKillParams {
    /// The box.
    pub box_id: BoxId,
    /// The command.
    pub command_id: CommandId,
    /// Signal name without `SIG`; `KILL` if absent.
    #[serde(default = "kill_signal")]
    pub signal: String,
    /// Time in milliseconds after which the rest of the process tree is killed; only the signal is
    /// sent if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Whether to delete the record of the command after its exit; `false` if absent.
    #[serde(default)]
    pub forget: bool,
}

impl CommandKillParams {
    /// Kills a command with its process tree.
    pub fn new(box_id: BoxId, command_id: CommandId) -> Self {
        Self {
            box_id,
            command_id,
            signal: kill_signal(),
            grace_ms: None,
            forget: false,
        }
    }
}

pub(super) fn kill_signal() -> String {
    "KILL".to_owned()
}

/// Result of `command.kill`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandKillResult {
    /// The command.
    pub info: CommandInfo,
    /// Whether the command had ended before; then no signal was sent.
    pub already: bool,
}
