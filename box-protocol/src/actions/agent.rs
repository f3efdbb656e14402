//! `agent.*`: calls from a runtime to the agent inside a box. A host cannot call them.
//!
//! The agent starts processes, keeps their output and reports their exit; it makes no policy
//! decisions. The agent runs beside the guest, therefore the runtime does not trust its answers.
//!
//! # Shared memory slots
//!
//! Output of more than a few kilobytes does not travel in messages. A runtime on the same machine
//! gives an agent [`SPOOL_SLOTS`] *slots*: shared memory of [`SPOOL_BYTES`] each, with one ring
//! buffer of [`SPOOL_RING`] per stream, stdout first. Byte `n` of a stream is at `n % SPOOL_RING`
//! of its ring, so a message only carries offset and length. A slot serves one call at a time; the
//! runtime assigns it.

use std::collections::BTreeMap;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::commands::kill_signal;
use super::{
    CommandInputResult, Exclusive, GuestInfo, OutputMode, OutputPiece, ReadFrom, ReadWhy, Stdin,
    StreamName, TerminalSize, Until, View, actions, is_default,
};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::{CommandId, ShellId};
use crate::model::{CommandInfo, Exit, PerStream, Program, Role};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Reports that the agent is alive and which commands run, and sets the environment of the box.
    /// Always allowed. It is the first call to an agent.
    AgentHealth = "agent.health": AgentHealthParams => AgentHealthResult;

    /// Starts a process, or returns the existing command with this id. Errors: `validation` (no
    /// such program or working directory), `denied` (user not mapped), `capacity`. A call that
    /// stays open until the exit owns the process unless `keep` is set: dropping the call kills the
    /// process tree.
    AgentStart = "agent.start": AgentStartParams => AgentCommand | AgentChunk;

    /// Streams the output of a command until its exit or `until`, and starts a held command.
    /// Dropping the call has no other effect. Errors: `not_found`, `conflict` (another exclusive
    /// reader is attached).
    AgentOutput = "agent.output": AgentOutputParams => AgentCommand | AgentChunk;

    /// Lists all commands, or returns one. Errors: `not_found`.
    AgentList = "agent.list": AgentListParams => AgentListResult;

    /// Writes to the stdin of a command, closes it, or resizes the terminal. Answers when
    /// everything is written. Errors: `not_found`, `conflict` (the command has ended, or has no
    /// such input or terminal).
    AgentInput = "agent.input": AgentInputParams => CommandInputResult;

    /// Sends a signal to a command and kills its process tree after the grace period. Answers when
    /// the tree is gone. Errors: `not_found`.
    AgentKill = "agent.kill": AgentKillParams => AgentKillResult;

    /// Ends every command, shell and other process in the box except the agent. Answers when none
    /// is left. Commands end as `box_ended`; their records and logs stay.
    AgentClear = "agent.clear": Empty => Empty;

    /// Returns information about the system inside the box.
    AgentGuest = "agent.guest": Empty => GuestInfo;

    /// Allows later commands to write below a directory that was mounted after the box started.
    /// Errors: `not_found`.
    AgentAllow = "agent.allow": AgentAllowParams => Empty;

    /// Returns the size of the private files of the box.
    AgentDisk = "agent.disk": Empty => AgentDiskResult;
}

/// Size of the ring buffer of one stream in a slot, in bytes.
///
/// Larger than the output that can be in flight to a reader.
pub const SPOOL_RING: u64 = 1 << 20;

/// Size of a slot in bytes.
pub const SPOOL_BYTES: u64 = 2 * SPOOL_RING;

/// Number of slots of an agent.
pub const SPOOL_SLOTS: u32 = 8;

/// Parameters of `agent.health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentHealthParams {
    /// Environment variables of every command of the box; unchanged if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Env>,
    /// Base directory of relative file paths; unchanged if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Maximum size of one file in bytes; unchanged if absent, initially unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
}

/// Result of `agent.health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentHealthResult {
    /// The version of `agent.*` that the agent implements.
    pub contract: u32,
    /// The running commands.
    pub running: Vec<CommandId>,
    /// Whether the agent supports the actions that transfer files through slots.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spools_files: bool,
    /// Number of commands that have not ended, running or not.
    #[serde(default, skip_serializing_if = "is_default")]
    pub open: u64,
    /// Number of unacknowledged exits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unheard: u64,
}

/// Parameters of `agent.allow`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentAllowParams {
    /// The directory.
    pub path: String,
}

/// Result of `agent.disk`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentDiskResult {
    /// Size in bytes of `/tmp`, `/dev/shm`, the guest's home and directories, and of the changes to
    /// the root file system.
    pub private_bytes: u64,
}

