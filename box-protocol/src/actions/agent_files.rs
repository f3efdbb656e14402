//! `agent.*` for files: the transfers of `file.*`, with their bytes in a shared memory slot.
//!
//! A transfer uses the whole slot, without the division into streams. The runtime puts bytes to
//! write at the start of the slot. The agent returns bytes it reads in pieces of up to
//! [`FILE_PIECE`]: piece `n` is at `n % FILE_PLACES * FILE_PIECE`, and [`FILE_PLACES`] later pieces
//! overwrite it. A reader that allows at most half of them in flight has time to copy each one.

use serde::{Deserialize, Serialize};

use super::{
    FileChunk, FilePackParams, FileReadParams, FileStatInfo, FileTreeResult, FileUnpackParams,
    FileWriteParams, SLOT_BYTES, actions,
};

actions! {
    /// `file.read` through a slot.
    AgentRead = "agent.read": AgentReadParams => FileStatInfo | AgentFileChunk;

    /// `file.pack` through a slot.
    AgentPack = "agent.pack": AgentPackParams => FileTreeResult | AgentFileChunk;

    /// `file.write` from a slot. The agent has copied the data when it answers any later call.
    AgentWrite = "agent.write": AgentWriteParams => FileStatInfo;

    /// `file.unpack` from a slot. The agent has copied the data when it answers any later call.
    AgentUnpack = "agent.unpack": AgentUnpackParams => FileTreeResult;
}

/// The maximum number of bytes of a file in one chunk from an agent.
pub const FILE_PIECE: u64 = 256 << 10;

/// Number of pieces that fit into a slot.
pub const FILE_PLACES: u64 = SLOT_BYTES / FILE_PIECE;

/// Parameters of `agent.read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentReadParams {
    /// The parameters of `file.read`.
    pub read: FileReadParams,
    /// The slot.
    pub slot: u32,
}

/// Parameters of `agent.pack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentPackParams {
    /// The parameters of `file.pack`.
    pub pack: FilePackParams,
    /// The slot.
    pub slot: u32,
}

/// Parameters of `agent.write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentWriteParams {
    /// The parameters of `file.write`, with empty `data`.
    pub write: FileWriteParams,
    /// The slot that contains the data.
    pub slot: u32,
    /// Number of bytes in the slot.
    pub bytes: u64,
}

/// Parameters of `agent.unpack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentUnpackParams {
    /// The parameters of `file.unpack`, with empty `data`.
    pub unpack: FileUnpackParams,
    /// The slot that contains the data.
    pub slot: u32,
    /// Number of bytes in the slot.
    pub bytes: u64,
}

/// A piece of a file or archive: an object with one member, named after its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentFileChunk {
    /// The bytes are in the message.
    Inline(FileChunk),
    /// The bytes are in the next piece of the slot.
    InSlot {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
}
