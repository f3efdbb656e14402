//! Parameters and result of `agent.start`.

use serde::{Deserialize, Serialize};

use super::{Collected, Displayed, OutputMode, ReadWhy, Stdin, TerminalSize, Until, is_default};
use crate::env::Env;
use crate::ids::{CommandId, ShellId};
use crate::model::{CommandInfo, Exit, PerStream, Program, Role};
use crate::note::Note;

/// When `agent.start` answers, and how it returns the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    /// Answer at once; the output stays in the log.
    #[default]
    Started,
    /// Answer at the exit, with the first bytes of each stream. A short exec costs one message in
    /// each direction.
    Collected {
        /// Number of bytes to return of each stream; the rest is only counted.
        bytes: u64,
    },
    /// Stream as `agent.output` does from the first byte, after a `started` chunk.
    Streamed {
        /// When to stop before the exit; never if absent.
        #[serde(default, skip_serializing_if = "is_default")]
        until: Until,
    },
}

/// Parameters of `agent.start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is one word of the contract"
)]
pub struct AgentStartParams {
    /// The id of the command.
    pub command_id: CommandId,
    /// The program to run.
    pub program: Program,
    /// Environment variables, which override those of the box. The agent adds no others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub env: Env,
    /// The shell in which to run the program, which is then a text, after the queued runs. `cwd`
    /// and `env` apply to this run only. Errors: `not_found` (nothing ran).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_id: Option<ShellId>,
    /// Working directory; empty for the current directory of the shell.
    pub cwd: String,
    /// Whether the shell stays in the directory of the run; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cwd_stays: bool,
    /// Whether to create a missing working directory; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub make_cwd: bool,
    /// User name or uid; the guest user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether stdin is open; `closed` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stdin: Stdin,
    /// Whether stdout and stderr are separate; `split` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub output: OutputMode,
    /// Size of the terminal; no terminal if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
    /// Maximum run time in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Maximum size of one file that the command writes, in bytes; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Memory limit of each process of the command, in MiB; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Size of the output log in bytes, from 4 KiB to 64 MiB; 1 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_bytes: Option<u64>,
    /// When to answer; `started` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reply: AgentReply,
    /// Whether the command continues if the call is dropped; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keep: bool,
    /// Whether to delay the start until the first reader attaches; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hold: bool,
    /// Whether to end and remove an existing command with this id first; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replace: bool,
    /// Maximum time without a reader, in milliseconds; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_ms: Option<u64>,
    /// How long the log keeps what a lost reader has not received, in milliseconds; 0 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_reader_ms: Option<u64>,
    /// How long the record is kept after the exit, in milliseconds; a negative value for the life
    /// of the box. 10 minutes if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain_ms: Option<i64>,
    /// The role of the command; `command` if absent. The agent keeps nothing of an `exec` but its
    /// result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// Data of the gateway, stored with the command and returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// The slot for the output; all output is in messages if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// A path to watch instead of starting a process; `program` is then only displayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<Box<AgentWatch>>,
    /// A digest of the caller's request without the defaults of the box, to compare a repeated
    /// start. If absent, the agent compares `program`, `cwd`, `user`, `shell_id` and `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
}

impl AgentStartParams {
    /// Runs a program in a directory, with default settings.
    pub fn new(command_id: CommandId, program: Program, cwd: impl Into<String>) -> Self {
        Self {
            command_id,
            program,
            env: Env::default(),
            shell_id: None,
            cwd: cwd.into(),
            cwd_stays: false,
            make_cwd: false,
            user: None,
            stdin: Stdin::default(),
            output: OutputMode::default(),
            pty: None,
            timeout_ms: None,
            file_bytes: None,
            memory_mb: None,
            log_bytes: None,
            reply: AgentReply::default(),
            keep: false,
            hold: false,
            replace: false,
            detached_ms: None,
            lost_reader_ms: None,
            retain_ms: None,
            role: Role::default(),
            note: None,
            slot: None,
            watch: None,
            asked: None,
        }
    }
}

/// What a command with the role `watch` observes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AgentWatch {
    /// The path.
    pub path: String,
    /// Whether to watch all subdirectories; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub recursive: bool,
    /// Whether to expand `~`, `$VAR` and relative paths; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expand: bool,
}

/// The state of a command as its agent reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AgentCommand {
    /// The command.
    pub command_id: CommandId,
    /// The process id inside the box.
    pub pid: u32,
    /// The exit status; absent while the command runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// Run time in milliseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub duration_ms: u64,
    /// Number of bytes written so far.
    #[serde(default, skip_serializing_if = "is_default")]
    pub size: PerStream,
    /// Number of bytes that were counted but not kept.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dropped: PerStream,
    /// The first bytes of the output; absent unless collected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collected: Option<Collected>,
    /// Number of bytes, from the start of each stream, that are in the slot instead of in
    /// `collected`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub in_slot: PerStream,
    /// Why streaming the output ended; absent without streaming.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<ReadWhy>,
    /// Whether the command existed before the call.
    #[serde(default, skip_serializing_if = "is_default")]
    pub existed: bool,
    /// The record of the command; of an `exec` only if its output is streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<Box<CommandInfo>>,
    /// Values that an ended run displayed, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shown: Vec<Displayed>,
}

impl AgentCommand {
    /// A running command that has written nothing.
    pub fn new(command_id: CommandId, pid: u32) -> Self {
        Self {
            command_id,
            pid,
            exit: None,
            duration_ms: 0,
            size: PerStream::default(),
            dropped: PerStream::default(),
            collected: None,
            in_slot: PerStream::default(),
            why: None,
            existed: false,
            info: None,
            shown: Vec::new(),
        }
    }
}