/// When `agent.start` answers, and how it returns the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    /// Answer at once; the output stays in the log.
    #[default]
    Started,
    /// Answer at the exit, with the first bytes of each stream. A short exec costs one message in
    /// each direction.
    Collected {
        /// Number of bytes to return of each stream; the rest is only counted.
        bytes: u64,
    },
    /// Stream as `agent.output` does from the first byte, after a `started` chunk.
    Streamed {
        /// When to stop before the exit; never if absent.
        #[serde(default, skip_serializing_if = "is_default")]
        until: Until,
    },
}

/// Parameters of `agent.start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is one word of the contract"
)]
pub struct AgentStartParams {
    /// The id of the command.
    pub command_id: CommandId,
    /// The program to run.
    pub program: Program,
    /// Environment variables, which override those of the box. The agent adds no others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub env: Env,
    /// The shell in which to run the program, which is then a text, after the queued runs. `cwd`
    /// and `env` apply to this run only. Errors: `not_found` (nothing ran).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// Working directory; empty for the current directory of the shell.
    pub cwd: String,
    /// Whether to create a missing working directory; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub make_cwd: bool,
    /// User name or uid; the guest user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether stdin is open; `closed` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stdin: Stdin,
    /// Whether stdout and stderr are separate; `split` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub output: OutputMode,
    /// Size of the terminal; no terminal if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// Maximum run time in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Maximum size of one file that the command writes, in bytes; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Memory limit of each process of the command, in MiB; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Size of the output log in bytes, from 4 KiB to 64 MiB; 1 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// When to answer; `started` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reply: AgentReply,
    /// Whether the command continues if the call is dropped; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keep: bool,
    /// Whether to delay the start until the first reader attaches; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hold: bool,
    /// Whether to end and remove an existing command with this id first; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replace: bool,
    /// Maximum time without a reader, in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// How long the record is kept after the exit, in milliseconds; a negative value for the life
    /// of the box. 10 minutes if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// The role of the command; `command` if absent. The agent keeps nothing of an `exec` but its
    /// result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// Data of the gateway, stored with the command and returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// The slot for the output; all output is in messages if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool: Option<u32>,
    /// A path to watch instead of starting a process; `program` is then only displayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<Box<AgentWatch>>,
    /// A digest of the caller's request without the defaults of the box, to compare a repeated
    /// start. If absent, the agent compares `program`, `cwd`, `user`, `shell_id` and `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
}

impl AgentStartParams {
    /// Runs a program in a directory, with default settings.
    pub fn new(command_id: CommandId, program: Program, cwd: impl Into<String>) -> Self {
        Self {
            command_id,
            program,
            env: Env::default(),
            shell_id: None,
            cwd: cwd.into(),
            make_cwd: false,
            user: None,
            stdin: Stdin::default(),
            output: OutputMode::default(),
            pty: None,
            timeout_ms: None,
            file_bytes: None,
            memory_mb: None,
            log_bytes: None,
            reply: AgentReply::default(),
            keep: false,
            hold: false,
            replace: false,
            detached_ms: None,
            retain_ms: None,
            role: Role::default(),
            note: None,
            spool: None,
            watch: None,
            asked: None,
        }
    }
}

/// What a command with the role `watch` observes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentWatch {
    /// The path.
    pub path: String,
    /// Whether to watch all subdirectories; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub recursive: bool,
    /// Whether to expand `~`, `$VAR` and relative paths; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expand: bool,
}

/// The state of a command as its agent reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentCommand {
    /// The command.
    pub command_id: CommandId,
    /// The process id inside the box.
    pub pid: u32,
    /// The exit status; absent while the command runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// Run time in milliseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub duration_ms: u64,
    /// Number of bytes written so far.
    #[serde(default, skip_serializing_if = "is_default")]
    pub size: PerStream,
    /// Number of bytes that were counted but not kept.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dropped: PerStream,
    /// The first bytes of the output; absent unless collected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collected: Option<Collected>,
    /// Number of bytes, from the start of each stream, that are in the slot instead of in
    /// `collected`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spooled: PerStream,
    /// Why streaming the output ended; absent without streaming.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<ReadWhy>,
    /// Whether the command existed before the call.
    #[serde(default, skip_serializing_if = "is_default")]
    pub existed: bool,
    /// The record of the command; of an `exec` only if its output is streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<Box<CommandInfo>>,
    /// Values that an ended run displayed, by media type, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shown: Vec<BTreeMap<String, String>>,
}

