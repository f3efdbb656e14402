//! Sessions: a shell whose directory and variables stay.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{
    AttachOptions, FileMkdir, FileMkdirParams, Language, OutputMode, ShellCreateParams,
    ShellDeleteParams, ShellListParams, ShellRunParams,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, Code, ShellId};
use serde::Deserialize;
use serde_json::json;

use super::command::{LastId, directory, expanded, refused};
use super::error::Error;
use super::events::{Events, Output};
use super::{GATEWAY, code};
use crate::http::body::{Json, OptionalJson};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;
use crate::http::stream::StreamedCall;

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    cwd: Option<String>,
}

/// Creates a session. A missing directory is created.
pub(super) async fn create(
    context: Context,
    InBox(box_id): InBox,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Error> {
    let cwd = request.cwd.filter(|cwd| !cwd.is_empty());
    if let Some(cwd) = &cwd {
        let params = FileMkdirParams {
            expand: true,
            ..FileMkdirParams::new(box_id.clone(), cwd.as_str())
        };
        let runtime = context.runtime();
        runtime
            .forward::<FileMkdir>(&context.caller, &params)
            .await?;
    }
    let mut params = ShellCreateParams {
        cwd: directory(&context, &box_id, cwd.as_deref()).await?,
        output: OutputMode::Merged,
        ..ShellCreateParams::new(box_id)
    };
    let runtime = context.runtime();
    let created = runtime.create_shell(&context.caller, params.clone()).await;
    let created = match created {
        Err(error) if error.code() == Code::Unsupported => {
            params.language = Language::Sh;
            runtime.create_shell(&context.caller, params).await
        }
        created => created,
    };
    let id = created?.info.shell_id;
    Ok(json_response(StatusCode::OK, &json!({"session_id": id})))
}

#[derive(Debug, Deserialize)]
pub(super) struct RunRequest {
    command: String,
    cwd: Option<String>,
    /// Milliseconds.
    timeout: Option<u64>,
}

/// Runs a text in a session. Its directory stays the session's.
pub(super) async fn run(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
    Json(request): Json<RunRequest>,
) -> Result<Response, Error> {
    if request.command.trim().is_empty() {
        return Err(Error::invalid("command: must not be blank"));
    }
    let shell_id = shell_id(&id)?;
    let cwd = match request.cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
        Some(cwd) => Some(expanded(&context, &box_id, cwd).await?),
        None => None,
    };
    check_session(&context, &box_id, &shell_id).await?;
    let params = ShellRunParams {
        cwd_stays: cwd.is_some(),
        cwd,
        timeout_ms: request.timeout.filter(|time| *time > 0),
        attach: Some(AttachOptions::default()),
        ..ShellRunParams::new(box_id, shell_id, request.command)
    };
    let call = StreamedCall::new(|chunks| async move {
        context.run_in_shell(&GATEWAY, params, Some(chunks)).await
    });
    let call = call.begun().await.map_err(|error| in_shell(&id, error))?;
    Ok(Events::new(Output::NonBlankLines, None).response(call))
}

/// Refuses the shell of a code context, which is no session.
async fn check_session(context: &Context, box_id: &BoxId, id: &ShellId) -> Result<(), Error> {
    let params = ShellListParams {
        box_id: box_id.clone(),
        shell_id: Some(id.clone()),
    };
    let listed = context.runtime().list_shells(&context.caller, params).await;
    let listed = listed.map_err(|error| in_shell(id.as_str(), error))?;
    if listed
        .items
        .iter()
        .any(|info| code::language_of(info).is_some())
    {
        return Err(Error::no_context("session", id.as_str()));
    }
    Ok(())
}

/// Returns the error of a call about a shell.
pub(super) fn in_shell(id: &str, error: BoxError) -> Error {
    if is_missing_shell(&error) {
        return Error::no_context("session", id);
    }
    refused(error)
}

/// Returns whether an error means that there is no such shell.
pub(super) fn is_missing_shell(error: &BoxError) -> bool {
    let detail: Detail = error.detail().unwrap_or_default();
    error.code() == Code::NotFound && detail.subject == Some(Subject::Shell)
}

/// Returns the shell of a path. An invalid id is one that no shell has.
pub(super) fn shell_id(id: &str) -> Result<ShellId, Error> {
    ShellId::new(id).map_err(|_| Error::no_context("session", id))
}

pub(super) async fn delete(
    context: Context,
    InBox(box_id): InBox,
    LastId(id): LastId,
) -> Result<StatusCode, Error> {
    let shell_id = shell_id(&id)?;
    check_session(&context, &box_id, &shell_id).await?;
    let params = ShellDeleteParams { box_id, shell_id };
    let deleted = context
        .runtime()
        .delete_shell(&context.caller, params)
        .await?;
    if deleted.deleted {
        Ok(StatusCode::OK)
    } else {
        Err(Error::no_context("session", &id))
    }
}
