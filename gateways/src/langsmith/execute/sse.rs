//! `execute/stream/…`: a command as server-sent events. Its output is base64, and its offsets count raw bytes.

use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::actions::{CommandChunk, StreamName, View};
use box_protocol::{Code, CommandInfo};
use futures::{Stream, StreamExt as _, stream};
use serde_json::{Value, json};

use super::super::errors::{ApiError, operation_error};
use super::socket::RESTARTING;
use super::{CLASS, End, Execute, Reading, Reconnect, Request, attaching, starting};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};
use crate::http::framing::{SSE_KEEPALIVE, sse};
use crate::http::stream::Step;

/// The time without output after which the server sends a comment.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// `POST /execute/stream/start`.
pub(in super::super) async fn start(
    context: Context,
    InBox(box_id): InBox,
    Json(mut request): Json<Execute>,
) -> Result<Response, ApiError> {
    request.close_stdin = true;
    let params = request.into_params(box_id, View::Bytes);
    let params = params.map_err(|invalid| operation_error(invalid.into(), CLASS))?;
    let reading = starting(&context, params).begun().await;
    let reading = reading.map_err(|error| operation_error(error, CLASS))?;
    Ok(streamed(context, Request::Execute, reading, None))
}

/// `POST /execute/stream/resume`.
pub(in super::super) async fn resume(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<Reconnect>,
) -> Result<Response, ApiError> {
    let (key, info) = request.find(&context, box_id).await.map_err(|error| {
        if error.code() == Code::NotFound {
            return ApiError::new(StatusCode::NOT_FOUND, "CommandNotFound", error.message());
        }
        operation_error(error, CLASS)
    })?;
    let reading = attaching(&context, &key, request.offsets(), View::Bytes);
    Ok(streamed(context, Request::Reconnect, reading, Some(&info)))
}

/// Returns the response that reads a command; the command is given if its start is not part of the reading.
fn streamed(
    context: Context,
    request: Request,
    reading: Reading,
    known: Option<&CommandInfo>,
) -> Response {
    let of_stream = context.clone();
    let body = reading.into_body(Some(KEEPALIVE), move |step| match step {
        Step::Chunk(CommandChunk::Started(info)) => started(&info),
        Step::Chunk(CommandChunk::Bytes(piece)) => {
            let data = STANDARD.encode(&*piece.data);
            event(
                name(piece.stream),
                &json!({"offset": piece.offset, "data": data}),
            )
        }
        Step::Chunk(_) => Bytes::new(),
        Step::Idle => SSE_KEEPALIVE,
        Step::End(ended) => {
            let size = ended.as_ref().ok().map(|info| info.size);
            let mut events = Vec::new();
            for stream in [StreamName::Stdout, StreamName::Stderr] {
                if let Some(size) = size {
                    let end = json!({"stream": name(stream), "offset": size.of(stream)});
                    events.extend(event("stream_end", &end));
                }
            }
            events.extend(match End::of(ended, &context, request) {
                End::Exit { exit_code } => event("exit", &json!({"exit_code": exit_code})),
                End::Error { error_type, error } => {
                    event("error", &json!({"error_type": error_type, "error": error}))
                }
                End::Lost => lost(),
            });
            events.into()
        }
    });
    // The start of a known command goes out before its next output.
    let known = stream::iter(known.map(|info| Ok(started(info))));
    let output = until_restart(of_stream, body.into_data_stream());
    let body = Body::from_stream(known.chain(output));
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, body).into_response()
}

/// Ends a stream when the server stops and keeps its boxes: the client attaches to the command again.
fn until_restart(
    context: Context,
    output: BodyDataStream,
) -> impl Stream<Item = Result<Bytes, axum::Error>> {
    let restart = Box::pin(async move {
        if context.closing().await != RESTARTING {
            std::future::pending::<()>().await;
        }
    });
    stream::unfold(Some((output, restart)), async |state| {
        let (mut output, mut restart) = state?;
        tokio::select! {
            biased;
            () = &mut restart => Some((Ok(lost()), None)),
            piece = output.next() => Some((piece?, Some((output, restart)))),
        }
    })
}

/// The event after which the client attaches to the command again.
fn lost() -> Bytes {
    let error = "the server is stopping, or cannot reach the box now";
    event(
        "error",
        &json!({"error_type": "ServerShuttingDown", "error": error}),
    )
}

fn started(info: &CommandInfo) -> Bytes {
    event(
        "started",
        &json!({"command_id": info.command_id, "pid": info.pid}),
    )
}

fn event(name: &str, data: &Value) -> Bytes {
    sse(Some(name), None, &data.to_string())
}

fn name(stream: StreamName) -> &'static str {
    match stream {
        StreamName::Stdout => "stdout",
        StreamName::Stderr => "stderr",
    }
}
