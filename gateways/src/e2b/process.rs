//! `process.Process`: commands with their input and output.
//!
//! A command outlives the call that started it. Its deadline is that of the call.

use std::collections::BTreeMap;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::actions::{
    AttachOptions, CommandAttachParams, CommandChunk, CommandInputParams, CommandKillParams,
    CommandListParams, CommandStartParams, OnDisconnect, ReadFrom, Stdin, TerminalSize, Until,
    View,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{
    Blob, BoxError, BoxId, CommandInfo, Invalid, MAX_CHUNK_BYTES, Note, Program, Role,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::GATEWAY;
use super::connect::{self, Messages};
use super::entries::absolute;
use super::error::EnvdError;
use super::events::{Ended, answer};
use super::spec::env;
use crate::http::body::{Json, OptionalJson, from_json};
use crate::http::context::{Context, InBox};
use crate::http::stream::StreamedCall;

type Result<T = Response> = std::result::Result<T, EnvdError>;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/process.Process/Start", post(start))
        .route("/process.Process/Connect", post(attach))
        .route("/process.Process/List", post(list))
        .route("/process.Process/SendInput", post(send_input))
        .route("/process.Process/StreamInput", post(stream_input))
        .route("/process.Process/CloseStdin", post(close_stdin))
        .route("/process.Process/SendSignal", post(send_signal))
        .route("/process.Process/Update", post(update))
}

/// What this gateway stores with a command.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct CommandNote {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    #[serde(default)]
    pty: bool,
}

impl CommandNote {
    fn of(info: &CommandInfo) -> Self {
        let note = info.note.as_ref().and_then(Note::read);
        note.unwrap_or_default()
    }
}

