//! Commands: in the foreground as a stream, or in the background.

use std::collections::BTreeMap;

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{
    AttachOptions, CommandAttachParams, CommandChunk, CommandKey, CommandKillParams,
    CommandListParams, CommandStartParams, FileKind, FileOutcome, FileStat, FileStatParams,
    OnDisconnect, OutputMode, ReadFrom, Until, View,
};
use box_protocol::error::Detail;
use box_protocol::{
    BoxError, BoxId, Code, CommandId, CommandInfo, CommandState, Env, Note, Program, Role,
};
use bytes::BytesMut;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::error::{Error, InPath, required};
use super::events::{self, Events, Output, event, failure, init, stream_response};
use super::{GATEWAY, code};
use crate::http::body::{Json, Params};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;
use crate::http::stream::StreamedCall;

/// How long the record of an ended command stays.
const RETAIN_MS: i64 = 24 * 60 * 60 * 1000;

/// The size of the log of a command in the background.
const BACKGROUND_LOG_BYTES: u64 = 16 * 1024 * 1024;

/// The time between the signal of an interrupt and the kill.
const GRACE_MS: u64 = 3_000;

/// The header with the offset to continue reading from.
const CURSOR: HeaderName = HeaderName::from_static("execd-commands-tail-cursor");

/// What the record of a command does not hold of its request.
#[derive(Debug, Default, Serialize, Deserialize)]
struct CommandNote {
    background: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct RunRequest {
    command: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    background: Option<bool>,
    /// Milliseconds.
    timeout: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    envs: Option<BTreeMap<String, Option<String>>>,
}

impl RunRequest {
    fn program(&self) -> Result<Program, Error> {
        let command = self
            .command
            .as_deref()
            .filter(|command| !command.is_empty());
        let argv = self.argv.as_ref().filter(|argv| !argv.is_empty());
        match (command, argv) {
            (Some(command), None) => Ok(Program::text(command)?),
            (None, Some(argv)) => Ok(Program::argv(argv.iter().cloned())?),
            _ => Err(Error::invalid(
                "command: exactly one of command and argv is required",
            )),
        }
    }

    fn user(&self) -> Result<Option<String>, Error> {
        match (self.uid, self.gid) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Error::invalid("gid: requires uid")),
            (Some(uid), None) => Ok(Some(uid.to_string())),
            (Some(uid), Some(gid)) => Ok(Some(format!("{uid}:{gid}"))),
        }
    }
}

/// Runs a command, and streams its events.
pub(super) async fn run(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<RunRequest>,
) -> Result<Response, Error> {
    let program = request.program()?;
    let mut env = Env::new();
    for (name, value) in request.envs.iter().flatten() {
        env.insert(name, value.as_deref().unwrap_or_default())?;
    }
    let id = CommandId::fresh();
    if request
        .command
        .as_deref()
        .is_some_and(code::is_readiness_probe)
    {
        code::check_ready(&context, box_id).await?;
        return Ok(complete(&id));
    }
    let timeout = request.timeout.filter(|time| *time > 0);
    let background = request.background.unwrap_or_default();
    let kept = CommandNote { background };
    let mut params = CommandStartParams {
        command_id: Some(id.clone()),
        cwd: directory(&context, &box_id, request.cwd.as_deref()).await?,
        env,
        user: request.user()?,
        timeout_ms: timeout,
        retain_ms: Some(RETAIN_MS),
        note: Some(Note::new(&kept)?),
        ..CommandStartParams::new(box_id, program)
    };
    if background {
        params.on_disconnect = OnDisconnect::Keep;
        params.output = OutputMode::Merged;
        params.log_bytes = Some(BACKGROUND_LOG_BYTES);
        return start_in_background(&context, params, &id).await;
    }
    params.attach = Some(AttachOptions::default());
    let call = StreamedCall::new(|chunks| async move {
        context.start_command(&GATEWAY, params, Some(chunks)).await
    });
    match call.begun().await {
        Ok(call) => Ok(Events::new(Output::Lines, None).response(call)),
        Err(error) => not_started(&id, error),
    }
}

/// Starts a command in the background, and answers that it has started.
async fn start_in_background(
    context: &Context,
    params: CommandStartParams,
    id: &CommandId,
) -> Result<Response, Error> {
    let started = context.start_command(&GATEWAY, params, None).await;
    if let Err(error) = started {
        return not_started(id, error);
    }
    Ok(complete(id))
}

