//! `agent.ends`: how a runtime hears of every command's end, also of those that came while there was none.

use serde::{Deserialize, Serialize};

use super::actions;
use crate::ids::CommandId;
use crate::model::{Exit, PerStream, Role};
use crate::time::UnixMs;

actions! {
    /// Tells of the ends of commands that nobody has heard of, oldest first, and waits for one if there is none. Those of an
    /// `exec` are in its answer, and come here only if nobody waited for that.
    AgentEnds = "agent.ends": AgentEndsParams => AgentEndsResult;
}

/// Parameters of `agent.ends`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AgentEndsParams {
    /// Those before this number have been heard of, and need not be kept.
    pub heard: u64,
}

/// Answer to `agent.ends`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentEndsResult {
    /// The number of the first. Those between the last that was heard of and this one could not be kept.
    pub first: u64,
    /// At least one, as many as go into an answer.
    pub ends: Vec<AgentEnd>,
}

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentEnd {
    /// The command.
    pub command_id: CommandId,
    /// What it was for.
    pub role: Role,
    /// How it ended.
    pub exit: Exit,
    /// When.
    pub at: UnixMs,
    /// How long it has run.
    pub duration_ms: u64,
    /// Bytes it has written.
    pub size: PerStream,
}
