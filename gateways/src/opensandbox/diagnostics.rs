//! Logs and events of a sandbox, for people.

use std::fmt::Write as _;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{BoxEvent, BoxEventsParams, CommandListParams, ReadFrom};
use box_protocol::{BoxId, BoxInfo, BoxState, Role};
use serde_json::json;
use tokio::sync::mpsc;

use super::command::read_output;
use super::error::{Error, InPath};
use super::lifecycle::find;
use super::model;
use crate::http::body::Params;
use crate::http::context::Context;
use crate::http::refusal::{json_response, text_response};

/// The maximum bytes of a log in a response.
const MAX_LOG_BYTES: u64 = 1024 * 1024;

/// The media type of the texts.
const TEXT: &str = "text/plain; charset=utf-8";

/// Returns the log of the main command, the events of the sandbox, or both.
pub(super) async fn get(
    context: Context,
    InPath((id, kind)): InPath<(String, String)>,
    params: Params,
) -> Result<Response, Error> {
    let info = find(&context, &id).await?;
    let (text, truncated) = match kind.as_str() {
        "logs" => log(&context, &info).await?,
        "events" => (events(&context, &info.box_id).await?, false),
        "inspect" | "summary" => {
            let sandbox = model::sandbox(&info);
            let events = events(&context, &info.box_id).await?;
            let all = format!("{sandbox:#}\n\n{events}");
            return Ok(text_response(StatusCode::OK, TEXT, all));
        }
        _ => {
            let message = format!("diagnostics: {kind:?} is not one of logs and events");
            return Err(Error::new(StatusCode::NOT_FOUND, "NOT_FOUND", message));
        }
    };
    let Some(scope) = params.get("scope") else {
        return Ok(text_response(StatusCode::OK, TEXT, text));
    };
    let answer = json!({
        "sandboxId": info.box_id,
        "kind": kind,
        "scope": scope,
        "delivery": "inline",
        "contentType": TEXT,
        "contentLength": text.len(),
        "truncated": truncated,
        "content": text,
    });
    Ok(json_response(StatusCode::OK, &answer))
}

/// Returns the end of the output of the main command, and whether it is cut; the reason if the sandbox has failed.
async fn log(context: &Context, info: &BoxInfo) -> Result<(String, bool), Error> {
    // Before the start ends, a call about commands waits for it.
    if matches!(info.state, BoxState::Starting | BoxState::Failed) {
        let reason = info.reason.as_ref().map(|reason| format!("{reason}\n"));
        return Ok((reason.unwrap_or_default(), false));
    }
    let params = CommandListParams {
        role: Some(Role::Main),
        ..CommandListParams::new(info.box_id.clone())
    };
    let mut listed = context
        .runtime()
        .list_commands(&context.caller, params)
        .await?;
    let Some(main) = listed.items.pop() else {
        return Ok((String::new(), false));
    };
    let from = ReadFrom::Tail(MAX_LOG_BYTES);
    let (output, _) = read_output(context, &main, from).await?;
    let is_cut = main.size.sum() > output.len() as u64;
    Ok((String::from_utf8_lossy(&output).into_owned(), is_cut))
}

/// Returns the kept events of a sandbox, one in each line.
async fn events(context: &Context, id: &BoxId) -> Result<String, Error> {
    let params = BoxEventsParams {
        box_id: Some(id.clone()),
        ..BoxEventsParams::default()
    };
    let (sender, mut received) = mpsc::channel::<BoxEvent>(8);
    let mut text = String::new();
    let collect = async {
        while let Some(event) = received.recv().await {
            let _ = writeln!(text, "{} {} {}", event.at, event.kind, event.message);
        }
    };
    let read = context
        .runtime()
        .events(&context.caller, params, Some(sender));
    let (read, ()) = tokio::join!(read, collect);
    read?;
    Ok(text)
}