/// Answers that an execution is complete, without output.
fn complete(id: &CommandId) -> Response {
    let mut frames = BytesMut::from(&*init(id.as_str()));
    frames.extend_from_slice(&event("execution_complete", json!({"execution_time": 0})));
    stream_response(frames.freeze())
}

/// Answers for a program that could not be started: events if the system refused it, else an error.
fn not_started(id: &CommandId, error: BoxError) -> Result<Response, Error> {
    let detail: Detail = error.detail().unwrap_or_default();
    let is_cwd = detail.field.as_deref() == Some("cwd");
    if detail.errno.is_some() && !is_cwd {
        let mut frames = BytesMut::from(&*init(id.as_str()));
        frames.extend_from_slice(&failure(&error));
        return Ok(stream_response(frames.freeze()));
    }
    Err(refused(error))
}

/// Returns the error of a command or a run. Another user is not served.
pub(super) fn refused(error: BoxError) -> Error {
    let detail: Detail = error.detail().unwrap_or_default();
    match error.code() {
        Code::Denied => Error::unsupported(error.message()),
        Code::NotFound if detail.errno.is_some() => Error::invalid(error.message()),
        _ => error.into(),
    }
}

/// Returns the working directory of a request, with `~` and variables expanded.
pub(super) async fn directory(
    context: &Context,
    box_id: &BoxId,
    cwd: Option<&str>,
) -> Result<Option<String>, Error> {
    let Some(cwd) = cwd.filter(|cwd| !cwd.is_empty()) else {
        return Ok(None);
    };
    // The start of a command checks the directory itself.
    if cwd.starts_with('/') && !cwd.contains('$') {
        return Ok(Some(cwd.to_owned()));
    }
    expanded(context, box_id, cwd).await.map(Some)
}

/// Returns an existing directory, with `~` and variables expanded.
pub(super) async fn expanded(
    context: &Context,
    box_id: &BoxId,
    cwd: &str,
) -> Result<String, Error> {
    let params = FileStatParams {
        follow: true,
        expand: true,
        ..FileStatParams::new(box_id.clone(), vec![cwd.to_owned()])
    };
    let runtime = context.runtime();
    let found = runtime
        .forward::<FileStat>(&context.caller, &params)
        .await?;
    match found.paths.into_values().next() {
        Some(FileOutcome::Stat(stat)) if stat.kind == FileKind::Directory => Ok(stat.path),
        _ => Err(Error::invalid(format!("cwd: {cwd:?} is not a directory"))),
    }
}

/// Ends a running command.
pub(super) async fn interrupt(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
) -> Result<StatusCode, Error> {
    let id = required(&params, "id")?;
    let command_id = CommandId::new(id).map_err(|_| not_running(id))?;
    let kill = CommandKillParams {
        signal: "TERM".to_owned(),
        grace_ms: Some(GRACE_MS),
        ..CommandKillParams::new(box_id, command_id)
    };
    signal(&context, kill).await
}

/// Sends a signal to a running command.
pub(super) async fn signal(
    context: &Context,
    kill: CommandKillParams,
) -> Result<StatusCode, Error> {
    let id = kill.command_id.clone();
    match context.runtime().kill_command(&context.caller, kill).await {
        Ok(killed) if !killed.already => Ok(StatusCode::OK),
        Ok(_) => Err(not_running(id.as_str())),
        Err(error) if error.code() == Code::NotFound => Err(not_running(id.as_str())),
        Err(error) => Err(error.into()),
    }
}

/// Returns the error for a command or a context that runs nothing.
pub(super) fn not_running(id: &str) -> Error {
    Error::runtime(format!("{id} is not running"))
}

/// Returns a command of a path.
pub(super) async fn find(context: &Context, box_id: BoxId, id: &str) -> Result<CommandInfo, Error> {
    let unknown = || Error::no_context("command", id);
    let command_id = CommandId::new(id).map_err(|_| unknown())?;
    let key = CommandKey {
        box_id: box_id.clone(),
        command_id,
    };
    match context.runtime().get_command(&context.caller, key).await {
        Err(error) if error.code() == Code::NotFound => Err(unknown()),
        // The holder of a capability has another name for the box than its owner.
        found => Ok(CommandInfo { box_id, ..found? }),
    }
}

pub(super) async fn status(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
) -> Result<Response, Error> {
    let info = find(&context, box_id, &id).await?;
    Ok(json_response(StatusCode::OK, &status_json(&info)))
}

/// The last parameter of a path; the box may be the first.
pub(super) struct LastId(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for LastId {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        type All = InPath<Vec<(String, String)>>;
        let InPath(mut all) = All::from_request_parts(parts, state).await?;
        Ok(Self(all.pop().map(|(_, value)| value).unwrap_or_default()))
    }
}

