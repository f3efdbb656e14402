//! Commands: objects with an id, a log and an exit status.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::execution::Exit;
use crate::actions::StreamName;
use crate::ids::{BoxId, CommandId, ShellId};
use crate::invalid::Invalid;
use crate::note::Note;
use crate::time::UnixMs;

/// The program of a command: `{"text": …}` or `{"argv": […]}` on the wire, never both.
///
/// Created by [`text`](Self::text), [`argv`](Self::argv) or a decoder, which all apply the rules.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase", try_from = "Unchecked")]
pub enum Program {
    /// A text for the shell of the box.
    #[non_exhaustive]
    Text(String),
    /// A program with its arguments, which runs without a shell.
    #[non_exhaustive]
    Argv(Vec<String>),
}

#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum Unchecked {
    Text(
        #[cfg_attr(
            feature = "schema",
            schemars(regex(pattern = crate::schema::NOT_BLANK))
        )]
        String,
    ),
    Argv(
        #[cfg_attr(
            feature = "schema",
            schemars(
                length(min = 1),
                inner(regex(pattern = crate::schema::NO_NUL)),
                extend("prefixItems" = [
                    {"type": "string", "minLength": 1, "pattern": crate::schema::NO_NUL}
                ])
            )
        )]
        Vec<String>,
    ),
}

impl Program {
    /// A text for the shell of the box; `validation` if it is blank.
    pub fn text(text: impl Into<String>) -> Result<Self, Invalid> {
        let text = text.into();
        if text.trim().is_empty() {
            return Err(Invalid::new("text", "must not be blank"));
        }
        if text.contains('\0') {
            return Err(Invalid::new("text", "must not contain NUL"));
        }
        Ok(Self::Text(text))
    }

    /// A program and its arguments; `validation` if its name is empty.
    pub fn argv<T: Into<String>>(argv: impl IntoIterator<Item = T>) -> Result<Self, Invalid> {
        let argv: Vec<String> = argv.into_iter().map(Into::into).collect();
        if argv.first().is_none_or(String::is_empty) {
            return Err(Invalid::new("argv", "must begin with a program"));
        }
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(Invalid::new("argv", "must not contain NUL"));
        }
        Ok(Self::Argv(argv))
    }
}

impl Program {
    /// Returns the size of its text in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Argv(argv) => argv.iter().map(String::len).sum(),
        }
    }
}

/// Shows the text, or the arguments separated by spaces.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Argv(argv) => f.write_str(&argv.join(" ")),
        }
    }
}

impl TryFrom<Unchecked> for Program {
    type Error = Invalid;

    fn try_from(unchecked: Unchecked) -> Result<Self, Invalid> {
        match unchecked {
            Unchecked::Text(text) => Self::text(text),
            Unchecked::Argv(argv) => Self::argv(argv),
        }
    }
}

/// The role of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// An ordinary command.
    #[default]
    Command,
    /// A `box.exec`.
    Exec,
    /// A managed process: one that is kept running.
    Process,
    /// A run in a shell.
    Run,
    /// A file watch, which the agent runs itself.
    Watch,
    /// The command that starts with the box.
    Main,
}

/// The state of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// Waiting for its first reader.
    Held,
    /// Queued in a shell.
    Pending,
    /// Running.
    Running,
    /// Ended; the record is kept for a time.
    Exited,
    /// Ended, but the exit was not observed.
    Lost,
}

/// A value for each of the two streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct PerStream {
    /// The value for standard output, or for both streams if they are merged.
    pub stdout: u64,
    /// The value for standard error.
    pub stderr: u64,
}

impl PerStream {
    /// Returns the value of one stream.
    pub const fn of(self, stream: StreamName) -> u64 {
        match stream {
            StreamName::Stdout => self.stdout,
            StreamName::Stderr => self.stderr,
        }
    }

    /// Returns the value of one stream for modification.
    pub const fn of_mut(&mut self, stream: StreamName) -> &mut u64 {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    /// Returns the sum of both values.
    pub const fn sum(self) -> u64 {
        self.stdout.saturating_add(self.stderr)
    }
}

/// The record of a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandInfo {
    /// The box.
    pub box_id: BoxId,
    /// The command.
    pub command_id: CommandId,
    /// The role.
    #[serde(default)]
    pub role: Role,
    /// The state.
    pub state: CommandState,
    /// The process id inside the box; absent before the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The program.
    pub program: Program,
    /// The working directory.
    pub cwd: String,
    /// Names of the environment variables of the request. Values are never returned.
    #[serde(default)]
    pub env_keys: Vec<String>,
    /// Whether a reader is attached.
    #[serde(default)]
    pub attached: bool,
    /// When the command was requested.
    pub created_at: UnixMs,
    /// When the process started; absent before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<UnixMs>,
    /// When the command exited; absent before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<UnixMs>,
    /// Number of bytes written so far.
    #[serde(default)]
    pub size: PerStream,
    /// Offset of the first byte that the log still holds.
    #[serde(default)]
    pub kept_from: PerStream,
    /// The exit status; absent before the exit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// The error that an interpreter reported; absent if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
    /// The shell that executes the run; absent for other commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// Whether the shell was replaced before this run.
    #[serde(default)]
    pub shell_replaced: bool,
    /// Data of the gateway, returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

impl CommandInfo {
    /// Estimates the size of the record in a message, in bytes.
    pub fn estimated_bytes(&self) -> usize {
        let program = match &self.program {
            Program::Text { 0: text, .. } => text.len(),
            Program::Argv { 0: argv, .. } => argv.iter().map(|word| word.len() + 3).sum(),
        };
        let keys: usize = self.env_keys.iter().map(|key| key.len() + 3).sum();
        let note = self.note.as_ref().map_or(0, |note| note.as_json().len());
        let error = self.error.as_ref().map_or(0, |error| {
            error.value.len() + error.traceback.iter().map(String::len).sum::<usize>()
        });
        512 + program + self.cwd.len() + keys + note + error
    }
}

/// An error that an interpreter raised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunError {
    /// The class of the error.
    pub name: String,
    /// The message of the error.
    pub value: String,
    /// The traceback, line by line.
    #[serde(default)]
    pub traceback: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        Invalid::from(serde_json::from_str::<Program>(json).unwrap_err()).to_string()
    }

    #[test]
    fn a_program_is_text_or_argv() {
        let text: Program = serde_json::from_str(r#"{"text":"ls -l"}"#).unwrap();
        assert_eq!(text, Program::text("ls -l").unwrap());
        let argv = Program::argv(["ls", "-l"]).unwrap();
        assert_eq!(
            serde_json::to_string(&argv).unwrap(),
            r#"{"argv":["ls","-l"]}"#
        );
        assert!(serde_json::from_str::<Program>(r#"{"text":"ls","argv":["ls"]}"#).is_err());
        assert!(serde_json::from_str::<Program>("{}").is_err());
    }

    #[test]
    fn an_empty_program_is_refused() {
        assert_eq!(refused(r#"{"text":" \n"}"#), "text: must not be blank");
        assert_eq!(refused(r#"{"argv":[]}"#), "argv: must begin with a program");
        assert_eq!(
            refused(r#"{"argv":["","x"]}"#),
            "argv: must begin with a program"
        );
        assert_eq!(
            refused(r#"{"argv":["x","\u0000"]}"#),
            "argv: must not contain NUL"
        );
        assert_eq!(
            refused(r#"{"text":"a\u0000"}"#),
            "text: must not contain NUL"
        );
    }
}
