//! Reading the output of a command: where to start, in which form, when to stop, and the chunks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use super::is_default;
use crate::blob::Blob;
use crate::json_string::JsonString;
use crate::model::{CommandInfo, PerStream};
use crate::time::UnixMs;

/// How a call streams the output of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AttachOptions {
    /// How chunks carry the output; `text` if absent.
    pub view: View,
    /// When to stop before the exit of the command; never if absent.
    pub until: Until,
}

/// How chunks carry output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// Text. Invalid UTF-8 is replaced by U+FFFD, identically for every reader. Offsets count bytes
    /// of the text.
    #[default]
    Text,
    /// The bytes as written.
    Bytes,
    /// No output; the call only waits.
    None,
}

/// When a reader stops before the exit of the command; the first condition that is met counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Until {
    /// After this many milliseconds; 0 reads only what the log holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
    /// After this many milliseconds without output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_ms: Option<u64>,
    /// After this many bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Where reading starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReadFrom {
    /// At these byte offsets of the two streams.
    Offsets(PerStream),
    /// At this position in the combined output of both streams.
    Pos(u64),
    /// This many bytes before the end.
    Tail(u64),
}

impl Default for ReadFrom {
    fn default() -> Self {
        Self::Offsets(PerStream::default())
    }
}

/// How reading ended, and where to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReadEnd {
    /// Why reading ended.
    pub why: ReadWhy,
    /// The offsets to resume from.
    pub next: PerStream,
    /// The position in the combined output to resume from.
    pub pos: u64,
    /// Number of bytes that the log dropped before they were read.
    #[serde(default)]
    pub dropped: PerStream,
}

/// Why reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReadWhy {
    /// The command exited, and all output was read.
    Exit,
    /// `until.ms` was reached.
    Time,
    /// `until.silence_ms` was reached.
    Silence,
    /// `until.bytes` was reached.
    Bytes,
    /// Another exclusive reader took over.
    Taken,
}

/// An output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StreamName {
    /// Standard output, or both streams if they are merged.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A chunk of a command stream: an object with one member, named after its kind. A chunk carries at
/// most [`MAX_CHUNK_BYTES`](crate::MAX_CHUNK_BYTES) of output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandChunk {
    /// The command runs or is queued. Always the first chunk, and only of a call that started the
    /// command.
    Started(Box<CommandInfo>),
    /// Output as text.
    #[serde(serialize_with = "serialize_text")]
    Text(OutputPiece<String>),
    /// Output as bytes.
    Bytes(OutputPiece<Blob>),
    /// Output that the log has dropped.
    Gap(OutputGap),
    /// A value that a Python or JavaScript run displayed. Sent after all output, to every reader
    /// that reaches the end.
    Display(Displayed),
}

/// A value that a run displayed: of its last expression, of `display`, or an open figure.
///
/// The values of a run have at most 10 MiB as JSON. A value beyond says which of its formats are omitted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Displayed {
    /// The value by media type. Binary data is base64.
    pub data: BTreeMap<String, String>,
    /// Whether this is the value of the last expression; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub main: bool,
}

impl Displayed {
    /// Returns the size of the value in bytes.
    pub fn bytes(&self) -> usize {
        let members = self.data.iter();
        members.map(|(kind, data)| kind.len() + data.len()).sum()
    }
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "OutputPiece_{T}"))]
pub struct OutputPiece<T> {
    /// The stream.
    pub stream: StreamName,
    /// Offset of the first byte in the stream.
    pub offset: u64,
    /// Position of the first byte in the combined output of both streams.
    pub pos: u64,
    /// When the output was written.
    pub at: UnixMs,
    /// The output.
    pub data: T,
}

/// Writes the same JSON as the derived implementation, faster.
fn serialize_text<S: Serializer>(
    piece: &OutputPiece<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    if !serializer.is_human_readable() {
        return piece.serialize(serializer);
    }
    let piece = OutputPiece {
        stream: piece.stream,
        offset: piece.offset,
        pos: piece.pos,
        at: piece.at,
        data: JsonString::text(&piece.data),
    };
    piece.serialize(serializer)
}

/// Output that the log has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OutputGap {
    /// The stream.
    pub stream: StreamName,
    /// Offset of the first missing byte in the stream.
    pub offset: u64,
    /// Number of missing bytes.
    pub bytes: u64,
}
