//! A command: an object with an id, a log and an end.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::execution::Exit;
use crate::actions::StreamName;
use crate::ids::{CommandId, SessionId, ShellId};
use crate::invalid::Invalid;
use crate::note::Note;
use crate::time::UnixMs;

/// What a command runs. `{"text": …}` or `{"argv": […]}` on the wire, never both.
///
/// Made by [`text`](Self::text) and [`argv`](Self::argv) or decoded; both keep the rules.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase", try_from = "Unchecked")]
pub enum Program {
    /// A text for the box's shell.
    #[non_exhaustive]
    Text(String),
    /// A program and its arguments, run as they are.
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
    /// A text for the box's shell; not blank.
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

    /// A program and its arguments; the program's name is not empty.
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

/// For people: the text, or the words with spaces between them.
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

/// What a command is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Nothing in particular.
    #[default]
    Command,
    /// A `box.exec`.
    Exec,
    /// A managed process: one that is kept running.
    Process,
    /// A run in a shell.
    Run,
    /// A watch on files, run by the agent itself.
    Watch,
    /// The command started with the box.
    Main,
}

/// Where a command is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// Made, and waiting for its first reader.
    Held,
    /// Waiting for its turn in a shell.
    Pending,
    /// Running.
    Running,
    /// Ended; its record is kept for a while.
    Exited,
    /// Its end was not seen.
    Lost,
}

/// The same thing for both streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct PerStream {
    /// For standard output, or both streams if they are merged.
    pub stdout: u64,
    /// For standard error.
    pub stderr: u64,
}

impl PerStream {
    /// That of one stream.
    pub const fn of(self, stream: StreamName) -> u64 {
        match stream {
            StreamName::Stdout => self.stdout,
            StreamName::Stderr => self.stderr,
        }
    }

    /// That of one stream, to be changed.
    pub const fn of_mut(&mut self, stream: StreamName) -> &mut u64 {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    /// Over both.
    pub const fn sum(self) -> u64 {
        self.stdout.saturating_add(self.stderr)
    }
}

/// What is known of a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandInfo {
    /// Its box.
    pub session_id: SessionId,
    /// The command.
    pub command_id: CommandId,
    /// What it is for.
    #[serde(default)]
    pub role: Role,
    /// Where it is in its life.
    pub state: CommandState,
    /// Its process, as the box numbers it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What it runs.
    pub program: Program,
    /// Where.
    pub cwd: String,
    /// The names of the variables it was given; values are never told.
    #[serde(default)]
    pub env_keys: Vec<String>,
    /// Somebody reads its output.
    #[serde(default)]
    pub attached: bool,
    /// When it was asked for.
    pub created_at: UnixMs,
    /// When its process began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<UnixMs>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<UnixMs>,
    /// Bytes written so far.
    #[serde(default)]
    pub size: PerStream,
    /// The first byte that is still kept.
    #[serde(default)]
    pub kept_from: PerStream,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// What an interpreter said went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
    /// The shell it runs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// The shell had to be replaced before this run.
    #[serde(default)]
    pub shell_replaced: bool,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
}

impl CommandInfo {
    /// About how long it is as a message: what may be long in it, and a guess at the rest.
    pub fn about_bytes(&self) -> usize {
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

/// An error an interpreter raised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunError {
    /// Its class.
    pub name: String,
    /// Its text.
    pub value: String,
    /// The lines that led to it.
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
    fn a_program_is_text_or_words() {
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
        assert_eq!(refused(r#"{"text":" \n"}"#), "text must not be blank");
        assert_eq!(refused(r#"{"argv":[]}"#), "argv must begin with a program");
        assert_eq!(
            refused(r#"{"argv":["","x"]}"#),
            "argv must begin with a program"
        );
        assert_eq!(
            refused(r#"{"argv":["x","\u0000"]}"#),
            "argv must not contain NUL"
        );
        assert_eq!(
            refused(r#"{"text":"a\u0000"}"#),
            "text must not contain NUL"
        );
    }
}
