//! Tools for commands: run one, read its output, write its input, stop it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use box_protocol::actions::{
    AttachOptions, CommandAttachParams, CommandAttachResult, CommandChunk, CommandInputParams,
    CommandKey, CommandKillParams, CommandStartParams, CommandStartResult, OutputMode, ReadFrom,
    ShellCreateParams, ShellRunParams, Stdin, Until, View,
};
use box_protocol::{
    BoxError, Code, CommandId, CommandInfo, Env, Exit, ExitWhy, Invalid, Program, ShellId, UnixMs,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::answer::Answer;
use super::errors::{rename, reword};
use super::excerpt::{MAX_BYTES, Omitted, first_part, last_line, rest_of_character};
use super::follow::{Followed, Progress, follow};
use super::session::Session;
use crate::http::input::READ_MS;
use crate::http::stream::StreamedCall;

/// The size of the log of a command, which a model reads on.
const LOG_BYTES: u64 = 16 * 1024 * 1024;

/// How long the record of an ended command stays.
const RETAIN_MS: i64 = 24 * 60 * 60 * 1000;

/// The maximum value of `wait_s`.
const MAX_WAIT_S: u64 = 600;

/// The minimum time to read the log of a running command.
const MIN_READ_MS: u64 = 200;

/// How long a tool waits for the response of a command to its input.
const INPUT_WAIT_MS: u64 = 250;

/// The time between the signal of `stop` and the kill.
const GRACE_MS: u64 = 5_000;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RunArgs {
    /// Shell script to run.
    command: String,
    /// Box to run it in; the default box if absent.
    r#box: Option<String>,
    /// Working directory.
    cwd: Option<String>,
    /// Environment variables.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Seconds to wait for the end, at most 600. A command that runs longer continues in the background.
    #[serde(default = "default_wait")]
    wait_s: u64,
    /// Seconds after which the command is killed.
    timeout_s: Option<u64>,
    /// Name of a shell that keeps its directory and variables between commands; created if it does not exist.
    shell: Option<String>,
    /// Whether to keep stdin open for `send_input`.
    #[serde(default)]
    input: bool,
}

/// Returns the usual value of `wait_s`.
pub(super) fn default_wait() -> u64 {
    45
}

/// The state of a command and a part of its output.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct CommandAnswer {
    /// The box.
    r#box: String,
    /// The command, for `read_output`, `send_input` and `stop`.
    command: String,
    /// Whether the command still runs.
    running: bool,
    /// The exit code; 128 plus the number of the signal that ended the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// How the command ended, if it did not exit by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_by: Option<String>,
    /// Seconds since the start, or between start and end.
    seconds: f64,
    /// Byte offset of the first byte of the output.
    from: u64,
    /// The output: stdout and stderr together. If it is long, only its head.
    output: String,
    /// The bytes after `output` that were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    omitted: Option<Omitted>,
    /// The output after the bytes that were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    tail: Option<String>,
    /// The values that code showed, and its error if `output` does not have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<String>,
    /// Number of older bytes that the log no longer has.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
    /// Byte offset of the output that follows, for `read_output`.
    next: u64,
}

/// Returns the conditions under which a call returns before the command ends.
pub(super) fn waiting(wait_s: u64) -> AttachOptions {
    AttachOptions {
        view: View::Bytes,
        until: Until {
            ms: Some(wait_s.min(MAX_WAIT_S) * 1000),
            ..Until::default()
        },
    }
}

