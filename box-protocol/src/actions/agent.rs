//! `agent.*`: what a runtime asks of the agent inside a box. Never served to a host.
//!
//! The agent starts processes, keeps their output and tells their end; it decides nothing. It lives
//! with the guest, so the runtime trusts nothing it says.
//!
//! # Spool slots
//! Output that is more than a few kilobytes does not travel in messages. A runtime on the same machine
//! hands an agent *slots*: shared memory of [`SPOOL_BYTES`], one ring of [`SPOOL_RING`] for each stream,
//! standard output's first. Byte `n` of a stream is at `n % SPOOL_RING` of its ring, so a message says
//! offset and length, and nothing else has to be agreed on. A slot serves one command at a time.

use serde::{Deserialize, Serialize};

use super::commands::kill_signal;
use super::{
    OutputGap, OutputMode, OutputPiece, Stdin, StreamName, TerminalSize, actions, is_default,
};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::CommandId;
use crate::model::{Exit, PerStream, Program};

actions! {
    /// Whether the agent lives, and what it runs; tells it the environment of the box. Always allowed;
    /// the first thing it is asked.
    AgentHealth = "agent.health": AgentHealthParams => AgentHealthResult;

    /// Starts a process. `conflict` (the id runs already), `validation` (no such program or working
    /// directory), `denied` (user not mapped), `capacity`. A call that stays open until the end owns
    /// the process: dropping it kills the tree. One that answers at once leaves it to `agent.kill`.
    AgentStart = "agent.start": AgentStartParams => AgentCommand | AgentChunk;

    /// Streams a command's output from an offset on, and ends with its end; dropping the call ends
    /// nothing else. `not_found`.
    AgentOutput = "agent.output": AgentOutputParams => AgentCommand | AgentChunk;

    /// Waits for a command's end without reading; dropping the call ends nothing else. `not_found`.
    AgentWait = "agent.wait": AgentCommandKey => AgentCommand;

    /// Signals a command and, after the grace, kills its whole tree; answered when the tree is gone.
    /// `not_found`.
    AgentKill = "agent.kill": AgentKillParams => AgentKillResult;
}

/// Bytes of a slot for each stream. More than what the chunks ahead of a reader can hold.
pub const SPOOL_RING: u64 = 1 << 20;

/// Bytes of a slot.
pub const SPOOL_BYTES: u64 = 2 * SPOOL_RING;

/// Parameters of `agent.health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentHealthParams {
    /// What every command of the box finds in its environment, said once instead of with each of
    /// them. Absent, it stays as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Env>,
}

/// Answer to `agent.health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHealthResult {
    /// The version of `agent.*` it speaks.
    pub contract: u32,
    /// Commands that run.
    pub running: Vec<CommandId>,
}

/// When `agent.start` answers, and how the output comes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// At the end, with the output as chunks before it.
    Streamed,
}

/// Parameters of `agent.start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentStartParams {
    /// The command.
    pub command_id: CommandId,
    /// What to run.
    pub program: Program,
    /// Variables beside those of the box, over which they win. Nothing else is added.
    #[serde(default, skip_serializing_if = "is_default")]
    pub env: Env,
    /// Where.
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
    /// How much of its output is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// When to answer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reply: AgentReply,
    /// The slot that its output may go to. Without one, all of it comes in messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool: Option<u32>,
}

/// A command as its agent tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

/// The first of a command's output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentChunk {
    /// The process runs. First, and only from `agent.start`.
    Started {
        /// Its process, as the box numbers it.
        pid: u32,
    },
    /// Output.
    Bytes(OutputPiece<Blob>),
    /// Output that is in the command's slot, never over the end of its ring.
    Spooled(SpooledPiece),
    /// Output that is gone.
    Gap(OutputGap),
}

/// A piece of output in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpooledPiece {
    /// Of this stream.
    pub stream: StreamName,
    /// Where it begins in the stream.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// One command of the agent's box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCommandKey {
    /// The command.
    pub command_id: CommandId,
}

/// Parameters of `agent.output`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentOutputParams {
    /// The command.
    pub command_id: CommandId,
    /// The offsets to begin at.
    #[serde(default)]
    pub from: PerStream,
}

/// Parameters of `agent.kill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

/// Answer to `agent.kill`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentKillResult {
    /// How it ended; absent if the signal did not end it and no grace was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// It had ended before; nothing was signalled.
    pub already: bool,
}
