//! `POST /execute`: a command and its whole output in one response.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{CommandChunk, OnDisconnect, StreamName, View};
use serde_json::json;

use super::super::errors::{ApiError, operation_error};
use super::{CLASS, End, Execute, Request, starting};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;
use crate::http::stream::Step;

/// The output of each stream that one response holds, in bytes.
const MAX_OUTPUT_BYTES: usize = 4 * 1024 * 1024;

/// `POST /execute`.
pub(in super::super) async fn run(
    context: Context,
    InBox(box_id): InBox,
    Json(mut request): Json<Execute>,
) -> Result<Response, ApiError> {
    request.close_stdin = true;
    request.pty = false;
    let params = request.into_params(box_id, View::Text);
    let mut params = params.map_err(|invalid| operation_error(invalid.into(), CLASS))?;
    // No client can attach to it, because no response names it before its end.
    params.on_disconnect = OnDisconnect::Kill;
    params.detached_ms = None;
    params.retain_ms = Some(0);
    let mut reading = starting(&context, params);
    let (mut stdout, mut stderr) = (String::new(), String::new());
    let mut has_begun = false;
    // The SDKs repeat a request after 502, so none follows the start of a command.
    let lost = |message: &str| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, CLASS, message);
    let ended = loop {
        match reading.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => {
                let stream = match piece.stream {
                    StreamName::Stdout => &mut stdout,
                    StreamName::Stderr => &mut stderr,
                };
                if stream.len() + piece.data.len() > MAX_OUTPUT_BYTES {
                    let message = format!(
                        "the output exceeds {MAX_OUTPUT_BYTES} bytes; run the command over a websocket"
                    );
                    return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, CLASS, message));
                }
                stream.push_str(&piece.data);
            }
            Step::Chunk(_) => has_begun = true,
            Step::Idle => {}
            Step::End(Err(error)) if has_begun => return Err(lost(error.message())),
            Step::End(Err(error)) => return Err(operation_error(error, CLASS)),
            Step::End(ended) => break ended,
        }
    };
    match End::of(ended, &context, Request::Execute) {
        End::Exit { exit_code } => {
            let body = json!({"stdout": stdout, "stderr": stderr, "exit_code": exit_code});
            Ok(json_response(StatusCode::OK, &body))
        }
        End::Error { error, .. } => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, CLASS, error)),
        End::Lost => Err(lost("the server stops")),
    }
}
