//! Output of a command, chunk by chunk and as a whole.

use std::borrow::Cow;
use std::collections::BTreeMap;

use box_protocol::actions::{CommandChunk, StreamName};
use box_protocol::{Exit, PerStream, UnixMs};
use bytes::Bytes;

/// Byte offsets in both streams.
pub type Offsets = PerStream;

/// A chunk of a command stream, in the order received.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Chunk {
    /// Output.
    Output {
        /// The stream.
        stream: StreamName,
        /// Offset of the first byte in the stream.
        offset: u64,
        /// When the output was written.
        at: UnixMs,
        /// The output: UTF-8, unless the client requested bytes.
        data: Bytes,
    },
    /// Output that the server has dropped.
    Gap {
        /// The stream.
        stream: StreamName,
        /// Offset of the first missing byte in the stream.
        offset: u64,
        /// Number of missing bytes.
        bytes: u64,
    },
    /// A value that an interpreter displayed, by media type.
    Display(BTreeMap<String, String>),
}

impl Chunk {
    /// Returns the output as text; empty for other chunks.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Output { data, .. } => String::from_utf8_lossy(data),
            Self::Gap { .. } | Self::Display(_) => Cow::Borrowed(""),
        }
    }

    /// Returns the stream; `None` for displayed values.
    pub fn stream(&self) -> Option<StreamName> {
        match self {
            Self::Output { stream, .. } | Self::Gap { stream, .. } => Some(*stream),
            Self::Display(_) => None,
        }
    }

    /// Converts a chunk of the contract; `None` for `started`.
    pub fn from_wire(chunk: CommandChunk) -> Option<Self> {
        Some(match chunk {
            CommandChunk::Started(_) => return None,
            CommandChunk::Text(piece) => Self::Output {
                stream: piece.stream,
                offset: piece.offset,
                at: piece.at,
                data: piece.data.into(),
            },
            CommandChunk::Bytes(piece) => Self::Output {
                stream: piece.stream,
                offset: piece.offset,
                at: piece.at,
                data: piece.data.0,
            },
            CommandChunk::Gap(gap) => Self::Gap {
                stream: gap.stream,
                offset: gap.offset,
                bytes: gap.bytes,
            },
            CommandChunk::Display(shown) => Self::Display(shown),
        })
    }

    /// Returns the stream and the offset after this chunk.
    pub(crate) fn end(&self) -> Option<(StreamName, u64)> {
        match self {
            Self::Output {
                stream,
                offset,
                data,
                ..
            } => Some((*stream, offset.saturating_add(data.len() as u64))),
            Self::Gap {
                stream,
                offset,
                bytes,
            } => Some((*stream, offset.saturating_add(*bytes))),
            Self::Display(_) => None,
        }
    }
}

/// Returns the offset of one stream.
pub(crate) fn of(offsets: &mut Offsets, stream: StreamName) -> &mut u64 {
    match stream {
        StreamName::Stdout => &mut offsets.stdout,
        StreamName::Stderr => &mut offsets.stderr,
    }
}

/// All that a command said, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// How it ended.
    pub exit: Exit,
    /// Standard output, or both streams if they were merged.
    pub stdout: Bytes,
    /// Standard error.
    pub stderr: Bytes,
    /// Bytes that are missing above: gone before they could be read, or more than was to be kept.
    pub dropped: PerStream,
}

impl Output {
    /// It returned zero.
    pub fn success(&self) -> bool {
        self.exit.code == Some(0)
    }

    /// The number a shell would show; none after a timeout.
    pub fn exit_code(&self) -> Option<i32> {
        self.exit.shell_code()
    }

    /// Standard output as text.
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// Standard error as text.
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }
}

/// Output so far, up to a bound for each stream.
#[derive(Debug)]
pub(crate) struct Kept {
    bound: usize,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    dropped: PerStream,
}

impl Kept {
    pub(crate) fn new(bound: usize) -> Self {
        Self {
            bound,
            stdout: Vec::new(),
            stderr: Vec::new(),
            dropped: PerStream::default(),
        }
    }

    pub(crate) fn add(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Output { stream, data, .. } => {
                let kept = match stream {
                    StreamName::Stdout => &mut self.stdout,
                    StreamName::Stderr => &mut self.stderr,
                };
                let room = self.bound.saturating_sub(kept.len()).min(data.len());
                kept.extend_from_slice(&data[..room]);
                *of(&mut self.dropped, *stream) += (data.len() - room) as u64;
            }
            Chunk::Gap { stream, bytes, .. } => *of(&mut self.dropped, *stream) += bytes,
            Chunk::Display(_) => {}
        }
    }

    pub(crate) fn output(&self, exit: Exit) -> Output {
        Output {
            exit,
            stdout: Bytes::copy_from_slice(&self.stdout),
            stderr: Bytes::copy_from_slice(&self.stderr),
            dropped: self.dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(text: &'static str) -> Chunk {
        Chunk::Output {
            stream: StreamName::Stdout,
            offset: 0,
            at: UnixMs(0),
            data: Bytes::from_static(text.as_bytes()),
        }
    }

    #[test]
    fn what_is_not_kept_is_counted() {
        let mut kept = Kept::new(4);
        kept.add(&piece("abc"));
        kept.add(&piece("def"));
        kept.add(&Chunk::Gap {
            stream: StreamName::Stderr,
            offset: 0,
            bytes: 7,
        });
        let output = kept.output(Exit::returned(0));
        assert_eq!(output.stdout_text(), "abcd");
        let dropped = PerStream {
            stdout: 2,
            stderr: 7,
        };
        assert_eq!(output.dropped, dropped);
    }

    #[test]
    fn success_is_the_code_zero_alone() {
        let output = |exit| Kept::new(0).output(exit);
        assert!(output(Exit::returned(0)).success());
        assert!(!output(Exit::returned(1)).success());
        let killed = output(Exit::by_signal(9, box_protocol::ExitWhy::Killed));
        assert_eq!((killed.success(), killed.exit_code()), (false, Some(137)));
    }
}
