//! `/v1/shell`: sessions that keep their directory and variables.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{
    CommandInputParams, CommandKey, ShellInfo, ShellState, Stdin, Until, View,
};
use box_protocol::error::Detail;
use box_protocol::{BoxId, Code, CommandId, CommandInfo, Env, Invalid, PerStream, UnixMs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::envelope::{Failure, done};
use super::file::checked;
use super::path::Path;
use super::run::{Outcome, RunRequest, Status, exit_code, status_of};
use super::search::is_directory;
use super::sessions::{
    MAX_SESSIONS, SessionNote, Sessions, age_seconds, check_text, millis, note_of,
};
use crate::http::body::{Json, OptionalJson};
use crate::http::context::Context;
use crate::http::input::READ_MS;

/// The time without output after which a request returns.
const SILENCE_MS: u64 = 120_000;

/// The most that a request returns before its silence limit, which may be the time limit of its client as well.
const EARLY_MS: u64 = 5_000;

/// The maximum length of output that the client did not ask for whole.
const MAX_OUTPUT_CHARS: usize = 30_000;

/// How long a request waits for the end of a run, unless it says so.
const WAIT_SECONDS: u64 = 60;

/// A session counts as active for this time after its last run.
const ACTIVE_SECONDS: u64 = 300;

/// A session by its id.
#[derive(Debug, Deserialize)]
pub(super) struct SessionRequest {
    id: String,
}

/// A session in the path.
#[derive(Debug, Deserialize)]
pub(super) struct SessionPath {
    pub(super) session: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct ExecRequest {
    command: String,
    id: Option<String>,
    exec_dir: Option<String>,
    async_mode: Option<bool>,
    timeout: Option<f64>,
    strict: Option<bool>,
    no_change_timeout: Option<f64>,
    hard_timeout: Option<f64>,
    truncate: Option<bool>,
}

/// Runs a command in a session, or in a new one.
pub(super) async fn exec(
    sessions: Sessions,
    Json(request): Json<ExecRequest>,
) -> Result<Response, Failure> {
    check_text("command", &request.command)?;
    let hard_ms = millis("hard_timeout", request.hard_timeout)?;
    let soft_ms = millis("timeout", request.timeout)?;
    let asked = millis("no_change_timeout", request.no_change_timeout)?;
    let is_named = request.id.is_some();
    let silence_ms = match (asked, &request.id) {
        (Some(asked), _) => Some(asked),
        (None, Some(id)) => note_of(&sessions.find(id).await?).silence_ms,
        (None, None) => None,
    };
    let silence_ms = silence_ms.unwrap_or(SILENCE_MS);
    let cwd = match request.exec_dir {
        Some(dir) => {
            let is_strict = request.strict.unwrap_or_default();
            existing_directory(&sessions.context, &sessions.box_id, dir, is_strict).await?
        }
        None => None,
    };
    let session = match request.id {
        Some(id) => id,
        None => sessions.create_unnamed().await?.0,
    };
    let run = RunRequest {
        shell_id: sessions.shell_id(&session)?,
        text: request.command.clone(),
        cwd,
        cwd_stays: true,
        env: Env::new(),
        hard_ms,
        until: Until {
            ms: soft_ms,
            // 0 is no limit.
            silence_ms: (silence_ms > 0).then(|| answered_after(silence_ms)),
            bytes: None,
        },
        keep: is_named,
        stdin: Stdin::Open,
    };
    if request.async_mode.unwrap_or_default() {
        sessions.start(run).await?;
        return Ok(done(json!({
            "session_id": session,
            "command": request.command,
            "status": "running",
            "output": "",
            "console": [],
        })));
    }
    let outcome = sessions.run(run).await?;
    let max_chars = if request.truncate.unwrap_or(true) {
        MAX_OUTPUT_CHARS
    } else {
        0
    };
    Ok(done(described(&session, outcome, max_chars)))
}

/// Returns after what silence a request returns: earlier than asked, because a client whose own time limit is the same leaves
/// then, which kills a command without a session.
fn answered_after(silence_ms: u64) -> u64 {
    silence_ms - EARLY_MS.min(silence_ms / 20)
}

/// Checks the directory of a request.
pub(super) fn checked_directory(dir: Option<String>) -> Result<Option<String>, Invalid> {
    dir.map(|dir| checked("exec_dir", &dir)).transpose()
}

/// Returns a directory if it exists; a missing one is an error only if the request is strict.
pub(super) async fn existing_directory(
    context: &Context,
    box_id: &BoxId,
    dir: String,
    is_strict: bool,
) -> Result<Option<String>, Failure> {
    let dir = checked("exec_dir", &dir)?;
    if is_directory(context, box_id, &dir).await {
        return Ok(Some(dir));
    }
    if is_strict {
        let message = format!("exec_dir: {dir:?} must be a directory");
        return Err(Failure::new(StatusCode::BAD_REQUEST, message));
    }
    Ok(None)
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Pending | Status::Running => "running",
        Status::Silent => "no_change_timeout",
        Status::Completed => "completed",
        Status::TimedOut => "hard_timeout",
        Status::Killed => "terminated",
    }
}

fn described(session: &str, outcome: Outcome, max_chars: usize) -> Value {
    let info = &outcome.info;
    let status = word(status_of(info, outcome.read));
    let command = info.program.to_string();
    let code = exit_code(info);
    let output = outcome.stdout.within(max_chars);
    json!({
        "session_id": session,
        "status": status,
        "exit_code": code,
        "console": [{"ps1": "$ ", "command": command, "output": output}],
        "command": command,
        "output": output,
    })
}

/// Returns the current run of a session, or the last one.
fn newest(info: &ShellInfo) -> Option<&CommandId> {
    info.current.as_ref().or(info.last.as_ref())
}

/// Returns the output of the newest run.
pub(super) async fn view(
    sessions: Sessions,
    Json(request): Json<SessionRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.id).await?;
    if let Some(command_id) = newest(&info) {
        let now = Until {
            ms: Some(0),
            ..Until::default()
        };
        let start = PerStream::default();
        match sessions.read(command_id, start, View::Text, now).await {
            Ok(outcome) => {
                return Ok(done(described(&request.id, outcome, MAX_OUTPUT_CHARS)));
            }
            // The record of an old run is gone.
            Err(error) if error.code() == Code::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done(json!({
        "session_id": request.id,
        "status": "completed",
        "output": "",
        "console": [],
    })))
}

#[derive(Debug, Deserialize)]
pub(super) struct WaitRequest {
    id: String,
    seconds: Option<f64>,
    max_wait_seconds: Option<f64>,
}

/// Waits for the end of the current run.
pub(super) async fn wait(
    sessions: Sessions,
    Json(request): Json<WaitRequest>,
) -> Result<Response, Failure> {
    let first = millis("seconds", request.seconds)?;
    let second = millis("max_wait_seconds", request.max_wait_seconds)?;
    let limit_ms = first.into_iter().chain(second).min();
    let limit_ms = limit_ms.unwrap_or(WAIT_SECONDS * 1000);
    let info = sessions.find(&request.id).await?;
    let status = match newest(&info) {
        Some(command_id) => match sessions.wait(command_id, limit_ms).await {
            Ok(info) => word(status_of(&info, None)),
            Err(error) if error.code() == Code::NotFound => "completed",
            Err(error) => return Err(error.into()),
        },
        None => "completed",
    };
    Ok(done(json!({"status": status})))
}

#[derive(Debug, Deserialize)]
pub(super) struct WriteRequest {
    id: String,
    input: String,
    press_enter: Option<bool>,
}

/// Writes to the stdin of the current run.
pub(super) async fn write(
    sessions: Sessions,
    Json(request): Json<WriteRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.id).await?;
    let mut input = request.input;
    if request.press_enter.unwrap_or_default() {
        input.push('\n');
    }
    write_input(&sessions, info.current, input).await?;
    Ok(done(json!({"status": "running"})))
}

