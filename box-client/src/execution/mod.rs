//! A run as a list of output messages: from a command, or from OpenSandbox's event stream.

mod opensandbox_events;

use std::time::Duration;

use box_protocol::actions::{Displayed, StreamName};
use box_protocol::{PerStream, RunError, UnixMs};
use futures::StreamExt as _;

use crate::chunk::{Chunk, of};
use crate::command::CommandHandle;
use crate::error::ClientError;

pub use opensandbox_events::{ExecutionReader, MAX_EVENT_BYTES};

/// A piece of output with its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The output.
    pub text: String,
    /// When the output was written.
    pub at: UnixMs,
}

/// A run: its output piece by piece, displayed values, and exit code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Execution {
    /// The id of the run.
    pub id: Option<String>,
    /// Standard output.
    pub stdout: Vec<Message>,
    /// Standard error.
    pub stderr: Vec<Message>,
    /// Values that an interpreter displayed.
    pub results: Vec<Displayed>,
    /// The error that the run reported.
    pub error: Option<RunError>,
    /// Run time; `None` until the run is complete.
    pub took: Option<Duration>,
    /// The exit code as a shell shows it; `None` after a timeout or if the exit was not observed.
    pub exit_code: Option<i32>,
    /// Why the exit was not observed.
    pub cut: Option<ClientError>,
    /// Number of bytes that are missing in `stdout` and `stderr`.
    pub dropped: PerStream,
    /// Number of displayed values that are missing in `results`.
    pub dropped_results: u64,
}

/// The limits of a collected run: bytes of each stream and of displayed values.
#[derive(Debug)]
struct Limits {
    bound: u64,
    used: PerStream,
    results: u64,
}

impl Limits {
    fn new(bound: usize) -> Self {
        Self {
            bound: bound as u64,
            used: PerStream::default(),
            results: 0,
        }
    }

    /// Reserves `size` bytes if they fit.
    fn reserve(bound: u64, used: &mut u64, size: usize) -> bool {
        let more = used.saturating_add(size as u64);
        let fits = more <= bound;
        if fits {
            *used = more;
        }
        fits
    }
}

impl Execution {
    /// Collects the remaining output of a command. `cut` is set if its exit is not observed.
    pub async fn of(command: &mut CommandHandle) -> Self {
        let mut execution = Self {
            id: Some(command.id().to_string()),
            ..Self::default()
        };
        let mut limits = Limits::new(command.capture_limit());
        while let Some(chunk) = command.next().await {
            match chunk {
                Ok(chunk) => execution.add(chunk, &mut limits),
                Err(error) => {
                    execution.cut = Some(error);
                    return execution;
                }
            }
        }
        match command.exit().await {
            Ok(exit) => execution.exit_code = exit.shell_code(),
            Err(error) => execution.cut = Some(error),
        }
        if let Some(info) = command.info() {
            let begun = info.started_at.unwrap_or(info.created_at);
            execution.took = info.ended_at.map(|ended| ended.since(begun));
            execution.error = info.error;
        }
        execution
    }

    fn add(&mut self, chunk: Chunk, limits: &mut Limits) {
        match chunk {
            Chunk::Output {
                stream, data, at, ..
            } => {
                let text = String::from_utf8_lossy(&data).into_owned();
                self.add_message(limits, stream, Message { text, at });
            }
            Chunk::Gap { stream, bytes, .. } => *of(&mut self.dropped, stream) += bytes,
            Chunk::Display(shown) => self.add_result(limits, shown),
        }
    }

    /// Appends a message if it fits.
    fn add_message(&mut self, limits: &mut Limits, stream: StreamName, message: Message) {
        let size = message.text.len();
        // A message occupies at least its own struct.
        let piece = size.max(size_of::<Message>());
        if Limits::reserve(limits.bound, of(&mut limits.used, stream), piece) {
            self.messages(stream).push(message);
        } else {
            *of(&mut self.dropped, stream) += size as u64;
        }
    }

    /// Appends a displayed value if it fits.
    fn add_result(&mut self, limits: &mut Limits, shown: Displayed) {
        let size = shown.bytes() + size_of_val(&shown);
        if Limits::reserve(limits.bound, &mut limits.results, size) {
            self.results.push(shown);
        } else {
            self.dropped_results += 1;
        }
    }

    fn messages(&mut self, stream: StreamName) -> &mut Vec<Message> {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    /// Returns all of standard output.
    pub fn stdout_text(&self) -> String {
        self.stdout
            .iter()
            .map(|piece| piece.text.as_str())
            .collect()
    }

    /// Returns all of standard error.
    pub fn stderr_text(&self) -> String {
        self.stderr
            .iter()
            .map(|piece| piece.text.as_str())
            .collect()
    }

    /// Whether the exit code is zero.
    pub fn success(&self) -> bool {
        self.exit_code == Some(0)
    }
}
