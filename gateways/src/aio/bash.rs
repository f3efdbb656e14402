//! `/v1/bash`: sessions of separate commands with their own environment, output by byte offsets.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{ReadEnd, ShellInfo, Stdin, Until, View};
use box_protocol::{CommandId, CommandInfo, Env, Invalid, PerStream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::{Failure, done};
use super::path::Path;
use super::run::{RunRequest, Status, exit_code, status_of};
use super::sessions::{SessionNote, Sessions, check_text, millis, note_of};
use super::shell::{
    SessionPath, checked_directory, current_command, existing_directory, write_input,
};
use crate::http::body::{Json, OptionalJson};

/// The maximum length of each output stream, unless a request says so.
const MAX_OUTPUT_CHARS: usize = 50_000;

/// How long a request waits for output, unless it says so.
const WAIT_SECONDS: f64 = 30.0;

/// The exit codes of a command that SIGINT, SIGKILL or SIGTERM has ended. The shell of a session reports no signal.
const SIGNALLED: [i32; 3] = [130, 137, 143];

#[derive(Debug, Deserialize)]
pub(super) struct ExecRequest {
    command: String,
    session_id: Option<String>,
    exec_dir: Option<String>,
    env: Option<BTreeMap<String, Option<String>>>,
    async_mode: Option<bool>,
    timeout: Option<f64>,
    hard_timeout: Option<f64>,
    max_output_length: Option<usize>,
}

/// Runs a command in a session, or in a new one.
pub(super) async fn exec(
    sessions: Sessions,
    Json(request): Json<ExecRequest>,
) -> Result<Response, Failure> {
    check_text("command", &request.command)?;
    let soft_ms = millis("timeout", request.timeout)?;
    let hard_ms = millis("hard_timeout", request.hard_timeout)?;
    let is_named = request.session_id.is_some();
    let mut env = Env::new();
    for (name, value) in request.env.into_iter().flatten() {
        if let Some(value) = value {
            env.insert(name, value)?;
        }
    }
    let dir = match request.exec_dir {
        Some(dir) => existing_directory(&sessions.context, &sessions.box_id, dir, true).await?,
        None => None,
    };
    let (session, info) = match request.session_id {
        Some(id) => {
            let info = sessions.find(&id).await?;
            (id, info)
        }
        None => sessions.create_unnamed().await?,
    };
    let cwd = match dir {
        Some(dir) => {
            // It is the directory of later commands, too.
            let note = SessionNote {
                cwd: Some(dir.clone()),
                ..note_of(&info)
            };
            sessions.set_note(&session, note).await?;
            dir
        }
        None => directory(&info),
    };
    let run = RunRequest {
        shell_id: sessions.shell_id(&session)?,
        text: request.command.clone(),
        // A command does not change the directory of its session.
        cwd: Some(cwd),
        cwd_stays: false,
        env,
        hard_ms,
        until: Until {
            ms: soft_ms,
            ..Until::default()
        },
        keep: is_named,
        stdin: Stdin::Open,
    };
    if request.async_mode.unwrap_or_default() {
        let info = sessions.start(run).await?;
        return Ok(done(json!({
            "session_id": session,
            "command_id": info.command_id,
            "command": request.command,
            "status": "running",
            "offset": 0,
            "stderr_offset": 0,
        })));
    }
    let outcome = sessions.run(run).await?;
    let status = word(status(&outcome.info, outcome.read));
    let next = outcome.read.map(|read| read.next).unwrap_or_default();
    let max = request.max_output_length.unwrap_or(MAX_OUTPUT_CHARS);
    Ok(done(json!({
        "session_id": session,
        "command_id": outcome.info.command_id,
        "command": request.command,
        "status": status,
        "stdout": outcome.stdout.within(max),
        "stderr": outcome.stderr.within(max),
        "exit_code": exit_code(&outcome.info),
        "offset": next.stdout,
        "stderr_offset": next.stderr,
    })))
}

/// Returns the directory of the commands of a session: the last one that a request named.
fn directory(info: &ShellInfo) -> String {
    note_of(info).cwd.unwrap_or_else(|| info.cwd.clone())
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Pending => "pending",
        Status::Running | Status::Silent => "running",
        Status::Completed => "completed",
        Status::TimedOut => "timed_out",
        Status::Killed => "killed",
    }
}

/// Returns how a command stands. One that a signal of `kill` has ended is killed.
fn status(info: &CommandInfo, read: Option<ReadEnd>) -> Status {
    let known = status_of(info, read);
    let is_signalled = exit_code(info).is_some_and(|code| SIGNALLED.contains(&code));
    if known == Status::Completed && is_signalled {
        return Status::Killed;
    }
    known
}

fn described(info: &CommandInfo) -> Value {
    json!({
        "command_id": info.command_id,
        "command": info.program.to_string(),
        "status": word(status(info, None)),
        "exit_code": exit_code(info),
    })
}

