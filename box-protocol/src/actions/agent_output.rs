//! The output of a command, as an agent sends it: parameters, chunks and shared memory.
//!
//! # Shared memory slots
//!
//! Output of more than a few kilobytes does not travel in messages. A runtime on the same machine
//! gives an agent [`SLOTS`] *slots*: shared memory of [`SLOT_BYTES`] each, with one ring
//! buffer of [`SLOT_RING`] per stream, stdout first. Byte `n` of a stream is at `n % SLOT_RING`
//! of its ring, so a message only carries offset and length. A slot serves one call at a time; the
//! runtime assigns it.

use serde::{Deserialize, Serialize};

use super::{Exclusive, OutputPiece, ReadFrom, StreamName, TerminalSize, Until, View, is_default};
use crate::blob::Blob;
use crate::ids::CommandId;
use crate::model::{CommandInfo, PerStream};
use crate::time::UnixMs;

/// Size of the ring buffer of one stream in a slot, in bytes.
///
/// Larger than the output that can be in flight to a reader.
pub const SLOT_RING: u64 = 1 << 20;

/// Size of a slot in bytes.
pub const SLOT_BYTES: u64 = 2 * SLOT_RING;

/// Number of slots of an agent.
pub const SLOTS: u32 = 8;

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
    InSlot(SlotPiece),
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
pub struct SlotPiece {
    /// When the output was written.
    pub at: UnixMs,
    /// The stream.
    pub stream: StreamName,
    /// Offset of the first byte in the stream.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
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
    pub slot: Option<u32>,
}
