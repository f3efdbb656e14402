//! Code in contexts: interpreters that keep their state.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{
    AttachOptions, CommandKillParams, Language, ShellCreateParams, ShellDeleteParams, ShellInfo,
    ShellListParams, ShellRunParams,
};
use box_protocol::{BoxId, CommandId, Note, ShellId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::GATEWAY;
use super::command::{LastId, directory, not_running, signal};
use super::error::{Error, required};
use super::events::{Events, Output};
use super::session::{in_shell, is_missing_shell};
use crate::http::body::{Json, Params};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;
use crate::http::stream::StreamedCall;

/// Marks the shell of a context.
#[derive(Debug, Serialize, Deserialize)]
struct ContextNote {
    code: String,
}

/// Returns the language of a context by its name in the protocol.
fn language(name: &str) -> Result<Language, Error> {
    match name {
        "python" => Ok(Language::Python),
        "javascript" => Ok(Language::JavaScript),
        "bash" => Ok(Language::Bash),
        _ => Err(Error::unsupported(format!(
            "language: {name:?} is not supported by this server; use python, javascript or bash"
        ))),
    }
}

/// Returns the id of the context that runs without one use.
fn default_context(language: &str) -> String {
    format!("default-{language}")
}

/// The command by which clients ask whether the code runtime is ready: a connection to Jupyter's port.
///
/// This server has no Jupyter, so it answers the question itself.
const READINESS_PROBE: &str =
    "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}' && exit 0 || exit 1";

/// Returns whether a command asks for the readiness of the code runtime.
pub(super) fn is_readiness_probe(command: &str) -> bool {
    command.trim() == READINESS_PROBE
}

/// Checks the code runtime: it starts the interpreter of the default context.
pub(super) async fn check_ready(context: &Context, box_id: BoxId) -> Result<(), Error> {
    let name = "python";
    let id = ShellId::new(default_context(name))?;
    open(context, box_id, id, name, None).await.map(drop)
}

#[derive(Debug, Deserialize)]
pub(super) struct ContextRequest {
    language: String,
    cwd: Option<String>,
}

pub(super) async fn create(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<ContextRequest>,
) -> Result<Response, Error> {
    let id = ShellId::fresh();
    let cwd = request.cwd.as_deref();
    let info = open(&context, box_id, id, &request.language, cwd).await?;
    Ok(json_response(StatusCode::OK, &context_json(&info)))
}

/// Creates a context, or finds the one with this id.
async fn open(
    context: &Context,
    box_id: BoxId,
    id: ShellId,
    name: &str,
    cwd: Option<&str>,
) -> Result<ShellInfo, Error> {
    let kept = ContextNote {
        code: name.to_owned(),
    };
    let params = ShellCreateParams {
        shell_id: Some(id),
        language: language(name)?,
        cwd: directory(context, &box_id, cwd).await?,
        note: Some(Note::new(&kept)?),
        ..ShellCreateParams::new(box_id.clone())
    };
    let created = context
        .runtime()
        .create_shell(&context.caller, params)
        .await?;
    Ok(ShellInfo {
        box_id,
        ..created.info
    })
}

/// Returns the language of a context; `None` for other shells.
pub(super) fn language_of(info: &ShellInfo) -> Option<String> {
    let kept = info.note.as_ref()?.read::<ContextNote>()?;
    Some(kept.code)
}

fn context_json(info: &ShellInfo) -> Value {
    json!({"id": info.shell_id, "language": language_of(info)})
}

async fn contexts(
    context: &Context,
    box_id: BoxId,
    shell_id: Option<ShellId>,
) -> Result<Vec<ShellInfo>, Error> {
    let params = ShellListParams {
        box_id: box_id.clone(),
        shell_id,
    };
    let listed = context.runtime().list_shells(&context.caller, params).await;
    let mut items = match listed {
        Err(error) if is_missing_shell(&error) => Vec::new(),
        listed => listed?.items,
    };
    items.retain(|info| language_of(info).is_some());
    for info in &mut items {
        // The holder of a capability has another name for the box than its owner.
        info.box_id = box_id.clone();
    }
    Ok(items)
}

async fn find(context: &Context, box_id: BoxId, id: &str) -> Result<ShellInfo, Error> {
    let unknown = || Error::no_context("context", id);
    let shell_id = ShellId::new(id).map_err(|_| unknown())?;
    let mut found = contexts(context, box_id, Some(shell_id)).await?;
    found.pop().ok_or_else(unknown)
}

pub(super) async fn list(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
) -> Result<Response, Error> {
    let wanted = params.get("language");
    let found = contexts(&context, box_id, None).await?;
    let found: Vec<Value> = found
        .iter()
        .filter(|info| wanted.is_none() || language_of(info).as_deref() == wanted)
        .map(context_json)
        .collect();
    Ok(json_response(StatusCode::OK, &json!(found)))
}

pub(super) async fn get(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
) -> Result<Response, Error> {
    let info = find(&context, box_id, &id).await?;
    Ok(json_response(StatusCode::OK, &context_json(&info)))
}

pub(super) async fn delete(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
) -> Result<StatusCode, Error> {
    let info = find(&context, box_id, &id).await?;
    end(&context, info).await?;
    Ok(StatusCode::OK)
}

pub(super) async fn delete_all(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
) -> Result<StatusCode, Error> {
    let language = required(&params, "language")?;
    for info in contexts(&context, box_id, None).await? {
        if language_of(&info).as_deref() == Some(language) {
            end(&context, info).await?;
        }
    }
    Ok(StatusCode::OK)
}

async fn end(context: &Context, info: ShellInfo) -> Result<(), Error> {
    let params = ShellDeleteParams {
        box_id: info.box_id,
        shell_id: info.shell_id,
    };
    context
        .runtime()
        .delete_shell(&context.caller, params)
        .await?;
    Ok(())
}

#[derive(Debug, Deserialize)]
pub(super) struct RunRequest {
    code: String,
    context: Option<RunContext>,
}

#[derive(Debug, Default, Deserialize)]
struct RunContext {
    id: Option<String>,
    language: Option<String>,
}

/// Runs code in a context, and streams its events.
pub(super) async fn run(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<RunRequest>,
) -> Result<Response, Error> {
    if request.code.trim().is_empty() {
        return Err(Error::invalid("code: must not be blank"));
    }
    let asked = request.context.unwrap_or_default();
    let name = asked.language.as_deref().unwrap_or("python");
    let asked_id = asked.id.as_deref().filter(|id| !id.is_empty());
    let info = if let Some(id) = asked_id {
        find(&context, box_id, id).await?
    } else {
        let id = ShellId::new(default_context(name))?;
        open(&context, box_id, id, name, None).await?
    };
    let id = CommandId::fresh();
    let params = ShellRunParams {
        command_id: Some(id.clone()),
        attach: Some(AttachOptions::default()),
        ..ShellRunParams::new(info.box_id.clone(), info.shell_id.clone(), request.code)
    };
    let running = context.clone();
    let call = StreamedCall::new(|chunks| async move {
        running.run_in_shell(&GATEWAY, params, Some(chunks)).await
    });
    let call = call.begun().await;
    let call = call.map_err(|error| in_shell(info.shell_id.as_str(), error))?;
    let count = count(&context, info, &id).await;
    Ok(Events::new(Output::Pieces, count).response(call))
}

/// Returns the number of a run that has begun. Runs that waited before it count, too.
async fn count(context: &Context, info: ShellInfo, run: &CommandId) -> Option<u64> {
    let found = contexts(context, info.box_id, Some(info.shell_id)).await;
    let info = found.ok()?.pop()?;
    // A short run may have ended already, and the next one begun.
    let is_next = info.current.is_some_and(|current| current != *run);
    Some(info.executions.saturating_sub(u64::from(is_next)))
}

/// Interrupts an execution, or the current one of a context.
pub(super) async fn interrupt(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
) -> Result<StatusCode, Error> {
    let id = required(&params, "id")?;
    let command_id = match find(&context, box_id.clone(), id).await {
        Ok(info) => info.current.ok_or_else(|| not_running(id))?,
        Err(error) if error.is_missing() => CommandId::new(id).map_err(|_| not_running(id))?,
        Err(error) => return Err(error),
    };
    let kill = CommandKillParams {
        signal: "INT".to_owned(),
        ..CommandKillParams::new(box_id, command_id)
    };
    signal(&context, kill).await
}
