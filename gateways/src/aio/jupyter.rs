//! `/v1/jupyter`: Python sessions, with outputs as notebooks have them.

use std::collections::BTreeMap;

use axum::response::Response;
use box_protocol::{CommandId, Invalid};
use serde::Deserialize;
use serde_json::{Value, json};

use super::code_run::{run_code, session_or_new};
use super::envelope::{Failure, done};
use super::path::Path;
use super::sessions::{MAX_SESSIONS, Sessions, age_seconds, check_text};
use super::shell::SessionPath;
use crate::http::body::{Json, OptionalJson};

/// The name of the only kernel.
const KERNEL: &str = "python3";

#[derive(Debug, Deserialize)]
pub(super) struct ExecuteRequest {
    code: String,
    timeout: Option<f64>,
    kernel_name: Option<String>,
    session_id: Option<String>,
    cwd: Option<String>,
}

/// Runs Python in a session.
pub(super) async fn execute(
    sessions: Sessions,
    Json(request): Json<ExecuteRequest>,
) -> Result<Response, Failure> {
    check_text("code", &request.code)?;
    check_kernel(request.kernel_name.as_deref())?;
    let session = session_or_new(&sessions, request.session_id).await?;
    let code = request.code.clone();
    let ran = run_code(&sessions, &session, code, request.cwd, request.timeout).await?;
    let count = sessions.info(&session).await.map(|info| info.executions);
    Ok(done(json!({
        "session_id": session,
        "kernel_name": KERNEL,
        "status": ran.status,
        "execution_count": count.ok(),
        "outputs": ran.outputs,
        "code": request.code,
        "msg_id": ran.command_id,
    })))
}

fn check_kernel(name: Option<&str>) -> Result<(), Invalid> {
    match name {
        None => Ok(()),
        Some(name) if name.starts_with("python") => Ok(()),
        Some(_) => Err(Invalid::new("kernel_name", "must be python3")),
    }
}

/// Describes the kernels.
pub(super) async fn info(sessions: Sessions) -> Result<Response, Failure> {
    let active = sessions.list().await?.len();
    Ok(done(json!({
        "default_kernel": KERNEL,
        "available_kernels": [KERNEL],
        "active_sessions": active,
        "session_timeout_seconds": 0,
        "max_sessions": MAX_SESSIONS,
        "description": "Python of the box; sessions end with the box",
        "kernel_detection": "static",
    })))
}

/// Lists all sessions.
pub(super) async fn list(sessions: Sessions) -> Result<Response, Failure> {
    let mut listed = BTreeMap::new();
    for info in sessions.list().await? {
        let Some(id) = sessions.id_of(&info) else {
            continue;
        };
        #[allow(clippy::cast_precision_loss, reason = "times of this age are exact")]
        let last_used = info.last_used_at.0 as f64 / 1000.0;
        let entry = json!({
            "kernel_name": KERNEL,
            "last_used": last_used,
            "age_seconds": age_seconds(&info),
        });
        listed.insert(id.to_owned(), entry);
    }
    Ok(done(json!({"sessions": listed})))
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    session_id: Option<String>,
    kernel_name: Option<String>,
    cwd: Option<String>,
}

/// Creates a session, or returns the existing one with this id.
pub(super) async fn create(
    sessions: Sessions,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Failure> {
    check_kernel(request.kernel_name.as_deref())?;
    let fresh = || CommandId::fresh().to_string();
    let session = request.session_id.unwrap_or_else(fresh);
    sessions.create(&session, request.cwd, None).await?;
    Ok(done(json!({
        "session_id": session,
        "kernel_name": KERNEL,
        "message": "Session created",
    })))
}

/// Ends a session.
pub(super) async fn delete(
    sessions: Sessions,
    Path(path): Path<SessionPath>,
) -> Result<Response, Failure> {
    if !sessions.delete(&path.session).await? {
        return Err(Failure::no_session());
    }
    Ok(done(Value::Null))
}

/// Ends all sessions.
pub(super) async fn delete_all(sessions: Sessions) -> Result<Response, Failure> {
    sessions.delete_all().await?;
    Ok(done(Value::Null))
}
