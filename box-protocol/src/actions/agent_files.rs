//! `agent.*` on files: what `file.*` moves, with its bytes in a spool slot instead of in the message.
//!
//! All of the slot is used, streams or not. What is written is at its begin. What is read comes in pieces of up to
//! [`FILE_PIECE`] bytes, the `n`th of them at `n % FILE_PLACES * FILE_PIECE`, where it stays until [`FILE_PLACES`] more have
//! come; so a reader that lets no more than half of them come ahead has time to take each.

use serde::{Deserialize, Serialize};

use super::agent::SPOOL_BYTES;
use super::{
    FileChunk, FilePackParams, FileReadParams, FileStatInfo, FileTreeResult, FileUnpackParams,
    FileWriteParams, actions,
};

actions! {
    /// `file.read`, through a slot.
    AgentRead = "agent.read": AgentReadParams => FileStatInfo | AgentFileChunk;

    /// `file.pack`, through a slot.
    AgentPack = "agent.pack": AgentPackParams => FileTreeResult | AgentFileChunk;

    /// `file.write` of what is in a slot. It has been taken from there when anything that was asked later is answered.
    AgentWrite = "agent.write": AgentWriteParams => FileStatInfo;

    /// `file.unpack` of what is in a slot, the same way.
    AgentUnpack = "agent.unpack": AgentUnpackParams => FileTreeResult;
}

/// The most bytes of a file that one chunk of an agent tells of.
pub const FILE_PIECE: u64 = 256 << 10;

/// Places for such pieces in a slot.
pub const FILE_PLACES: u64 = SPOOL_BYTES / FILE_PIECE;

/// Parameters of `agent.read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentReadParams {
    /// What to read.
    pub read: FileReadParams,
    /// The slot.
    pub spool: u32,
}

/// Parameters of `agent.pack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentPackParams {
    /// What to pack.
    pub pack: FilePackParams,
    /// The slot.
    pub spool: u32,
}

/// Parameters of `agent.write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentWriteParams {
    /// What to write; its `data` is empty.
    pub write: FileWriteParams,
    /// The slot that the data is in.
    pub spool: u32,
    /// How much of it there is.
    pub bytes: u64,
}

/// Parameters of `agent.unpack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentUnpackParams {
    /// What to unpack; its `data` is empty.
    pub unpack: FileUnpackParams,
    /// The slot that the data is in.
    pub spool: u32,
    /// How much of it there is.
    pub bytes: u64,
}

/// A piece of a file or an archive: an object with one member, named after the kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentFileChunk {
    /// In the message.
    Inline(FileChunk),
    /// In the next place of the slot.
    Spooled {
        /// Where it begins.
        offset: u64,
        /// How many bytes.
        bytes: u64,
    },
}
