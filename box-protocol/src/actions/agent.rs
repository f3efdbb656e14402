//! `agent.*`: what a runtime asks of the agent inside a box. Never served to a host.
//!
//! The agent starts processes, keeps their output and tells their end; it decides nothing. It lives
//! with the guest, so the runtime trusts nothing it says.
//!
//! # Spool slots
//! Output that is more than a few kilobytes does not travel in messages. A runtime on the same machine
//! hands an agent [`SPOOL_SLOTS`] *slots*: shared memory of [`SPOOL_BYTES`] each, one ring of
//! [`SPOOL_RING`] for each stream, standard output's first. Byte `n` of a stream is at `n % SPOOL_RING`
//! of its ring, so a message says offset and length, and nothing else has to be agreed on. A slot serves
//! one call at a time; the runtime says which.

use std::collections::BTreeMap;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::commands::kill_signal;
use super::{
    CommandInputResult, Exclusive, GuestFacts, OutputMode, OutputPiece, ReadFrom, ReadWhy, Stdin,
    StreamName, TerminalSize, Until, View, actions, is_default,
};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::{CommandId, ShellId};
use crate::model::{CommandInfo, Exit, PerStream, Program, Role};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Whether the agent lives, and what it runs; tells it the environment of the box. Always allowed;
    /// the first thing it is asked.
    AgentHealth = "agent.health": AgentHealthParams => AgentHealthResult;

    /// Starts a process, or finds the one that has the id already. `validation` (no such program or
    /// working directory), `denied` (user not mapped), `capacity`. A call that stays open until the end
    /// owns the process unless it says `keep`: dropping it kills the tree.
    AgentStart = "agent.start": AgentStartParams => AgentCommand | AgentChunk;

    /// Streams a command's output, and ends with its end or as `until` says; begins a held one. Dropping
    /// the call ends nothing else. `not_found`, `conflict` (somebody reads it exclusively).
    AgentOutput = "agent.output": AgentOutputParams => AgentCommand | AgentChunk;

    /// Tells of the commands there are, or of one. `not_found`.
    AgentList = "agent.list": AgentListParams => AgentListResult;

    /// Writes to a command's input, closes it, or tells its terminal's size. Answered when all is
    /// written. `not_found`, `conflict` (it has ended, or has no such input or terminal).
    AgentInput = "agent.input": AgentInputParams => CommandInputResult;

    /// Signals a command and, after the grace, kills its whole tree; answered when the tree is gone.
    /// `not_found`.
    AgentKill = "agent.kill": AgentKillParams => AgentKillResult;

    /// Ends every command and shell and whatever else runs in the box, the agent apart; answered when
    /// nothing does. Commands end as `box_ended`, and their records and logs stay as ever.
    AgentClear = "agent.clear": Empty => Empty;

    /// Tells what the box is like from inside.
    AgentGuest = "agent.guest": Empty => GuestFacts;

    /// Lets commands that are started from now on write beneath a directory that was mounted since. `not_found`.
    AgentAllow = "agent.allow": AgentAllowParams => Empty;

    /// Counts the files that only the box has.
    AgentDisk = "agent.disk": Empty => AgentDiskResult;
}

/// Bytes of a slot for each stream. More than what the chunks ahead of a reader can hold.
pub const SPOOL_RING: u64 = 1 << 20;

/// Bytes of a slot.
pub const SPOOL_BYTES: u64 = 2 * SPOOL_RING;

/// Slots of an agent.
pub const SPOOL_SLOTS: u32 = 8;

/// Parameters of `agent.health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentHealthParams {
    /// What every command of the box finds in its environment, said once instead of with each of
    /// them. Absent, it stays as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Env>,
    /// Where relative paths of files begin. Absent, it stays as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The most bytes that one file may have. Absent, it stays as it was: no limit at first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
}

/// Answer to `agent.health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentHealthResult {
    /// The version of `agent.*` it speaks.
    pub contract: u32,
    /// Commands that run.
    pub running: Vec<CommandId>,
    /// Whether it serves the actions that move files through slots.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spools_files: bool,
    /// Commands that have not ended, those that run and others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub open: u64,
    /// Ends that nobody has heard of.
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

/// Answer to `agent.disk`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentDiskResult {
    /// Bytes of `/tmp`, `/dev/shm`, the guest's home and directories, and of what was changed in the root.
    pub private_bytes: u64,
}

/// When `agent.start` answers, and how the output comes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    /// At once; the output waits in the log.
    #[default]
    Started,
    /// At the end, with the first so many bytes of each stream in the answer. One message each way,
    /// which is what a short exec costs.
    Collected {
        /// Bytes of each stream to keep; the rest is counted.
        bytes: u64,
    },
    /// As `agent.output` from the first byte on, after a chunk that says it has started.
    Streamed {
        /// When to stop before the end.
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
    /// The command.
    pub command_id: CommandId,
    /// What to run.
    pub program: Program,
    /// Variables beside those of the box, over which they win. Nothing else is added.
    #[serde(default, skip_serializing_if = "is_default")]
    pub env: Env,
    /// Run the program, a text, in this shell and in its turn, with `cwd` and `env` for this run only.
    /// `not_found`: then nothing ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// Where; empty for where its shell stands.
    pub cwd: String,
    /// Make the directory if it is not there.
    #[serde(default, skip_serializing_if = "is_default")]
    pub make_cwd: bool,
    /// The user, by name or number; the guest if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether it has input.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stdin: Stdin,
    /// Whether its streams are kept apart.
    #[serde(default, skip_serializing_if = "is_default")]
    pub output: OutputMode,
    /// Gives it a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// Kill its tree after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// The most bytes that one file it writes may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// The most memory, in mebibytes, that each of its processes may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// How much of its output is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// When to answer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reply: AgentReply,
    /// Go on if the call is dropped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keep: bool,
    /// Make it, and start it when its output is first asked for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hold: bool,
    /// End and forget another one of this id first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replace: bool,
    /// Kill its tree when nobody has read it for so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// How long its record stays after its end; for ever if negative.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// What it is for. Of an `exec` nothing is kept but its answer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// The slot that its output may go to. Without one, all of it comes in messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool: Option<u32>,
    /// Start no process: watch this. `program` is what is told of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<Box<AgentWatch>>,
    /// A digest of the caller's own request, without the defaults of the box. A repeated start is compared by it; without
    /// it, by `program`, `cwd`, `user`, `shell_id` and `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
}

