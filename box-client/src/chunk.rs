//! Output of a command, chunk by chunk and as a whole.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::actions::{CommandChunk, ReadWhy, StreamName};
use box_protocol::{
    Adjusted, BoxExecutionResult, CommandId, ExecutionStatus, Exit, ExitWhy, PerStream, RunError,
    UnixMs,
};
use bytes::Bytes;

use crate::error::ClientError;
use crate::shell::Replaced;

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

/// What a command printed, and how it ended: the result of an exec, of a command and of a run in a shell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// The id of the command. An exec has none.
    pub id: Option<CommandId>,
    /// How it ended. Only a run in a shell may have none; `cut` then says why its end was not seen.
    pub exit: Option<Exit>,
    /// Standard output, or both streams if they were merged.
    pub stdout: Bytes,
    /// Standard error.
    pub stderr: Bytes,
    /// Bytes that are missing above: gone before they could be read, or more than was to be kept.
    pub dropped: PerStream,
    /// Whether output is missing: dropped, or cut by the policy of the server.
    pub truncated: bool,
    /// What an interpreter displayed, by media type.
    pub displayed: Vec<BTreeMap<String, String>>,
    /// The error that an interpreter reported.
    pub error: Option<RunError>,
    /// How long it ran, if that is known.
    pub took: Option<Duration>,
    /// What the server's profile changed of the request.
    pub adjusted: Vec<Adjusted>,
    /// Why the end was not seen.
    pub cut: Option<ClientError>,
    /// The shell that ran it, if that is not the one it was asked of.
    pub replaced: Option<Replaced>,
}

impl Output {
    /// Whether it returned zero.
    pub fn success(&self) -> bool {
        self.exit.is_some_and(|exit| exit.code == Some(0))
    }

    /// The number a shell would show; none after a timeout, or if the end was not seen.
    pub fn exit_code(&self) -> Option<i32> {
        self.exit.and_then(|exit| exit.shell_code())
    }

    /// Standard output as text.
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// Standard error as text.
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }

    /// Whether it printed nothing for longer than the silence limit of its shell. It goes on in the box, and can be
    /// read on by its id.
    pub fn is_silent(&self) -> bool {
        self.cut == Some(ClientError::NoExit(Some(ReadWhy::Silence)))
    }
}

impl From<BoxExecutionResult> for Output {
    fn from(result: BoxExecutionResult) -> Self {
        let dropped = PerStream {
            stdout: result.stdout_dropped,
            stderr: result.stderr_dropped,
        };
        let why = match (result.status, result.oom) {
            (ExecutionStatus::TimedOut, _) => ExitWhy::Timeout,
            (ExecutionStatus::Completed, true) => ExitWhy::Oom,
            (ExecutionStatus::Completed, false) if result.signal.is_some() => ExitWhy::Signal,
            (ExecutionStatus::Completed, false) => ExitWhy::Exit,
        };
        let exit = Exit {
            code: result.exit_code.filter(|_| result.signal.is_none()),
            signal: result.signal,
            why,
        };
        Self {
            exit: Some(exit),
            truncated: result.stdout_truncated || result.stderr_truncated || dropped.sum() > 0,
            stdout: result.stdout.into(),
            stderr: result.stderr.into(),
            dropped,
            took: Some(Duration::from_millis(result.duration_ms)),
            adjusted: result.adjusted,
            ..Self::default()
        }
    }
}

/// Output so far, up to a bound for each stream and for what is displayed.
#[derive(Debug)]
pub(crate) struct Kept {
    bound: usize,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    dropped: PerStream,
    displayed: Vec<BTreeMap<String, String>>,
    displayed_bytes: usize,
    displays_dropped: bool,
}

impl Kept {
    pub(crate) fn new(bound: usize) -> Self {
        Self {
            bound,
            stdout: Vec::new(),
            stderr: Vec::new(),
            dropped: PerStream::default(),
            displayed: Vec::new(),
            displayed_bytes: 0,
            displays_dropped: false,
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
            Chunk::Display(shown) => self.display(shown),
        }
    }

    fn display(&mut self, shown: &BTreeMap<String, String>) {
        let sizes = shown.iter().map(|(kind, value)| kind.len() + value.len());
        let size = sizes.sum::<usize>() + size_of_val(shown);
        let bytes = self.displayed_bytes.saturating_add(size);
        if bytes <= self.bound {
            self.displayed_bytes = bytes;
            self.displayed.push(shown.clone());
        } else {
            self.displays_dropped = true;
        }
    }

    /// What was kept, without an end.
    pub(crate) fn output(&self) -> Output {
        Output {
            stdout: Bytes::copy_from_slice(&self.stdout),
            stderr: Bytes::copy_from_slice(&self.stderr),
            dropped: self.dropped,
            truncated: self.dropped.sum() > 0 || self.displays_dropped,
            displayed: self.displayed.clone(),
            ..Output::default()
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
        let output = kept.output();
        assert_eq!(output.stdout_text(), "abcd");
        let dropped = PerStream {
            stdout: 2,
            stderr: 7,
        };
        assert_eq!((output.dropped, output.truncated), (dropped, true));
    }

    #[test]
    fn success_is_the_code_zero_alone() {
        let output = |exit| Output {
            exit,
            ..Output::default()
        };
        assert!(output(Some(Exit::returned(0))).success());
        assert!(!output(Some(Exit::returned(1))).success());
        assert!(!output(None).success());
        let killed = output(Some(Exit::by_signal(9, ExitWhy::Killed)));
        assert_eq!((killed.success(), killed.exit_code()), (false, Some(137)));
    }

    #[test]
    fn the_result_of_an_exec_is_an_output_with_its_end() {
        let id = box_protocol::SessionId::new("s").unwrap();
        for exit in [
            Exit::returned(3),
            Exit::by_signal(11, ExitWhy::Signal),
            Exit::by_signal(9, ExitWhy::Oom),
        ] {
            let result = BoxExecutionResult::new(id.clone(), "fake", exit, 7).unwrap();
            let mut result = result.with_output("out", "err");
            result.stdout_truncated = true;
            let output = Output::from(result);
            assert_eq!(output.exit, Some(exit));
            assert_eq!(
                (&*output.stdout_text(), &*output.stderr_text()),
                ("out", "err")
            );
            assert_eq!(output.took, Some(Duration::from_millis(7)));
            assert!(output.truncated);
        }
        let late = Exit::by_signal(9, ExitWhy::Timeout);
        let late = Output::from(BoxExecutionResult::new(id, "fake", late, 7).unwrap());
        assert_eq!(late.exit.map(|exit| exit.why), Some(ExitWhy::Timeout));
        assert_eq!((late.exit_code(), late.truncated), (None, false));
    }
}
