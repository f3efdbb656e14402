//! `command.*`: objects with an id, a log and an end, which outlive the call that made them.

use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, ReadEnd, ReadFrom, Until, View, actions};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::{CommandId, SessionId};
use crate::model::{Adjusted, BoxManagedProcessSpec, CommandInfo, Program, Role};
use crate::note::Note;

actions! {
    /// Starts a command in a running box, beside its execs; with an id that exists, attaches to it or, with
    /// `replace`, ends it and takes its place: of several that want it each gets it in turn. Errors: `not_found` (box), `capacity`, `validation` (blank program, no such
    /// working directory), `denied` (user not mapped), `conflict` (the id is of a command that was asked for with another
    /// program, place, user or environment). With `attach` the call stays open: the first
    /// chunk is `started`, the rest as for `command.attach`.
    CommandStart = "command.start": CommandStartParams => CommandStartResult | CommandChunk;

    /// Reads a command's log, of a running or ended one, and goes on until it ends or `until` is met.
    /// `not_found`, `conflict` (somebody reads it exclusively).
    CommandAttach = "command.attach": CommandAttachParams => CommandAttachResult | CommandChunk;

    /// What is known of a command, also in a stopped box. Neither this nor `command.list` wakes a box or
    /// counts as use. `not_found`; `expired` among the details if it did exist; `conflict` (the box is
    /// paused, and whoever knows stands still), `unavailable` (it has failed).
    CommandGet = "command.get": CommandKey => CommandInfo;

    /// The commands of a box, as for `command.get`. `not_found` (box).
    CommandList = "command.list": CommandListParams => CommandListResult;

    /// Writes to a running command, closes its input or resizes its terminal. `not_found`, `conflict`
    /// (ended, input closed, no terminal).
    CommandInput = "command.input": CommandInputParams => CommandInputResult;

    /// Signals a command and, after the grace, kills its whole tree. On an ended one it does nothing
    /// and says so. `not_found`.
    CommandKill = "command.kill": CommandKillParams => CommandKillResult;
}

/// One command of one box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandKey {
    /// The box.
    pub session_id: SessionId,
    /// The command.
    pub command_id: CommandId,
}

/// Whether a command has input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Stdin {
    /// At its end from the start.
    #[default]
    Closed,
    /// Written by `command.input`.
    Open,
}

/// Whether the two streams are kept apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputMode {
    /// Apart.
    #[default]
    Split,
    /// Both in standard output, in the order written.
    Merged,
}

/// What becomes of a command when its caller is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnDisconnect {
    /// Its tree is killed. If the server dies, the caller is not gone: a command with `attach` and `detached_ms` has that
    /// long to be read again from the next server.
    #[default]
    Kill,
    /// It goes on.
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
    pub session_id: SessionId,
    /// The command; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// What to run.
    pub program: Program,
    /// Where; the box's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Variables over the box's own.
    #[serde(default)]
    pub env: Env,
    /// The user, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether it has input.
    #[serde(default)]
    pub stdin: Stdin,
    /// Whether its streams are kept apart.
    #[serde(default)]
    pub output: OutputMode,
    /// Gives it a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// Wait with the start for the first reader.
    #[serde(default)]
    pub hold: bool,
    /// How long it may run; for ever if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How long it may run without a reader; for ever if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// What becomes of it when the caller is gone.
    #[serde(default)]
    pub on_disconnect: OnDisconnect,
    /// How long its record is kept after its end; -1 for the life of the box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// How much of its output is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// What it is for.
    #[serde(default)]
    pub role: Role,
    /// Take the place of a running command of the same id.
    #[serde(default)]
    pub replace: bool,
    /// Its own share of the box's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Stay open and stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

impl CommandStartParams {
    /// Runs this program in this box, everything else as by default.
    pub fn new(session_id: SessionId, program: Program) -> Self {
        Self {
            session_id,
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

    /// The command that is this managed process of LangBot's.
    pub fn managed(
        session_id: SessionId,
        spec: &BoxManagedProcessSpec,
    ) -> Result<Self, crate::Invalid> {
        Ok(Self {
            command_id: Some(spec.process_id.clone()),
            cwd: Some(spec.cwd.clone()),
            env: spec.env.clone(),
            stdin: Stdin::Open,
            on_disconnect: OnDisconnect::Keep,
            retain_ms: Some(300_000),
            role: Role::Process,
            replace: true,
            memory_mb: Some(spec.memory_mb).filter(|limit| *limit > 0),
            ..Self::new(session_id, spec.program()?)
        })
    }
}

/// Answer to `command.start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandStartResult {
    /// The command.
    pub info: CommandInfo,
    /// It was there before, and was not started again.
    pub existed: bool,
    /// How reading ended, if the call stayed open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<ReadEnd>,
    /// What the profile changed of the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjusted: Vec<Adjusted>,
}

/// What an exclusive reader does about another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Exclusive {
    /// Is refused.
    Refuse,
    /// Takes over; the other's call ends with `taken`.
    Take,
}

/// Parameters of `command.attach`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandAttachParams {
    /// The box.
    pub session_id: SessionId,
    /// The command.
    pub command_id: CommandId,
    /// Where reading begins.
    #[serde(default)]
    pub from: ReadFrom,
    /// What chunks hold.
    #[serde(default)]
    pub view: View,
    /// When to stop before the command's end.
    #[serde(default)]
    pub until: Until,
    /// Be the only reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<Exclusive>,
    /// The reader's terminal; starts a held command in one of this size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
}

/// Answer to `command.attach`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandAttachResult {
    /// The command, as it was when reading ended.
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
    pub session_id: SessionId,
    /// For this purpose only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Only those that run, or only those that do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<bool>,
}

/// Answer to `command.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandListResult {
    /// The commands, oldest first.
    pub items: Vec<CommandInfo>,
}

/// Parameters of `command.input`: any of the three, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandInputParams {
    /// The box.
    pub session_id: SessionId,
    /// The command.
    pub command_id: CommandId,
    /// The terminal's new size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// Bytes to write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// No more input.
    #[serde(default)]
    pub close: bool,
}

/// Answer to `command.input`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandInputResult {
    /// Bytes that were written.
    pub accepted: u64,
}

/// Parameters of `command.kill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandKillParams {
    /// The box.
    pub session_id: SessionId,
    /// The command.
    pub command_id: CommandId,
    /// The signal, without `SIG`.
    #[serde(default = "kill_signal")]
    pub signal: String,
    /// Kill what is left of its tree after so long; absent for the signal alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Drop its record, too.
    #[serde(default)]
    pub forget: bool,
}

pub(super) fn kill_signal() -> String {
    "KILL".to_owned()
}

/// Answer to `command.kill`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandKillResult {
    /// The command.
    pub info: CommandInfo,
    /// It had ended before; nothing was signalled.
    pub already: bool,
}