impl AgentStartParams {
    /// Runs this, there; all else is as if it were not said.
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

/// What a command of role `watch` watches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentWatch {
    /// The path.
    pub path: String,
    /// And all below it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub recursive: bool,
    /// Take `~`, `$VAR` and relative paths.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expand: bool,
}

/// A command as its agent tells it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentCommand {
    /// The command.
    pub command_id: CommandId,
    /// Its process, as the box numbers it.
    pub pid: u32,
    /// How it ended; absent while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// How long it has run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub duration_ms: u64,
    /// Bytes written so far.
    #[serde(default, skip_serializing_if = "is_default")]
    pub size: PerStream,
    /// Bytes that were counted and not kept.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dropped: PerStream,
    /// The first of its output, if it was collected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collected: Option<Collected>,
    /// How much of that, from the begin of each stream, is in its slot instead of in `collected`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spooled: PerStream,
    /// Why a stream of its output ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<ReadWhy>,
    /// It was there before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub existed: bool,
    /// All there is to know of it; not of an `exec`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<Box<CommandInfo>>,
    /// What a run that has ended has shown, by media type, in the order it did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shown: Vec<BTreeMap<String, String>>,
}

impl AgentCommand {
    /// A command that runs and has written nothing.
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

/// The first of a command's output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Collected {
    /// Of standard output.
    #[serde(skip_serializing_if = "is_default")]
    pub stdout: Blob,
    /// Of standard error.
    #[serde(skip_serializing_if = "is_default")]
    pub stderr: Blob,
}

/// What an agent streams: an object with one member, named after the kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentChunk {
    /// The process runs. First, and only from `agent.start`.
    Started {
        /// Its process, as the box numbers it.
        pid: u32,
        /// All there is to know of it; not of an `exec`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        info: Option<Box<CommandInfo>>,
    },
    /// Where the output that follows begins. Without it, at the first byte.
    Begin(ReadBegin),
    /// Output.
    Bytes(OutputPiece<Blob>),
    /// Output that is in the command's slot, never over the end of its ring.
    Spooled(SpooledPiece),
}

/// Where a stream of output begins: at or before what was asked for, or at the first byte that is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ReadBegin {
    /// In bytes of each stream.
    pub raw: PerStream,
    /// In bytes of the text of each stream.
    pub text: PerStream,
    /// The begins of characters before it, of each stream, that what follows may complete.
    #[serde(skip_serializing_if = "is_default")]
    pub pending: Collected,
    /// Where each stream ends now, in bytes.
    pub raw_end: PerStream,
    /// Where the text of each stream ends now.
    pub text_end: PerStream,
}

/// A piece of output in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SpooledPiece {
    /// When it was written.
    pub at: UnixMs,
    /// Of this stream.
    pub stream: StreamName,
    /// Where it begins in the stream.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Parameters of `agent.list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AgentListParams {
    /// This one only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// Those after the last of the answer before, which said that there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<ListedLast>,
}

/// Where a list of commands goes on: oldest first, and by id where two are as old.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ListedLast {
    /// When it was asked for.
    pub created_at: UnixMs,
    /// The command.
    pub command_id: CommandId,
}

impl ListedLast {
    /// Whether a command comes after it.
    pub fn is_before(&self, created_at: UnixMs, command_id: &CommandId) -> bool {
        (self.created_at, &self.command_id) < (created_at, command_id)
    }
}

impl From<&CommandInfo> for ListedLast {
    fn from(info: &CommandInfo) -> Self {
        Self {
            created_at: info.created_at,
            command_id: info.command_id.clone(),
        }
    }
}

/// Answer to `agent.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentListResult {
    /// The commands, oldest first: as many as fit into one message.
    pub items: Vec<CommandInfo>,
    /// There are more.
    #[serde(default, skip_serializing_if = "is_default")]
    pub more: bool,
}

/// Parameters of `agent.input`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentInputParams {
    /// The command.
    pub command_id: CommandId,
    /// Its terminal's new size; first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// What to write; then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// Whether to close the input; last.
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
    /// Where to begin.
    #[serde(default)]
    pub from: ReadFrom,
    /// What `from` counts. Nothing is sent for [`View::None`].
    #[serde(default)]
    pub view: View,
    /// When to stop before the end. Bytes are for the reader to count.
    #[serde(default, skip_serializing_if = "is_default")]
    pub until: Until,
    /// Read it alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<Exclusive>,
    /// The terminal of a held command, which otherwise has what it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// The slot that output may go to. Without one, all of it comes in messages.
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
    /// The signal, without `SIG`.
    #[serde(default = "kill_signal")]
    pub signal: String,
    /// Kill what is left of its tree after so long.
    #[serde(default)]
    pub grace_ms: u64,
    /// Forget it, once it has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forget: bool,
}

/// Answer to `agent.kill`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentKillResult {
    /// How it ended; absent if the signal did not end it and no grace was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// It had ended before; nothing was signalled.
    pub already: bool,
    /// All there is to know of it; not of an `exec`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<Box<CommandInfo>>,
}
