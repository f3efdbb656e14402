//! Reading a command's output: from where, as what, until when, and the pieces that come.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use crate::blob::Blob;
use crate::model::{CommandInfo, PerStream};
use crate::quoted::Quoted;
use crate::time::UnixMs;

/// How output is read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AttachOptions {
    /// What chunks hold.
    pub view: View,
    /// When to stop before the command's end.
    pub until: Until,
}

/// What chunks hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// Text; what is no UTF-8 is replaced, the same way for every reader. Offsets count bytes of the
    /// text.
    #[default]
    Text,
    /// Bytes as they were written.
    Bytes,
    /// Nothing: only wait.
    None,
}

/// When a reader stops before the command's end: at whatever comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Until {
    /// After so long; 0 reads what is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
    /// After so long without output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_ms: Option<u64>,
    /// After so many bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Where reading begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReadFrom {
    /// At these offsets of each stream.
    Offsets(PerStream),
    /// At this position over both streams.
    Pos(u64),
    /// So many bytes before the end.
    Tail(u64),
}

impl Default for ReadFrom {
    fn default() -> Self {
        Self::Offsets(PerStream::default())
    }
}

/// How reading ended, and where to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReadEnd {
    /// Why.
    pub why: ReadWhy,
    /// The offsets to go on from.
    pub next: PerStream,
    /// The position to go on from.
    pub pos: u64,
    /// Bytes that were gone before they could be read.
    #[serde(default)]
    pub dropped: PerStream,
}

/// Why reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReadWhy {
    /// The command ended, and everything was read.
    Exit,
    /// `until.ms`.
    Time,
    /// `until.silence_ms`.
    Silence,
    /// `until.bytes`.
    Bytes,
    /// Another reader took over.
    Taken,
}

/// Which stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StreamName {
    /// Standard output, and both if they are merged.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of a command's life as it is streamed: an object with one member, named after the kind.
/// At most [`MAX_CHUNK_BYTES`](crate::MAX_CHUNK_BYTES) of output each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandChunk {
    /// It runs, or waits for its turn. First, and only where the call began it.
    Started(Box<CommandInfo>),
    /// Output as text.
    #[serde(serialize_with = "quickly")]
    Text(OutputPiece<String>),
    /// Output as bytes.
    Bytes(OutputPiece<Blob>),
    /// Output that is gone: never hidden.
    Gap(OutputGap),
    /// Something a run in Python or JavaScript shows, by media type: the value of its last expression, and
    /// whatever it calls `display` with. Told after all output, to every reader that comes to the end.
    Display(BTreeMap<String, String>),
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "OutputPiece_{T}"))]
pub struct OutputPiece<T> {
    /// Of this stream.
    pub stream: StreamName,
    /// Where it begins in the stream.
    pub offset: u64,
    /// Where it begins over both streams.
    pub pos: u64,
    /// When it was written.
    pub at: UnixMs,
    /// The output.
    pub data: T,
}

/// The same JSON, in less time.
fn quickly<S: Serializer>(piece: &OutputPiece<String>, serializer: S) -> Result<S::Ok, S::Error> {
    if !serializer.is_human_readable() {
        return piece.serialize(serializer);
    }
    let quoted = OutputPiece {
        stream: piece.stream,
        offset: piece.offset,
        pos: piece.pos,
        at: piece.at,
        data: Quoted::text(&piece.data),
    };
    quoted.serialize(serializer)
}

/// Output that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OutputGap {
    /// Of this stream.
    pub stream: StreamName,
    /// Where it began in the stream.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}
