//! Requests over HTTP. Each is complete in itself, with its caller and its default box.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use box_protocol::BoxId;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::GATEWAY;
use super::running::RunningCalls;
use super::server::McpServer;
use super::session::Session;
use crate::http::body::{Params, read};
use crate::http::context::{Context, InBox};
use crate::http::refusal::{Refusal, json_response};
use crate::http::routes::{Routes, default_and_one_box};
use crate::target::DefaultBox;

/// The maximum length of a request.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// The header that tells the clients of one caller apart.
///
/// Clients before 2026-07-28 cancel a call by its id in another request, and several clients may use the same ids. The
/// server knows nothing else by this header, and any value of it is valid.
const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");

/// Returns all routes.
pub fn routes() -> Vec<Routes> {
    let running = Arc::<RunningCalls>::default();
    default_and_one_box(
        ("mcp", any(default_box)),
        ("mcp_box", any(one_box)),
        running,
    )
}

/// Serves a client whose default box is in the query, or is that of its token.
async fn default_box(
    State(running): State<Arc<RunningCalls>>,
    context: Context,
    params: Params,
    request: Request,
) -> Result<Response, Refusal> {
    let default = DefaultBox::of_request(&context, &params, "mcp")?;
    serve(&running, context, default, request).await
}

/// Serves a client for the box in the path.
async fn one_box(
    State(running): State<Arc<RunningCalls>>,
    context: Context,
    InBox(id): InBox,
    request: Request,
) -> Result<Response, Refusal> {
    serve(&running, context, DefaultBox { id, spec: None }, request).await
}

async fn serve(
    running: &Arc<RunningCalls>,
    context: Context,
    default: DefaultBox,
    request: Request,
) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let bytes = read(body, MAX_BODY_BYTES).await?;
    let message = match parts.method {
        Method::POST => serde_json::from_slice(&bytes).unwrap_or_default(),
        _ => Message::default(),
    };
    let caller = context.caller.name();
    let key = |id: &Value| key(&caller, &parts.headers, id);
    if message.method == "notifications/cancelled" {
        let id = message.params.and_then(|params| params.request_id);
        if let Some(key) = id.as_ref().and_then(key) {
            running.cancel(&key);
        }
        return Ok(StatusCode::ACCEPTED.into_response());
    }
    let is_first = message.method == "initialize";
    let call = message.id.as_ref().and_then(key);
    let call = call.map(|key| running.begin(key));
    let server = McpServer::new(Session::of_request(context, default, &GATEWAY), call);
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_max_request_body_bytes(MAX_BODY_BYTES)
        // The layers in front have checked host and origin.
        .disable_allowed_hosts();
    let sessions = Arc::new(NeverSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
    let is_json = has_json(&parts.headers);
    let request = Request::from_parts(parts, Body::from(bytes.clone()));
    let mut response = service.handle(request).await.map(Body::new);
    // rmcp answers so to a body that is no message.
    if is_json && response.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
        return Ok(no_message(&bytes));
    }
    if is_first
        && response.status() == StatusCode::OK
        && let Ok(id) = HeaderValue::try_from(BoxId::fresh().as_str())
    {
        response.headers_mut().insert(SESSION, id);
    }
    Ok(response)
}

/// Returns whether the client declares JSON.
fn has_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/json"))
}

/// Returns the error for a body that is no JSON, or no message.
fn no_message(body: &[u8]) -> Response {
    let (code, message) = match serde_json::from_slice::<IgnoredAny>(body) {
        Err(error) => (-32700, format!("body: not JSON: {error}")),
        Ok(_) => (-32600, "body: not an MCP message".to_owned()),
    };
    let error = json!({"jsonrpc": "2.0", "id": null, "error": {"code": code, "message": message}});
    json_response(StatusCode::BAD_REQUEST, &error)
}

/// What this module reads of a message.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    id: Option<Value>,
    method: String,
    params: Option<MessageParams>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageParams {
    request_id: Option<Value>,
}

/// Returns what identifies a call; `None` for clients that cancel it by closing the response.
fn key(caller: &str, headers: &HeaderMap, id: &Value) -> Option<String> {
    let session = headers.get(SESSION)?.to_str().ok()?;
    Some(format!("{caller}\n{session}\n{id}"))
}