pub(super) async fn run(
    session: Session,
    args: RunArgs,
    progress: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let env = Env::try_from(args.env)?;
    let stdin = if args.input {
        Stdin::Open
    } else {
        Stdin::Closed
    };
    let timeout_ms = args.timeout_s.map(|limit| limit.saturating_mul(1000));
    let attach = Some(waiting(args.wait_s));
    let call = if let Some(shell) = args.shell {
        let in_shell = |error: BoxError| {
            let error = rename(error, &[("shell_id", "shell"), ("text", "command")]);
            let exists = "shell: it is an interpreter of run_code; choose another name";
            reword(error, "language", exists)
        };
        let shell_id = ShellId::new(shell).map_err(|error| in_shell(error.into()))?;
        // An empty script is refused before a shell is created for it.
        Program::text(&*args.command).map_err(|error| in_shell(error.into()))?;
        let create = ShellCreateParams {
            shell_id: Some(shell_id.clone()),
            output: OutputMode::Merged,
            ..ShellCreateParams::new(box_id.clone())
        };
        let created = session.target().create_shell(create).await;
        created.map_err(in_shell)?;
        let params = ShellRunParams {
            cwd: args.cwd,
            env,
            stdin,
            timeout_ms,
            attach,
            ..ShellRunParams::new(box_id.clone(), shell_id, args.command)
        };
        run_in_shell(session.clone(), params)
    } else {
        let program = Program::text(args.command);
        let program = program.map_err(|error| rename(error, &[("text", "command")]))?;
        let params = CommandStartParams {
            cwd: args.cwd,
            env,
            stdin,
            output: OutputMode::Merged,
            timeout_ms,
            retain_ms: Some(RETAIN_MS),
            log_bytes: Some(LOG_BYTES),
            attach,
            ..CommandStartParams::new(box_id.clone(), program)
        };
        let session = session.clone();
        StreamedCall::new(
            |chunks| async move { session.target().start_command(params, chunks).await },
        )
    };
    let followed = follow(call, &progress).await?;
    session.notes().adjusted(&followed.adjusted);
    answer(box_id.as_str(), followed, String::new())
}

/// Prepares a run in a shell.
pub(super) fn run_in_shell(
    session: Session,
    params: ShellRunParams,
) -> StreamedCall<CommandChunk, CommandStartResult> {
    let params = ShellRunParams {
        retain_ms: Some(RETAIN_MS),
        log_bytes: Some(LOG_BYTES),
        ..params
    };
    StreamedCall::new(|chunks| async move { session.target().run_in_shell(params, chunks).await })
}

/// Returns the answer for a command: its output, cut in the middle, and the values that it showed.
pub(super) fn answer(box_id: &str, followed: Followed, values: String) -> Result<Answer, BoxError> {
    let info = &followed.info;
    let excerpt = followed.output.finish(info.exit.is_some(), followed.pos);
    let data = CommandAnswer {
        from: excerpt.begin,
        output: excerpt.head,
        omitted: excerpt.omitted,
        tail: Some(excerpt.tail).filter(|_| excerpt.omitted.is_some()),
        values: Some(values).filter(|values| !values.is_empty()),
        lost: Some(excerpt.lost).filter(|lost| *lost > 0),
        ..describe(box_id, info, excerpt.next)
    };
    data.into_answer()
}

/// Describes a command, without its output before `next`.
fn describe(box_id: &str, info: &CommandInfo, next: u64) -> CommandAnswer {
    let exit = info.exit.as_ref();
    let began = info.started_at.unwrap_or(info.created_at);
    let ended = info.ended_at.unwrap_or_else(UnixMs::now);
    CommandAnswer {
        r#box: box_id.to_owned(),
        command: info.command_id.as_str().to_owned(),
        running: exit.is_none(),
        exit_code: exit.and_then(Exit::shell_code),
        ended_by: exit.and_then(ended_by),
        seconds: f64::from(u32::try_from(ended.since(began).as_millis()).unwrap_or(u32::MAX))
            / 1000.0,
        from: next,
        output: String::new(),
        omitted: None,
        tail: None,
        values: None,
        lost: None,
        next,
    }
}

/// Returns why a command ended, if it did not exit by itself.
fn ended_by(exit: &Exit) -> Option<String> {
    let why = match exit.why {
        ExitWhy::Exit => return None,
        ExitWhy::Timeout => "the time limit was reached",
        ExitWhy::Oom => "the box was out of memory",
        ExitWhy::BoxEnded => "the box ended",
        ExitWhy::Killed => "it was stopped",
        _ => match exit.signal {
            Some(signal) => return Some(format!("signal {signal}")),
            None => "its end was not observed",
        },
    };
    Some(why.to_owned())
}

