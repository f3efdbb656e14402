//! Output of a command, chunk by chunk and as a whole.

use std::borrow::Cow;
use std::time::Duration;

use box_protocol::actions::{CommandChunk, Displayed, ReadWhy, StreamName};
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
    /// A value that an interpreter displayed.
    Display(Displayed),
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
            CommandChunk::Display(values) => Self::Display(values),
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

/// The output and exit status of an exec, a command, or a run in a shell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// The id of the command; `None` for an exec.
    pub id: Option<CommandId>,
    /// The exit status. Only a run in a shell may have none; `cut` is then the reason.
    pub exit: Option<Exit>,
    /// Standard output, or both streams if they were merged.
    pub stdout: Bytes,
    /// Standard error.
    pub stderr: Bytes,
    /// Number of missing bytes: dropped by the server, or beyond the capture limit.
    pub dropped: PerStream,
    /// Whether output is missing: dropped, or truncated by the policy of the server.
    pub truncated: bool,
    /// Values that an interpreter displayed.
    pub displayed: Vec<Displayed>,
    /// The error that an interpreter reported.
    pub error: Option<RunError>,
    /// Run time, if known.
    pub took: Option<Duration>,
    /// Fields of the request that the profile of the server changed.
    pub adjusted: Vec<Adjusted>,
    /// Why the exit was not observed.
    pub cut: Option<ClientError>,
    /// The shell that executed the run, if it is not the requested one.
    pub replaced: Option<Replaced>,
}

impl Output {
    /// Whether the exit code is zero.
    pub fn success(&self) -> bool {
        self.exit.is_some_and(|exit| exit.code == Some(0))
    }

    /// Returns the exit code as a shell shows it; `None` after a timeout or if the exit was not
    /// observed.
    pub fn exit_code(&self) -> Option<i32> {
        self.exit.and_then(|exit| exit.shell_code())
    }

    /// Returns standard output as text.
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// Returns standard error as text.
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }

    /// Whether the run produced no output within the silence limit of its shell.
    ///
    /// The run continues in the box, and a client can attach to it by its id.
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

/// Captured output, up to a limit for each stream and for displayed values.
#[derive(Debug)]
pub(crate) struct Capture {
    limit: usize,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    dropped: PerStream,
    displayed: Vec<Displayed>,
    displayed_bytes: usize,
    displays_dropped: bool,
}

impl Capture {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
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
                let captured = match stream {
                    StreamName::Stdout => &mut self.stdout,
                    StreamName::Stderr => &mut self.stderr,
                };
                let count = self.limit.saturating_sub(captured.len()).min(data.len());
                captured.extend_from_slice(&data[..count]);
                *of(&mut self.dropped, *stream) += (data.len() - count) as u64;
            }
            Chunk::Gap { stream, bytes, .. } => *of(&mut self.dropped, *stream) += bytes,
            Chunk::Display(values) => self.display(values),
        }
    }

    fn display(&mut self, values: &Displayed) {
        let size = values.bytes() + size_of_val(values);
        let bytes = self.displayed_bytes.saturating_add(size);
        if bytes <= self.limit {
            self.displayed_bytes = bytes;
            self.displayed.push(values.clone());
        } else {
            self.displays_dropped = true;
        }
    }

    /// Returns the captured output, without an exit status.
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
    fn bytes_beyond_the_limit_are_counted() {
        let mut capture = Capture::new(4);
        capture.add(&piece("abc"));
        capture.add(&piece("def"));
        capture.add(&Chunk::Gap {
            stream: StreamName::Stderr,
            offset: 0,
            bytes: 7,
        });
        let output = capture.output();
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
        let id = box_protocol::BoxId::new("s").unwrap();
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