/// Writes to the stdin of a run.
pub(super) async fn write_input(
    sessions: &Sessions,
    current: Option<CommandId>,
    input: String,
) -> Result<(), Failure> {
    let Some(command_id) = current else {
        let message = "no command is running in the session";
        return Err(Failure::new(StatusCode::BAD_REQUEST, message));
    };
    let params = CommandInputParams {
        data: Some(input.into_bytes().into()),
        wait_ms: Some(READ_MS),
        ..CommandInputParams::new(sessions.box_id.clone(), command_id)
    };
    let context = &sessions.context;
    let written = context
        .runtime()
        .input_command(&context.caller, params)
        .await;
    written.map(drop).map_err(|error| match error.code() {
        // The run has ended meanwhile.
        Code::Conflict => Failure::new(StatusCode::BAD_REQUEST, error.message()),
        // The SDK repeats a request after 408 or 5xx, and a part of this one is written.
        Code::Timeout => {
            let detail: Detail = error.detail().unwrap_or_default();
            Failure::Failed {
                status: StatusCode::BAD_REQUEST,
                message: error.message().replacen("data", "input", 1),
                data: json!({"accepted": detail.accepted}),
            }
        }
        _ => error.into(),
    })
}

/// Kills the current run.
pub(super) async fn kill(
    sessions: Sessions,
    Json(request): Json<SessionRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.id).await?;
    let (status, code) = match &info.current {
        Some(command_id) => {
            let ended = sessions.kill(command_id).await?;
            (word(status_of(&ended, None)), exit_code(&ended))
        }
        None => ("completed", None),
    };
    Ok(done(
        json!({"status": status, "exit_code": code, "returncode": code}),
    ))
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    id: Option<String>,
    exec_dir: Option<String>,
    no_change_timeout: Option<f64>,
}

