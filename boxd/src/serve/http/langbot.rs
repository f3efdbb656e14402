//! LangBot's routes: its RPC connections, and the relay of a managed process.

use std::sync::Arc;

use box_gateways::langbot::{GENERATION_HEADER, INSTANCE_HEADER, RelayRefused, WORKSPACE_HEADER};
use box_rpc::Caller;
use box_rpc::{ControlPolicy, Limits, Router};
use box_transports::connection_limit::ConnectionPermit;
use hyper::header::{HeaderName, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use hyper::{HeaderMap, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use serde_json::json;

use super::body::IncomingRequest;
use super::response::{HttpResponse, Refusal, RefusalReason, json_response as response};
use super::routes::Route;
use super::state::HttpState;
use super::websocket::{HANDSHAKE, key, lists, switching};

/// The process id of a path that names none.
const DEFAULT: &str = "default";

/// The subprotocol of relays.
const MCP: &str = "mcp";

/// Returns whether LangBot's own port serves this route.
pub(super) fn has(route: Route) -> bool {
    matches!(
        route,
        Route::Healthz | Route::Readyz | Route::Rpc | Route::Relay
    )
}

/// LangBot's actions, and the policy for its control requests.
type LangBotRouter = (Router, Arc<dyn ControlPolicy>);

/// Returns LangBot's actions for a connection that names its LangBot instance.
///
/// On LangBot's own port every connection must name one.
pub(super) fn serve(
    state: &HttpState,
    headers: &HeaderMap,
    caller: &Caller,
) -> Result<Option<LangBotRouter>, Refusal> {
    let instance = headers.get(HeaderName::from_static(INSTANCE_HEADER));
    if instance.is_none() && !state.only_langbot {
        return Ok(None);
    }
    let instance = instance
        .and_then(|value| value.to_str().ok())
        .map(str::trim);
    let installation = instance.and_then(|instance| state.langbot.installation(caller, instance));
    let installation = installation.ok_or_else(unknown_instance)?;
    Ok(Some(installation.serve(state.auth.tokens.is_some())))
}

fn unknown_instance() -> Refusal {
    Refusal::new(RefusalReason::UnknownInstance, "Unauthorized")
}

/// Attaches to the process that the path names, and answers with the upgrade.
pub(super) async fn relay(
    state: &Arc<HttpState>,
    request: &mut IncomingRequest,
    caller: Caller,
    permit: ConnectionPermit,
) -> Result<HttpResponse, Refusal> {
    let key = key(request)?;
    let attached = {
        let header = |name: &'static str| {
            let value = request.headers().get(HeaderName::from_static(name));
            value
                .and_then(|value| value.to_str().ok())
                .map_or("", str::trim)
        };
        let installation = state
            .langbot
            .known_installation(&caller, header(INSTANCE_HEADER));
        let installation = installation.ok_or_else(unknown_instance)?;
        let (session, process) = parse_path(request.uri().path());
        let (workspace, generation) = (header(WORKSPACE_HEADER), header(GENERATION_HEADER));
        installation
            .relay(workspace, generation, &session, &process)
            .await
    };
    let relay = match attached {
        Ok(relay) => relay,
        Err(RelayRefused::Unauthorized) => return Err(unknown_instance()),
        Err(refused) => {
            let (class, message) = refused.class_and_text();
            let body = json!({"error": {"code": class, "message": message}});
            return Ok(response(StatusCode::BAD_REQUEST, &body));
        }
    };
    let offered = lists(request.headers(), &SEC_WEBSOCKET_PROTOCOL, MCP);
    let upgraded = hyper::upgrade::on(request);
    let state = Arc::clone(state);
    tokio::spawn(async move {
        if let Ok(Ok(upgraded)) = tokio::time::timeout(HANDSHAKE, upgraded).await {
            let closing = state.sockets.closing();
            let stream = TokioIo::new(upgraded);
            relay.run(stream, &Limits::network(), closing).await;
        }
        drop(permit);
    });
    let mut response = switching(key);
    if offered {
        let mcp = HeaderValue::from_static(MCP);
        response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, mcp);
    }
    Ok(response)
}

/// Returns the decoded box and process of a relay's path.
fn parse_path(path: &str) -> (String, String) {
    let segments: Vec<_> = path.trim_end_matches('/').split('/').collect();
    // `/v1/sessions/{session}/managed-process/{process}/ws`, or without the process.
    let session = segments.get(3).copied().unwrap_or_default();
    let process = match segments.get(5) {
        Some(process) if segments.len() > 6 => *process,
        _ => DEFAULT,
    };
    let decoded = |segment: &str| percent_decode_str(segment).decode_utf8_lossy().into_owned();
    (decoded(session), decoded(process))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_paths_name_a_box_and_a_process() {
        for (path, session, process) in [
            ("/v1/sessions/a-1/managed-process/p/ws", "a-1", "p"),
            ("/v1/sessions/a-1/managed-process/ws", "a-1", "default"),
            ("/v1/sessions/a-1/managed-process/ws/ws", "a-1", "ws"),
            (
                "/v1/sessions/a/managed-process/a%20b%2Fc%/ws/",
                "a",
                "a b/c%",
            ),
        ] {
            assert_eq!(parse_path(path), (session.to_owned(), process.to_owned()));
        }
    }
}
