//! LangBot's routes: its RPC connections, and the relay of a managed process.

use std::sync::Arc;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Path, State};
use axum::http::header::HeaderName;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use box_gateways::http::refusal::{Refusal, RefusalReason, json_response as response};
use box_gateways::langbot::{GENERATION_HEADER, INSTANCE_HEADER, RelayRefused, WORKSPACE_HEADER};
use box_rpc::{Caller, ControlPolicy, Router};
use serde::Deserialize;
use serde_json::json;

use super::layers::Client;
use super::state::HttpState;
use super::websocket::no_upgrade;

/// The subprotocol of relays.
const MCP: &str = "mcp";

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

/// The box and the process in a relay's path.
#[derive(Debug, Deserialize)]
pub(super) struct RelayPath {
    session: String,
    #[serde(default = "default_process")]
    process: String,
}

/// Returns the process id of a path that names none.
fn default_process() -> String {
    "default".to_owned()
}

/// Attaches to the process that the path names, and answers with the upgrade.
pub(super) async fn relay(
    State(state): State<Arc<HttpState>>,
    Extension(caller): Extension<Caller>,
    Extension(Client { permit, .. }): Extension<Client>,
    headers: HeaderMap,
    path: Result<Path<RelayPath>, PathRejection>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(|_| no_upgrade())?;
    let header = |name: &'static str| {
        let value = headers.get(HeaderName::from_static(name));
        value
            .and_then(|value| value.to_str().ok())
            .map_or("", str::trim)
    };
    let installation = state
        .langbot
        .known_installation(&caller, header(INSTANCE_HEADER));
    let installation = installation.ok_or_else(unknown_instance)?;
    let Path(path) = path.map_err(|_| unknown_instance())?;
    let (workspace, generation) = (header(WORKSPACE_HEADER), header(GENERATION_HEADER));
    let attached = installation.relay(workspace, generation, &path.session, &path.process);
    let relay = match attached.await {
        Ok(relay) => relay,
        Err(RelayRefused::Unauthorized) => return Err(unknown_instance()),
        Err(refused) => {
            let (class, message) = refused.class_and_text();
            let body = json!({"error": {"code": class, "message": message}});
            return Ok(response(StatusCode::BAD_REQUEST, &body));
        }
    };
    let upgrade = relay.configure(upgrade.protocols([MCP]));
    Ok(upgrade.on_upgrade(async move |socket| {
        relay.run(socket, state.sockets.closing()).await;
        drop(permit);
    }))
}