/// Creates a session, or returns the existing one with this id.
pub(super) async fn create(
    sessions: Sessions,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Failure> {
    let silence_ms = millis("no_change_timeout", request.no_change_timeout)?;
    let note = silence_ms.map(|silence_ms| SessionNote {
        silence_ms: Some(silence_ms),
        ..SessionNote::default()
    });
    let session = request.id.unwrap_or_else(|| CommandId::fresh().to_string());
    let dir = checked_directory(request.exec_dir)?;
    let created = sessions.create(&session, dir, note).await?;
    Ok(done(
        json!({"session_id": session, "working_dir": created.info.cwd}),
    ))
}

#[derive(Debug, Deserialize)]
pub(super) struct UpdateRequest {
    id: String,
    no_change_timeout: Option<f64>,
}

/// Changes the time without output after which runs return.
pub(super) async fn update(
    sessions: Sessions,
    Json(request): Json<UpdateRequest>,
) -> Result<Response, Failure> {
    let info = sessions.find(&request.id).await?;
    let silence_ms = millis("no_change_timeout", request.no_change_timeout)?;
    let known = note_of(&info);
    let note = SessionNote {
        silence_ms: silence_ms.or(known.silence_ms),
        ..known
    };
    sessions.create(&request.id, None, Some(note)).await?;
    Ok(done(Value::Null))
}

/// A session in a list.
#[derive(Debug, Serialize)]
struct Listed {
    working_dir: String,
    created_at: String,
    last_used_at: String,
    age_seconds: u64,
    status: &'static str,
    current_command: Option<String>,
}

/// Lists all sessions.
pub(super) async fn list(sessions: Sessions) -> Result<Response, Failure> {
    let mut listed = BTreeMap::new();
    for info in sessions.list().await? {
        let Some(id) = sessions.id_of(&info) else {
            continue;
        };
        let current = current_command(&sessions, &info).await;
        let entry = Listed {
            working_dir: info.cwd.clone(),
            created_at: info.created_at.to_string(),
            last_used_at: info.last_used_at.to_string(),
            age_seconds: age_seconds(&info),
            status: match info.state {
                ShellState::Busy => "active",
                ShellState::Starting | ShellState::Idle => "idle",
            },
            current_command: current.map(|info| info.program.to_string()),
        };
        listed.insert(id.to_owned(), entry);
    }
    Ok(done(json!({"sessions": listed})))
}

/// Returns the current run of a session, if it has not ended meanwhile.
pub(super) async fn current_command(sessions: &Sessions, info: &ShellInfo) -> Option<CommandInfo> {
    let key = CommandKey {
        box_id: sessions.box_id.clone(),
        command_id: info.current.clone()?,
    };
    let context = &sessions.context;
    let found = context.runtime().get_command(&context.caller, key).await;
    found.ok()
}

/// Counts the sessions.
pub(super) async fn stats(sessions: Sessions) -> Result<Response, Failure> {
    let sessions = sessions.list().await?;
    let now = UnixMs::now();
    let is_active = |info: &&ShellInfo| {
        info.state == ShellState::Busy || now.since(info.last_used_at).as_secs() < ACTIVE_SECONDS
    };
    let (total, active) = (sessions.len(), sessions.iter().filter(is_active).count());
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let usage_ratio = total as f64 / MAX_SESSIONS as f64;
    Ok(done(json!({
        "total_sessions": total,
        "active_sessions": active,
        "idle_sessions": total - active,
        "max_sessions": MAX_SESSIONS,
        // Sessions end with their box.
        "session_timeout": 0,
        "usage_ratio": usage_ratio,
    })))
}

/// Ends a session; a missing one is no error.
pub(super) async fn delete(
    sessions: Sessions,
    Path(path): Path<SessionPath>,
) -> Result<Response, Failure> {
    sessions.delete(&path.session).await?;
    Ok(done(Value::Null))
}

/// Ends all sessions.
pub(super) async fn delete_all(sessions: Sessions) -> Result<Response, Failure> {
    sessions.delete_all().await?;
    Ok(done(Value::Null))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_command_is_answered_before_a_client_with_the_same_limit_leaves() {
        for (limit, answered) in [
            (1, 1),
            (1000, 950),
            (100_000, 95_000),
            (600_000, 595_000),
            (u64::MAX, u64::MAX - EARLY_MS),
        ] {
            assert_eq!(answered_after(limit), answered);
        }
    }
}
