//! `agent.ends`: reports the exit of every command to the runtime, also those that happened while
//! no runtime was connected.

use serde::{Deserialize, Serialize};

use super::actions;
use crate::ids::CommandId;
use crate::model::{Exit, PerStream, Role};
use crate::time::UnixMs;

actions! {
    /// Returns unacknowledged exits, oldest first, and waits for one if necessary. The exit of an
    /// `exec` is in its own result and appears here only if its caller disconnected.
    AgentEnds = "agent.ends": AgentEndsParams => AgentEndsResult;
}

/// Parameters of `agent.ends`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AgentEndsParams {
    /// Acknowledges all exits before this number; the agent may discard them.
    pub acknowledged: u64,
}

/// Result of `agent.ends`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentEndsResult {
    /// Number of the first exit. The agent discarded any exits between the last acknowledged one
    /// and this one.
    pub first: u64,
    /// The exits: at least one, and as many as fit into one message.
    pub ends: Vec<AgentEnd>,
}

/// The exit of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentEnd {
    /// The command.
    pub command_id: CommandId,
    /// The role of the command.
    pub role: Role,
    /// The exit status.
    pub exit: Exit,
    /// When the command exited.
    pub at: UnixMs,
    /// Run time in milliseconds.
    pub duration_ms: u64,
    /// Number of bytes written.
    pub size: PerStream,
}
