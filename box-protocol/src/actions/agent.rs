//! `agent.*`: calls from a runtime to the agent inside a box. A host cannot call them.
//!
//! The agent starts processes, keeps their output and reports their exit; it makes no policy
//! decisions. The agent runs beside the guest, therefore the runtime does not trust its answers.

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::commands::kill_signal;
use super::{
    AgentChunk, AgentCommand, AgentOutputParams, AgentStartParams, CommandInputResult, GuestInfo,
    TerminalSize, actions, is_default,
};
use crate::blob::Blob;
use crate::env::Env;
use crate::ids::CommandId;
use crate::model::{CommandInfo, Exit};
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
    /// Number of commands that have not ended, running or not.
    #[serde(default, skip_serializing_if = "is_default")]
    pub open: u64,
    /// Number of unacknowledged exits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unacknowledged: u64,
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
    /// Time in milliseconds that the command has to read `data`; as long as it runs if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
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