fn status_json(info: &CommandInfo) -> Value {
    let is_running = matches!(
        info.state,
        CommandState::Running | CommandState::Held | CommandState::Pending
    );
    let started = info.started_at.unwrap_or(info.created_at);
    let mut status = json!({
        "id": info.command_id,
        "content": info.program.to_string(),
        "running": is_running,
        "started_at": started.to_string(),
    });
    if let Some(exit) = &info.exit {
        let code = events::exit_code(exit);
        status["exit_code"] = code.into();
        if code != 0 {
            status["error"] = events::reason(exit).into();
        }
    }
    if let Some(ended) = info.ended_at {
        status["finished_at"] = ended.to_string().into();
    }
    status
}

/// Lists the commands of the sandbox.
pub(super) async fn inventory(context: Context, InBox(box_id): InBox) -> Result<Response, Error> {
    let params = CommandListParams {
        role: Some(Role::Command),
        ..CommandListParams::new(box_id)
    };
    let listed = context
        .runtime()
        .list_commands(&context.caller, params)
        .await?;
    let commands: Vec<Value> = listed.items.iter().map(status_json).collect();
    Ok(json_response(
        StatusCode::OK,
        &json!({"commands": commands}),
    ))
}

/// Returns the output of a command in the background, from a byte offset.
pub(super) async fn logs(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
    params: Params,
) -> Result<Response, Error> {
    let refused = |message: String| Error::invalid(message);
    let cursor: Option<u64> = params.parsed("cursor", "must be an offset in bytes")?;
    let info = match find(&context, box_id, &id).await {
        Err(error) if error.is_missing() => {
            return Err(refused(format!("command {id} not found")));
        }
        info => info?,
    };
    let kept = info.note.as_ref().and_then(Note::read::<CommandNote>);
    if !kept.is_some_and(|kept| kept.background) {
        return Err(refused(format!(
            "command {id} does not run in the background"
        )));
    }
    let cursor = cursor.unwrap_or(0).min(info.size.sum());
    let (output, next) = read_output(&context, &info, ReadFrom::Pos(cursor)).await?;
    let headers = [
        (CURSOR, next.to_string()),
        (CONTENT_TYPE, "text/plain; charset=utf-8".into()),
    ];
    Ok((headers, output.freeze()).into_response())
}

/// Reads the output that the log of a command holds; returns it with the position after it.
pub(super) async fn read_output(
    context: &Context,
    info: &CommandInfo,
    from: ReadFrom,
) -> Result<(BytesMut, u64), Error> {
    let params = CommandAttachParams {
        from,
        view: View::Bytes,
        until: Until {
            ms: Some(0),
            ..Until::default()
        },
        ..CommandAttachParams::new(info.box_id.clone(), info.command_id.clone())
    };
    let (sender, mut chunks) = mpsc::channel(8);
    let mut output = BytesMut::new();
    let collect = async {
        while let Some(chunk) = chunks.recv().await {
            if let CommandChunk::Bytes(piece) = chunk {
                output.extend_from_slice(&piece.data);
            }
        }
    };
    let read = context
        .runtime()
        .attach_command(&context.caller, params, sender);
    let (read, ()) = tokio::join!(read, collect);
    Ok((output, read?.read.pos))
}

/// Streams the events of a command after the one with this id.
pub(super) async fn resume(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
    params: Params,
) -> Result<Response, Error> {
    let after: Option<u64> = params.parsed("after_eid", "must be the id of an event")?;
    let info = find(&context, box_id, &id).await?;
    let after_eid = after.unwrap_or(0);
    if after_eid > info.size.sum() {
        let message = "after_eid: no event of the command has this id";
        return Err(Error::new(
            StatusCode::CONFLICT,
            "INVALID_REQUEST_BODY",
            message,
        ));
    }
    let attach = CommandAttachParams {
        from: ReadFrom::Pos(0),
        ..CommandAttachParams::new(info.box_id.clone(), info.command_id.clone())
    };
    let call = StreamedCall::new(|chunks| async move {
        if after.is_none() {
            // An attached reader gets no first chunk.
            let _ = chunks.send(CommandChunk::Started(Box::new(info))).await;
        }
        let runtime = context.runtime();
        runtime
            .attach_command(&context.caller, attach, chunks)
            .await
    });
    let events = Events::new(Output::Lines, None).after(after_eid);
    Ok(events.response(call))
}