impl AgentCommand {
    /// A running command that has written nothing.
    pub fn new(command_id: CommandId, pid: u32) -> Self {
        Self {
            command_id,
            pid,
            exit: None,
            duration_ms: 0,
            size: PerStream::default(),
            dropped: PerStream::default(),
            collected: None,
            spooled: PerStream::default(),
            why: None,
            existed: false,
            info: None,
            shown: Vec::new(),
        }
    }
}

/// The first bytes of the output of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Collected {
    /// Bytes of standard output.
    #[serde(skip_serializing_if = "is_default")]
    pub stdout: Blob,
    /// Bytes of standard error.
    #[serde(skip_serializing_if = "is_default")]
    pub stderr: Blob,
}

/// A chunk from an agent: an object with one member, named after its kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentChunk {
    /// The process runs. Always the first chunk, and only of `agent.start`.
    Started {
        /// The process id inside the box.
        pid: u32,
        /// The record of the command; of an `exec` only if its output is streamed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        info: Option<Box<CommandInfo>>,
    },
    /// Where the following output starts; at the first byte if absent.
    Begin(ReadBegin),
    /// Output.
    Bytes(OutputPiece<Blob>),
    /// Output in the slot of the command. It never wraps around the end of its ring.
    Spooled(SpooledPiece),
}

/// Where a stream of output starts: at or before the requested offset, or at the first kept byte.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ReadBegin {
    /// Byte offsets in the streams.
    pub raw: PerStream,
    /// Byte offsets in the text of the streams.
    pub text: PerStream,
    /// Incomplete characters before the start, per stream, which the following bytes may complete.
    #[serde(skip_serializing_if = "is_default")]
    pub pending: Collected,
    /// Current end of each stream, in bytes.
    pub raw_end: PerStream,
    /// Current end of the text of each stream, in bytes.
    pub text_end: PerStream,
}

/// A piece of output in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SpooledPiece {
    /// When the output was written.
    pub at: UnixMs,
    /// The stream.
    pub stream: StreamName,
    /// Offset of the first byte in the stream.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Parameters of `agent.list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AgentListParams {
    /// Only this command; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// Start after this command, the last one of the previous result; at the oldest if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<ListCursor>,
}

/// A position in a list of commands, which is sorted by creation time and id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ListCursor {
    /// When the command was requested.
    pub created_at: UnixMs,
    /// The command.
    pub command_id: CommandId,
}

impl ListCursor {
    /// Whether a command comes after this position.
    pub fn is_before(&self, created_at: UnixMs, command_id: &CommandId) -> bool {
        (self.created_at, &self.command_id) < (created_at, command_id)
    }
}

impl From<&CommandInfo> for ListCursor {
    fn from(info: &CommandInfo) -> Self {
        Self {
            created_at: info.created_at,
            command_id: info.command_id.clone(),
        }
    }
}

/// Result of `agent.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentListResult {
    /// The commands, oldest first: as many as fit into one message.
    pub items: Vec<CommandInfo>,
    /// Whether more commands exist.
    #[serde(default, skip_serializing_if = "is_default")]
    pub more: bool,
}

/// Parameters of `agent.input`. The agent applies `size`, `data` and `close` in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentInputParams {
    /// The command.
    pub command_id: CommandId,
    /// The new size of the terminal; unchanged if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// Bytes to write to stdin; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// Whether to close stdin; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub close: bool,
}

/// Parameters of `agent.output`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentOutputParams {
    /// The command.
    pub command_id: CommandId,
    /// Where reading starts; at the first byte if absent.
    #[serde(default)]
    pub from: ReadFrom,
    /// What `from` counts. The agent sends no output for [`View::None`].
    #[serde(default)]
    pub view: View,
    /// When to stop before the exit. The reader applies `until.bytes`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub until: Until,
    /// Makes this call the only reader; shared if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<Exclusive>,
    /// Terminal size with which to start a held command; that of its start if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// The slot for the output; all output is in messages if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool: Option<u32>,
}

/// Parameters of `agent.kill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentKillParams {
    /// The command.
    pub command_id: CommandId,
    /// Signal name without `SIG`; `KILL` if absent.
    #[serde(default = "kill_signal")]
    pub signal: String,
    /// Time in milliseconds after which the rest of the process tree is killed; with 0 only the
    /// signal is sent.
    #[serde(default)]
    pub grace_ms: u64,
    /// Whether to delete the record of the command after its exit; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forget: bool,
}

/// Result of `agent.kill`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentKillResult {
    /// The exit status; absent if the signal did not end the command and no grace period was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// Whether the command had ended before; then no signal was sent.
    pub already: bool,
    /// The record of the command; of an `exec` only if its output is streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<Box<CommandInfo>>,
}
