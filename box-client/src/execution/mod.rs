//! A run, collected piece by piece: from a command of ours, or from OpenSandbox's event stream.

mod opensandbox_events;

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::actions::StreamName;
use box_protocol::{PerStream, RunError, UnixMs};
use futures::StreamExt as _;

use crate::chunk::{Chunk, of};
use crate::command::CommandHandle;
use crate::error::ClientError;

pub use opensandbox_events::{ExecutionReader, MAX_EVENT_BYTES};

/// A piece of output, and when it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The output.
    pub text: String,
    /// When it was written.
    pub at: UnixMs,
}

/// A run as it went: each piece of its output, what it showed, how it ended if that was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Execution {
    /// The run's id.
    pub id: Option<String>,
    /// Standard output.
    pub stdout: Vec<Message>,
    /// Standard error.
    pub stderr: Vec<Message>,
    /// What an interpreter showed, by media type.
    pub results: Vec<BTreeMap<String, String>>,
    /// What went wrong, if something did.
    pub error: Option<RunError>,
    /// How long it took, once it was told to be complete.
    pub took: Option<Duration>,
    /// The number it returned, as a shell would show it. None if the run was cut, or ended by a timeout.
    pub exit_code: Option<i32>,
    /// Why its end was not seen, if it was not.
    pub cut: Option<ClientError>,
    /// Bytes that are missing above.
    pub dropped: PerStream,
    /// Things shown that are missing above.
    pub dropped_results: u64,
}

/// How much of a run is kept: so much of each stream, and so much of what it shows.
#[derive(Debug)]
struct Room {
    bound: u64,
    used: PerStream,
    shown: u64,
}

impl Room {
    fn new(bound: usize) -> Self {
        Self {
            bound: bound as u64,
            used: PerStream::default(),
            shown: 0,
        }
    }

    /// Whether so much more fits.
    fn takes(bound: u64, used: &mut u64, size: usize) -> bool {
        let more = used.saturating_add(size as u64);
        let fits = more <= bound;
        if fits {
            *used = more;
        }
        fits
    }
}

impl Execution {
    /// Collects what is left of a command. That its end was not seen is told, never guessed.
    pub async fn of(command: &mut CommandHandle) -> Self {
        let mut execution = Self {
            id: Some(command.id().to_string()),
            ..Self::default()
        };
        let mut room = Room::new(command.kept_bytes());
        while let Some(chunk) = command.next().await {
            match chunk {
                Ok(chunk) => execution.add(chunk, &mut room),
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

    fn add(&mut self, chunk: Chunk, room: &mut Room) {
        match chunk {
            Chunk::Output {
                stream, data, at, ..
            } => {
                let text = String::from_utf8_lossy(&data).into_owned();
                self.say(room, stream, Message { text, at });
            }
            Chunk::Gap { stream, bytes, .. } => *of(&mut self.dropped, stream) += bytes,
            Chunk::Display(shown) => self.show(room, shown),
        }
    }

    /// Keeps what was said, if there is room.
    fn say(&mut self, room: &mut Room, stream: StreamName, message: Message) {
        let size = message.text.len();
        // One byte a piece costs more than a byte.
        let piece = size.max(size_of::<Message>());
        if Room::takes(room.bound, of(&mut room.used, stream), piece) {
            self.messages(stream).push(message);
        } else {
            *of(&mut self.dropped, stream) += size as u64;
        }
    }

    /// Keeps what was shown, if there is room.
    fn show(&mut self, room: &mut Room, shown: BTreeMap<String, String>) {
        let sizes = shown.iter().map(|(kind, value)| kind.len() + value.len());
        let size = sizes.sum::<usize>() + size_of_val(&shown);
        if Room::takes(room.bound, &mut room.shown, size) {
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

    /// All of standard output.
    pub fn stdout_text(&self) -> String {
        self.stdout
            .iter()
            .map(|piece| piece.text.as_str())
            .collect()
    }

    /// All of standard error.
    pub fn stderr_text(&self) -> String {
        self.stderr
            .iter()
            .map(|piece| piece.text.as_str())
            .collect()
    }

    /// It returned zero.
    pub fn success(&self) -> bool {
        self.exit_code == Some(0)
    }
}