#[derive(Debug, Deserialize)]
pub(super) struct OutputRequest {
    session_id: String,
    command_id: Option<CommandId>,
    offset: Option<u64>,
    stderr_offset: Option<u64>,
    wait: Option<bool>,
    wait_timeout: Option<f64>,
}

/// Returns the output after these offsets; a waiting request returns with the next output or the end of the command.
pub(super) async fn output(
    sessions: Sessions,
    Json(request): Json<OutputRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.session_id).await?;
    let from = PerStream {
        stdout: request.offset.unwrap_or_default(),
        stderr: request.stderr_offset.unwrap_or_default(),
    };
    let command_id = request.command_id.or(info.current).or(info.last);
    let Some(command_id) = command_id else {
        return Ok(done(json!({
            "session_id": request.session_id,
            "stdout": "",
            "stderr": "",
            "offset": from.stdout,
            "stderr_offset": from.stderr,
        })));
    };
    let limit_ms = millis(
        "wait_timeout",
        Some(request.wait_timeout.unwrap_or(WAIT_SECONDS)),
    )?;
    if request.wait.unwrap_or_default() {
        let some_output = Until {
            ms: limit_ms,
            silence_ms: None,
            bytes: Some(1),
        };
        let read = sessions.read(&command_id, from, View::Text, some_output);
        read.await?;
    }
    let now = Until {
        ms: Some(0),
        ..Until::default()
    };
    let outcome = sessions.read(&command_id, from, View::Text, now).await?;
    let next = outcome.read.map_or(from, |read| read.next);
    let command = described(&outcome.info);
    Ok(done(json!({
        "session_id": request.session_id,
        "stdout": outcome.stdout.into_text(),
        "stderr": outcome.stderr.into_text(),
        "offset": next.stdout,
        "stderr_offset": next.stderr,
        "command": command,
    })))
}

#[derive(Debug, Deserialize)]
pub(super) struct WriteRequest {
    session_id: String,
    input: String,
    command_id: Option<CommandId>,
}

/// Writes to the stdin of a command.
pub(super) async fn write(
    sessions: Sessions,
    Json(request): Json<WriteRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.session_id).await?;
    let command_id = request.command_id.or(info.current);
    write_input(&sessions, command_id, request.input).await?;
    Ok(done(Value::Null))
}

#[derive(Debug, Deserialize)]
pub(super) struct KillRequest {
    session_id: String,
    signal: Option<String>,
}

/// Sends a signal to the current command.
pub(super) async fn kill(
    sessions: Sessions,
    Json(request): Json<KillRequest>,
) -> Result<Response, Failure> {
    let signal = match request.signal.as_deref().unwrap_or("SIGTERM") {
        "SIGTERM" => "TERM",
        "SIGKILL" => "KILL",
        "SIGINT" => "INT",
        _ => return Err(Invalid::new("signal", "must be SIGTERM, SIGKILL or SIGINT").into()),
    };
    let info = sessions.find(&request.session_id).await?;
    let Some(command_id) = &info.current else {
        let message = "no command is running in the session";
        return Err(Failure::new(StatusCode::BAD_REQUEST, message));
    };
    sessions.signal(command_id, signal).await?;
    Ok(done(Value::Null))
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    session_id: Option<String>,
    exec_dir: Option<String>,
    snapshot_path: Option<String>,
}

/// Creates a session, or returns the existing one with this id.
pub(super) async fn create(
    sessions: Sessions,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Failure> {
    if request.snapshot_path.is_some() {
        return Err(Failure::unserved(
            "snapshot_path: not supported by this server; omit it",
        ));
    }
    let fresh = || CommandId::fresh().to_string();
    let session = request.session_id.unwrap_or_else(fresh);
    let dir = checked_directory(request.exec_dir)?;
    let created = sessions.create(&session, dir, None).await?;
    Ok(done(session_value(&sessions, &created.info).await))
}

async fn session_value(sessions: &Sessions, info: &ShellInfo) -> Value {
    let current = current_command(sessions, info).await;
    json!({
        "session_id": sessions.id_of(info),
        "status": "ready",
        "working_dir": directory(info),
        "created_at": info.created_at.to_string(),
        "last_used_at": info.last_used_at.to_string(),
        "current_command": current.map(|info| info.program.to_string()),
        "command_count": info.executions,
    })
}

/// Lists all sessions.
pub(super) async fn list(sessions: Sessions) -> Result<Response, Failure> {
    let mut listed = Vec::new();
    for info in sessions.list().await? {
        listed.push(session_value(&sessions, &info).await);
    }
    Ok(done(listed))
}

/// Ends a session; a missing one is no error.
pub(super) async fn close(
    sessions: Sessions,
    Path(path): Path<SessionPath>,
) -> Result<Response, Failure> {
    sessions.delete(&path.session).await?;
    Ok(done(Value::Null))
}
