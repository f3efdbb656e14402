//! deer-flow's provisioner: boxes by the id of their sandbox.

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use box_protocol::actions::{BoxListParams, IfExists};
use box_protocol::{BoxError, BoxInfo, BoxMountSpec, BoxState, Code, HostPathMode, Labels, Name};
use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::Failure;
use super::path::Path;
use super::{FACE, GATEWAY, spec};
use crate::http::body::Json;
use crate::http::capability::Scope;
use crate::http::context::Context;
use crate::http::refusal::json_response;

/// Returns the routes of the provisioner.
pub(super) fn routes() -> Router {
    Router::new()
        .route("/api/sandboxes", post(create).get(list))
        .route("/api/sandboxes/{sandbox}", get(one).delete(delete))
        .route("/api/capabilities", get(capabilities))
}

/// A request for a sandbox; its other members concern Kubernetes.
#[derive(Debug, Deserialize)]
struct CreateRequest {
    sandbox_id: Name,
    thread_id: Option<String>,
    user_id: Option<String>,
    extra_mounts: Option<Vec<Mount>>,
}

#[derive(Debug, Deserialize)]
struct Mount {
    host_path: String,
    container_path: String,
    read_only: Option<bool>,
}

/// The sandbox in the path.
#[derive(Debug, Deserialize)]
struct SandboxPath {
    sandbox: String,
}

async fn create(context: Context, Json(request): Json<CreateRequest>) -> Result<Response, Failure> {
    let id = spec::id_of(&request.sandbox_id)?;
    // An existing sandbox stays as it is, whatever a repeated request says.
    match ready(&context, request.sandbox_id.as_str()).await {
        // The creation below waits for a box that starts.
        Err(error) if error.code() == Code::NotFound => {}
        known => return Ok(answer(&description(&context, &known?))),
    }
    let mut spec = spec::of(&id);
    spec.name = Some(request.sandbox_id);
    let mut labels = Labels::new();
    for (label, value) in [("thread", request.thread_id), ("user", request.user_id)] {
        if let Some(value) = value {
            labels.insert(label.to_owned(), value);
        }
    }
    spec.labels = Some(labels);
    let mut mounts = Vec::new();
    for mount in request.extra_mounts.into_iter().flatten() {
        let mode = if mount.read_only.unwrap_or_default() {
            HostPathMode::Ro
        } else {
            HostPathMode::Rw
        };
        mounts.push(BoxMountSpec::new(
            mount.host_path,
            mount.container_path,
            mode,
        )?);
    }
    spec.extra_mounts = Some(mounts);
    let created = context.create(&GATEWAY, spec, IfExists::Reuse).await?;
    Ok(answer(&description(&context, &created.info)))
}

async fn list(context: Context) -> Result<Response, Failure> {
    let ours = BoxListParams {
        gateway: Some(GATEWAY),
        ..BoxListParams::default()
    };
    let boxes = context.list(ours).await?;
    // The default box has no name.
    let is_ready = |info: &&BoxInfo| info.name.is_some() && info.state != BoxState::Starting;
    let named = boxes.iter().filter(is_ready);
    let sandboxes: Vec<Value> = named.map(|info| description(&context, info)).collect();
    let count = sandboxes.len();
    Ok(answer(&json!({"sandboxes": sandboxes, "count": count})))
}

async fn one(context: Context, Path(path): Path<SandboxPath>) -> Result<Response, Failure> {
    let info = ready(&context, &path.sandbox).await?;
    Ok(answer(&description(&context, &info)))
}

async fn delete(context: Context, Path(path): Path<SandboxPath>) -> Result<Response, Failure> {
    let deleted = match found(&context, &path.sandbox).await {
        Ok(info) => context.delete(&info.box_id).await,
        Err(error) => Err(error),
    };
    match deleted {
        // No sandbox has an invalid name.
        Err(error) if !matches!(error.code(), Code::NotFound | Code::Validation) => {
            Err(error.into())
        }
        _ => Ok(answer(&json!({"ok": true, "sandbox_id": path.sandbox}))),
    }
}

/// A box prepares no programs of Lark.
async fn capabilities() -> Response {
    answer(&json!({"lark_cli_init_image": false, "lark_cli_broker_image": false}))
}

async fn found(context: &Context, sandbox: &str) -> Result<BoxInfo, BoxError> {
    let info = context.get(&spec::id_of(&Name::new(sandbox)?)?).await?;
    if info.gateway == GATEWAY {
        return Ok(info);
    }
    Err(BoxError::not_found("sandbox not found"))
}

/// Returns a sandbox unless it starts, because its address is not known before.
async fn ready(context: &Context, sandbox: &str) -> Result<BoxInfo, BoxError> {
    let info = found(context, sandbox).await?;
    if info.state == BoxState::Starting {
        return Err(BoxError::not_found("the sandbox is starting"));
    }
    Ok(info)
}

/// Describes a sandbox as the provisioner does. Its URL contains the capability, because deer-flow sends no header.
fn description(context: &Context, info: &BoxInfo) -> Value {
    let status = match info.state {
        // A call to a paused or stopped box wakes it.
        BoxState::Running | BoxState::Paused | BoxState::Stopped => "Running",
        BoxState::Starting => "Pending",
        BoxState::Failed => "Failed",
        BoxState::Unreachable => "Unknown",
    };
    json!({
        "sandbox_id": info.name,
        "sandbox_url": url_of(context, info),
        "status": status,
    })
}

/// Returns the base URL of the API of a box.
pub(super) fn url_of(context: &Context, info: &BoxInfo) -> String {
    let signature = context.grant(info, Scope::Aio, None);
    let path = Context::box_path(info);
    format!("{}{path}~{signature}{FACE}", context.url)
}

fn answer(body: &Value) -> Response {
    json_response(StatusCode::OK, body)
}