#[derive(Debug, Deserialize)]
struct Start {
    process: Config,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Config {
    cmd: String,
    args: Option<Vec<String>>,
    envs: Option<BTreeMap<String, String>>,
    cwd: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Pty {
    size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Size {
    cols: u32,
    rows: u32,
}

impl Pty {
    /// Returns the size; a size of 0 is that of a usual terminal.
    fn size(&self) -> Result<TerminalSize> {
        let (cols, rows) = self.size.as_ref().map_or((0, 0), |it| (it.cols, it.rows));
        let side = |value: u32, usual: u16| match value {
            0 => Ok(usual),
            value => {
                let invalid = |_| EnvdError::invalid("pty.size: must be at most 65535");
                u16::try_from(value).map_err(invalid)
            }
        };
        Ok(TerminalSize {
            cols: side(cols, 80)?,
            rows: side(rows, 24)?,
        })
    }
}

async fn start(context: Context, InBox(box_id): InBox, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let started = async {
        let request: Start = connect::request(&parts, body).await?;
        let params = start_params(box_id, &parts.headers, request)?;
        let is_pty = params.pty.is_some();
        let held = context.clone();
        let call = StreamedCall::new(move |chunks| async move {
            let started = held.start_command(&GATEWAY, params, Some(chunks)).await?;
            let why = started.read.map(|read| read.why);
            Ok(Ended {
                info: started.info,
                why,
            })
        });
        Ok((call.begun().await?, is_pty))
    };
    answer(started.await, &parts)
}

fn start_params(box_id: BoxId, headers: &HeaderMap, request: Start) -> Result<CommandStartParams> {
    let Config {
        cmd,
        args,
        envs,
        cwd,
    } = request.process;
    let program = Program::argv(std::iter::once(cmd).chain(args.unwrap_or_default()));
    let program =
        program.map_err(|invalid| Invalid::new("process.cmd", invalid.rule().to_owned()))?;
    let note = CommandNote {
        tag: request.tag,
        pty: request.pty.is_some(),
    };
    let user = connect::user(headers);
    let stdin = if request.stdin.unwrap_or(true) || request.pty.is_some() {
        Stdin::Open
    } else {
        Stdin::Closed
    };
    let cwd = cwd.filter(|cwd| !cwd.is_empty());
    Ok(CommandStartParams {
        cwd: cwd.map(|cwd| absolute(&cwd, user.as_deref())),
        env: env("process.envs", envs.unwrap_or_default())?,
        user,
        stdin,
        pty: request.pty.map(|pty| pty.size()).transpose()?,
        timeout_ms: connect::timeout_ms(headers)?,
        on_disconnect: OnDisconnect::Keep,
        note: Some(Note::new(&note)?),
        attach: Some(AttachOptions {
            view: View::Bytes,
            until: Until::default(),
        }),
        ..CommandStartParams::new(box_id, program)
    })
}

#[derive(Debug, Deserialize)]
struct Attach {
    process: Selector,
}

/// A process by its id or its tag.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

async fn attach(context: Context, InBox(box_id): InBox, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let attached = async {
        let request: Attach = connect::request(&parts, body).await?;
        let info = find(&context, &box_id, &request.process).await?;
        let is_pty = CommandNote::of(&info).pty;
        let params = CommandAttachParams {
            // A second reader gets what comes after it.
            from: ReadFrom::Tail(0),
            view: View::Bytes,
            until: Until {
                ms: connect::timeout_ms(&parts.headers)?,
                ..Until::default()
            },
            ..CommandAttachParams::new(box_id, info.command_id.clone())
        };
        let held = context.clone();
        let call = StreamedCall::new(move |chunks| async move {
            let started = CommandChunk::Started(Box::new(info));
            // The receiver exists as long as this call.
            let _ = chunks.send(started).await;
            let attached = held.runtime().attach_command(&held.caller, params, chunks);
            let attached = attached.await?;
            Ok(Ended {
                info: attached.info,
                why: Some(attached.read.why),
            })
        });
        Ok((call.begun().await?, is_pty))
    };
    answer(attached.await, &parts)
}

/// Returns the running processes that clients see.
async fn running(context: &Context, box_id: &BoxId, pid: Option<u32>) -> Result<Vec<CommandInfo>> {
    let params = CommandListParams {
        running: Some(true),
        pid,
        ..CommandListParams::new(box_id.clone())
    };
    let listed = context.runtime().list_commands(&context.caller, params);
    let mut items = listed.await?.items;
    items.retain(|info| !matches!(info.role, Role::Watch | Role::Run));
    Ok(items)
}

async fn find(context: &Context, box_id: &BoxId, process: &Selector) -> Result<CommandInfo> {
    let found = running(context, box_id, process.pid).await?.into_iter();
    let found = match (process.pid, &process.tag) {
        (Some(_), _) => found.last(),
        (None, Some(tag)) => found
            .filter(|info| CommandNote::of(info).tag.as_ref() == Some(tag))
            .last(),
        (None, None) => return Err(EnvdError::invalid("process: must have a pid or a tag")),
    };
    found.ok_or_else(|| {
        let name = process.pid.map(|pid| format!("pid {pid}"));
        let name = name.or_else(|| process.tag.as_ref().map(|tag| format!("tag {tag:?}")));
        let name = name.unwrap_or_default();
        EnvdError::not_found(format!("process with {name} not found"))
    })
}

async fn list(
    context: Context,
    InBox(box_id): InBox,
    OptionalJson(_): OptionalJson<Value>,
) -> Result {
    let items = running(&context, &box_id, None).await?;
    let items = items.iter().filter_map(|info| {
        let words = match &info.program {
            Program::Argv { 0: words, .. } => words.clone(),
            Program::Text { 0: text, .. } => vec![text.clone()],
        };
        let (cmd, args) = words.split_first()?;
        let mut item = json!({
            "pid": info.pid?,
            "config": {"cmd": cmd, "args": args, "cwd": info.cwd},
        });
        if let Some(tag) = CommandNote::of(info).tag {
            item["tag"] = json!(tag);
        }
        Some(item)
    });
    let items: Vec<Value> = items.collect();
    Ok(connect::unary(&json!({"processes": items})))
}

#[derive(Debug, Deserialize)]
struct SendInput {
    process: Selector,
    input: Input,
}

/// Input, in base64.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

impl Input {
    fn bytes(&self) -> Result<Bytes> {
        let text = self.stdin.as_ref().or(self.pty.as_ref());
        let text = text.ok_or_else(|| EnvdError::invalid("input: must have stdin or pty"))?;
        let bytes = STANDARD.decode(text);
        let bytes = bytes.map_err(|_| EnvdError::invalid("input: must be base64"))?;
        Ok(bytes.into())
    }
}

/// Writes input in pieces that fit into a message.
async fn write(context: &Context, info: &CommandInfo, box_id: &BoxId, input: Bytes) -> Result<()> {
    for piece in input.chunks(MAX_CHUNK_BYTES) {
        let mut params = CommandInputParams::new(box_id.clone(), info.command_id.clone());
        params.data = Some(Blob::from(Bytes::copy_from_slice(piece)));
        give(context, params).await?;
    }
    Ok(())
}

async fn give(context: &Context, params: CommandInputParams) -> Result<()> {
    let given = context.runtime().input_command(&context.caller, params);
    given
        .await
        .map(drop)
        .map_err(|error| ended_input(error).into())
}

/// A conflict here is one of the command, not of the box.
fn ended_input(error: BoxError) -> BoxError {
    let detail: Detail = error.detail().unwrap_or_default();
    if error.code() == box_protocol::Code::Conflict && detail.subject.is_none() {
        return error.with_detail(&detail.of(Subject::Command));
    }
    error
}

async fn send_input(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<SendInput>,
) -> Result {
    let info = find(&context, &box_id, &request.process).await?;
    write(&context, &info, &box_id, request.input.bytes()?).await?;
    Ok(connect::unary(&json!({})))
}

/// A message of a stream of input.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct InputMessage {
    start: Option<Attach>,
    data: Option<InputData>,
}

#[derive(Debug, Deserialize)]
struct InputData {
    input: Input,
}

async fn stream_input(context: Context, InBox(box_id): InBox, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let read = read_input(&context, &box_id, &parts.headers, body);
    match read.await {
        Ok(()) => {
            let mut answer = connect::message(b"{}").to_vec();
            answer.extend(connect::end(None));
            connect::stream(Body::from(answer))
        }
        Err(error) => connect::failed(error),
    }
}

async fn read_input(
    context: &Context,
    box_id: &BoxId,
    headers: &HeaderMap,
    body: Body,
) -> Result<()> {
    let mut messages = Messages::new(headers, body)?;
    let mut process = None;
    while let Some(message) = messages.next().await? {
        let message: InputMessage = from_json(&message)?;
        if let Some(start) = message.start {
            process = Some(find(context, box_id, &start.process).await?);
        }
        if let Some(data) = message.data {
            let missing = || EnvdError::invalid("body: the first message must name a process");
            let info = process.as_ref().ok_or_else(missing)?;
            write(context, info, box_id, data.input.bytes()?).await?;
        }
    }
    Ok(())
}

async fn close_stdin(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<Attach>,
) -> Result {
    let info = find(&context, &box_id, &request.process).await?;
    if CommandNote::of(&info).pty {
        let message = "process: a terminal has no stdin to close; send ^D";
        return Err(EnvdError::new("failed_precondition", message));
    }
    let mut params = CommandInputParams::new(box_id, info.command_id);
    params.close = true;
    give(&context, params).await?;
    Ok(connect::unary(&json!({})))
}

#[derive(Debug, Deserialize)]
struct SendSignal {
    process: Selector,
    #[serde(default)]
    signal: Value,
}

async fn send_signal(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<SendSignal>,
) -> Result {
    let signal = match (request.signal.as_str(), request.signal.as_u64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => "KILL",
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => "TERM",
        _ => {
            let message = "signal: must be SIGNAL_SIGTERM or SIGNAL_SIGKILL";
            return Err(EnvdError::unimplemented(message));
        }
    };
    let info = find(&context, &box_id, &request.process).await?;
    let params = CommandKillParams {
        signal: signal.to_owned(),
        ..CommandKillParams::new(box_id, info.command_id)
    };
    let killed = context.runtime().kill_command(&context.caller, params);
    killed.await?;
    Ok(connect::unary(&json!({})))
}

#[derive(Debug, Deserialize)]
struct Update {
    process: Selector,
    pty: Option<Pty>,
}

async fn update(context: Context, InBox(box_id): InBox, Json(request): Json<Update>) -> Result {
    let info = find(&context, &box_id, &request.process).await?;
    if let Some(pty) = request.pty {
        let mut params = CommandInputParams::new(box_id, info.command_id);
        params.size = Some(pty.size()?);
        give(&context, params).await?;
    }
    Ok(connect::unary(&json!({})))
}