impl CommandAnswer {
    /// Returns the answer: the output, then a line about the command.
    fn into_answer(self) -> Result<Answer, BoxError> {
        let mut text = String::new();
        // A write to a string cannot fail.
        if let Some(lost) = self.lost {
            let _ = writeln!(text, "[{lost} older bytes are lost]");
        }
        text.push_str(&self.output);
        if let Some(Omitted { from, bytes }) = self.omitted {
            let command = &self.command;
            let _ = write!(
                text,
                "\n[{bytes} bytes left out; read_output with command {command:?} and from {from} returns them]\n"
            );
        }
        for part in self.tail.iter().chain(&self.values) {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(part);
        }
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let (name, seconds, next) = (&self.command, self.seconds, self.next);
        let state = match (self.running, self.exit_code, &self.ended_by) {
            (true, ..) => {
                format!("still running: command {name}; read_output continues from {next}")
            }
            (false, Some(code), None) => format!("exit {code} in {seconds:.1} s; command {name}"),
            (false, _, why) => {
                let why = why.as_deref().unwrap_or("it ended");
                format!("ended after {seconds:.1} s: {why}; command {name}")
            }
        };
        let _ = write!(text, "[{state}; box {}]", self.r#box);
        Answer::new(text, &self)
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReadOutputArgs {
    /// Command to read.
    command: String,
    /// Box of the command; the default box if absent.
    r#box: Option<String>,
    /// Byte offset to read from: `next` or `omitted.from` of an earlier answer; 0 if absent.
    from: Option<u64>,
    /// Read this many of the last bytes instead.
    tail: Option<u64>,
    /// Seconds to wait for the end of the command or for a full answer, at most 600; 0 reads what is there.
    #[serde(default)]
    wait_s: u64,
}

pub(super) async fn read_output(
    session: Session,
    args: ReadOutputArgs,
    progress: Progress,
) -> Result<Answer, BoxError> {
    let key = key(&session, args.r#box.as_deref(), args.command)?;
    let from = match (args.from, args.tail) {
        (Some(_), Some(_)) => {
            return Err(Invalid::new("tail", "excludes from; omit one").into());
        }
        (from, None) => ReadFrom::Pos(from.unwrap_or(0)),
        (None, Some(tail)) => ReadFrom::Tail(tail.min(MAX_BYTES as u64)),
    };
    let until = Until {
        ms: Some(args.wait_s.min(MAX_WAIT_S) * 1000),
        bytes: Some(MAX_BYTES as u64),
        ..Until::default()
    };
    read(&session, key, from, until, &progress).await
}

fn key(session: &Session, asked: Option<&str>, command: String) -> Result<CommandKey, BoxError> {
    Ok(CommandKey {
        box_id: session.id_of(asked)?,
        command_id: CommandId::new(command)?,
    })
}

/// Reads a part of the output of a command, without a gap in it.
async fn read(
    session: &Session,
    key: CommandKey,
    from: ReadFrom,
    until: Until,
    progress: &Progress,
) -> Result<Answer, BoxError> {
    let box_id = key.box_id.clone();
    let found = session.target().get_command(key.clone()).await?;
    let has_ended = found.exit.is_some();
    let until = Until {
        // The whole log of an ended command is there, so nothing is waited for.
        ms: until
            .ms
            .filter(|_| !has_ended)
            .map(|ms| ms.max(MIN_READ_MS)),
        ..until
    };
    let mut part = attach(session, key, from, until, progress).await?;
    if let ReadFrom::Tail(_) = from {
        // The tail may begin inside a character.
        let skipped = rest_of_character(&part.bytes);
        part.bytes.drain(..skipped);
        part.begin += skipped as u64;
    }
    let exit = part.result.info.exit.as_ref();
    let size = part.result.info.size.sum();
    let at_end = part.begin + part.bytes.len() as u64 >= size;
    let (output, length) = first_part(&part.bytes, exit.is_some() && at_end);
    let next = if part.bytes.is_empty() {
        part.result.read.pos
    } else {
        part.begin + length as u64
    };
    let data = CommandAnswer {
        from: next - length as u64,
        output,
        omitted: (size > next && exit.is_some()).then(|| Omitted::between(next, size)),
        lost: Some(part.lost).filter(|lost| *lost > 0),
        ..describe(box_id.as_str(), &part.result.info, next)
    };
    data.into_answer()
}

/// A part of an output.
struct Part {
    bytes: Vec<u8>,
    /// The position of the first byte.
    begin: u64,
    /// Bytes before it that the log no longer has.
    lost: u64,
    result: CommandAttachResult,
}

async fn attach(
    session: &Session,
    key: CommandKey,
    from: ReadFrom,
    until: Until,
    progress: &Progress,
) -> Result<Part, BoxError> {
    let params = CommandAttachParams {
        from,
        view: View::Bytes,
        until,
        ..CommandAttachParams::new(key.box_id, key.command_id)
    };
    let (sender, mut chunks) = mpsc::channel(8);
    let (mut bytes, mut begin, mut lost) = (Vec::new(), None, 0);
    let collect = async {
        while let Some(chunk) = chunks.recv().await {
            match chunk {
                CommandChunk::Bytes(piece) if bytes.len() <= MAX_BYTES => {
                    begin.get_or_insert(piece.pos);
                    bytes.extend_from_slice(&piece.data);
                    progress.set(last_line(&bytes));
                }
                CommandChunk::Gap(gap) if bytes.is_empty() => lost += gap.bytes,
                _ => {}
            }
        }
    };
    let attached = session.target().attach_command(params, sender);
    let (result, ()) = tokio::join!(attached, collect);
    Ok(Part {
        bytes,
        begin: begin.unwrap_or(0),
        lost,
        result: result?,
    })
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SendInputArgs {
    /// Command that was started with `input`.
    command: String,
    /// Box of the command; the default box if absent.
    r#box: Option<String>,
    /// Text to write to stdin; a line needs its line end.
    text: Option<String>,
    /// Byte offset of the output to return: `next` of an earlier answer. If absent, only the output after this input.
    from: Option<u64>,
    /// Whether to close stdin afterwards.
    #[serde(default)]
    close: bool,
}

pub(super) async fn send_input(
    session: Session,
    args: SendInputArgs,
    progress: Progress,
) -> Result<Answer, BoxError> {
    let key = key(&session, args.r#box.as_deref(), args.command)?;
    let target = session.target();
    let before = target.get_command(key.clone()).await?.size.sum();
    let params = CommandInputParams {
        data: args.text.map(|text| text.into_bytes().into()),
        close: args.close,
        wait_ms: Some(READ_MS),
        ..CommandInputParams::new(key.box_id.clone(), key.command_id.clone())
    };
    let written = target.input_command(params).await;
    written.map_err(|error| {
        if error.code() == Code::Timeout {
            return rename(error, &[("data", "text")]);
        }
        let closed = "command: its stdin is not open; start it with `input` set to true";
        reword(error, "data", closed)
    })?;
    let until = Until {
        ms: Some(INPUT_WAIT_MS),
        bytes: Some(MAX_BYTES as u64),
        ..Until::default()
    };
    let from = ReadFrom::Pos(args.from.unwrap_or(before));
    read(&session, key, from, until, &progress).await
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct StopArgs {
    /// Command to stop.
    command: String,
    /// Box of the command; the default box if absent.
    r#box: Option<String>,
    /// Signal to send, such as INT or KILL. After 5 seconds the whole process tree is killed.
    #[serde(default = "default_signal")]
    signal: String,
}

fn default_signal() -> String {
    "TERM".to_owned()
}

pub(super) async fn stop(
    session: Session,
    args: StopArgs,
    progress: Progress,
) -> Result<Answer, BoxError> {
    let key = key(&session, args.r#box.as_deref(), args.command)?;
    let params = CommandKillParams {
        signal: args.signal,
        grace_ms: Some(GRACE_MS),
        ..CommandKillParams::new(key.box_id.clone(), key.command_id.clone())
    };
    let killed = session.target().kill_command(params).await?;
    let from = ReadFrom::Pos(killed.info.size.sum());
    let until = Until {
        ms: Some(2 * GRACE_MS),
        ..Until::default()
    };
    read(&session, key, from, until, &progress).await
}
