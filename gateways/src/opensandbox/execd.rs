//! The routes of execd.

use std::num::NonZeroU16;

use axum::Router;
use axum::extract::{OriginalUri, Request};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{any, delete, get, post};
use box_protocol::BoxState;
use serde_json::json;

use super::error::{Error, InPath};
use super::{code, command, endpoints, files, metrics, pty, session, transfer};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;

/// Returns the routes of execd, for requests with [`InBox`].
pub(super) fn routes() -> Router {
    Router::new()
        .route("/ping", get(ping))
        .route("/ready", get(ping))
        .route(
            "/command",
            post(command::run)
                .delete(command::interrupt)
                .get(command::inventory),
        )
        .route("/command/status/{id}", get(command::status))
        .route("/command/{id}/logs", get(command::logs))
        .route("/command/{id}/resume", get(command::resume))
        .route("/session", post(session::create))
        .route("/session/{id}", delete(session::delete))
        .route("/session/{id}/run", post(session::run))
        .route("/code", post(code::run).delete(code::interrupt))
        .route("/code/context", post(code::create))
        .route("/code/contexts", get(code::list).delete(code::delete_all))
        .route("/code/contexts/{id}", get(code::get).delete(code::delete))
        .route("/metrics", get(metrics::get))
        .route("/metrics/watch", get(metrics::watch))
        .route("/pty", post(pty::create))
        .route("/pty/{id}", get(pty::status).delete(pty::delete))
        .route("/pty/{id}/ws", any(pty::socket))
        .route("/proxy/{port}", any(proxy))
        .route("/proxy/{port}/", any(proxy))
        .route("/proxy/{port}/{*path}", any(proxy))
        .route("/v1/isolated/capabilities", get(isolation))
        .route("/v1/isolated/{*path}", any(no_isolation))
        .merge(file_routes())
        .nest("/v1/filesystem/{uid}/{gid}", file_routes())
}

/// Returns the routes of files, which also exist for another user.
fn file_routes() -> Router {
    Router::new()
        .route("/files", delete(files::delete_files))
        .route("/files/info", get(files::info))
        .route("/files/mv", post(files::mv))
        .route("/files/permissions", post(files::permissions))
        .route("/files/search", get(files::search))
        .route("/files/replace", post(files::replace))
        .route("/files/upload", post(transfer::upload))
        .route("/files/download", get(transfer::download))
        .route(
            "/directories",
            post(files::create_directories).delete(files::delete_directories),
        )
        .route("/directories/list", get(files::list))
}

/// Answers whether the sandbox can run commands.
async fn ping(context: Context, InBox(id): InBox) -> Result<StatusCode, Error> {
    let info = context.get(&id).await?;
    match info.state {
        BoxState::Running => Ok(StatusCode::OK),
        BoxState::Starting => {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            Err(Error::new(status, "NOT_READY", "the sandbox is starting"))
        }
        // Not 503, which clients repeat.
        _ => {
            let message = "the sandbox is not running; resume it";
            Err(Error::new(StatusCode::CONFLICT, "NOT_READY", message))
        }
    }
}

/// Forwards a request to another port of the sandbox.
async fn proxy(
    context: Context,
    InBox(id): InBox,
    InPath(params): InPath<Vec<(String, String)>>,
    OriginalUri(original): OriginalUri,
    mut request: Request,
) -> Result<Response, Error> {
    // The path of the lifecycle API's proxy has a port before this one.
    let port = params.iter().rev().find(|(name, _)| name == "port");
    let port = port.and_then(|(_, port)| port.parse::<NonZeroU16>().ok());
    let port = port.ok_or_else(|| Error::invalid("port: must be a number from 1 to 65535"))?;
    let inner = request.uri().path();
    let outer = original.path().strip_suffix(inner).unwrap_or_default();
    let prefix = format!("{outer}/proxy/{port}");
    *request.uri_mut() = original;
    endpoints::forward(context, id, port, &prefix, request).await
}

async fn isolation() -> Response {
    let message =
        "isolated sessions are not supported by this server; a sandbox is isolated itself";
    let body = json!({"available": false, "message": message});
    json_response(StatusCode::OK, &body)
}

async fn no_isolation() -> Error {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    Error::new(
        status,
        "NOT_SUPPORTED",
        "isolated sessions are not supported by this server; use a sandbox",
    )
}
