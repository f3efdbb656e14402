//! `/v1/nodejs`: JavaScript, once or in a session.

use std::collections::BTreeMap;

use axum::response::Response;
use box_protocol::actions::{ShellInfo, ShellState};
use box_protocol::{CommandId, Invalid, UnixMs};
use serde::Deserialize;
use serde_json::{Value, json};

use super::code_run::{CodeRequest, execute_code, run_code};
use super::envelope::{Failure, done};
use super::path::Path;
use super::sandbox::output_of;
use super::sessions::{SessionNote, Sessions, note_of};
use super::shell::SessionPath;
use crate::http::body::{Json, OptionalJson};
use crate::http::context::{Context, InBox};

#[derive(Debug, Deserialize)]
pub(super) struct ExecuteRequest {
    code: String,
    timeout: Option<f64>,
    stdin: Option<String>,
    files: Option<BTreeMap<String, Option<String>>>,
    stateful: Option<bool>,
    session_id: Option<String>,
    cwd: Option<String>,
    version: Option<String>,
}

/// Runs JavaScript.
pub(super) async fn execute(
    sessions: Sessions,
    Json(request): Json<ExecuteRequest>,
) -> Result<Response, Failure> {
    if request.stdin.is_some_and(|stdin| !stdin.is_empty()) {
        let message = "stdin: not supported by this server; write a file and read it";
        return Err(Failure::unserved(message));
    }
    if request.version.is_some() {
        return Err(Failure::unserved(
            "version: the box has one version of Node",
        ));
    }
    let code = CodeRequest {
        code: request.code.clone(),
        timeout: request.timeout,
        cwd: request.cwd,
        stateful: request.stateful,
        session_id: request.session_id,
        files: request.files.unwrap_or_default(),
    };
    let (session, ran) = execute_code(&sessions, code).await?;
    Ok(done(json!({
        "language": "javascript",
        "status": ran.status,
        "outputs": ran.outputs,
        "code": request.code,
        "stdout": ran.stdout,
        "stderr": ran.stderr,
        "exit_code": ran.exit_code,
        "session_id": session,
    })))
}

/// Describes Node.
pub(super) async fn info(context: Context, InBox(box_id): InBox) -> Result<Response, Failure> {
    let (node, code) = output_of(&context, &box_id, ["node", "--version"]).await?;
    if code != Some(0) {
        return Err(Failure::unserved("node: not installed in the box"));
    }
    let npm = output_of(&context, &box_id, ["npm", "--version"]).await;
    let npm = npm.map(|(version, _)| version).unwrap_or_default();
    Ok(done(json!({
        "node_version": node.trim(),
        "npm_version": npm.trim(),
        "supported_languages": ["javascript"],
        "description": "Node of the box",
    })))
}

fn described(session: &str, info: &ShellInfo) -> Value {
    json!({
        "session_id": session,
        "cwd": info.cwd,
        "created_at": info.created_at,
        "last_used": info.last_used_at,
        // The request has seconds, the answer milliseconds and the time since the last use.
        "max_idle_time": note_of(info).idle_s.unwrap_or_default().saturating_mul(1000),
        "age_seconds": UnixMs::now().since(info.last_used_at).as_secs(),
        "execution_count": info.executions,
        "state": match info.state {
            ShellState::Busy => "EXECUTING",
            ShellState::Starting | ShellState::Idle => "IDLE",
        },
    })
}

/// Lists all sessions.
pub(super) async fn list(sessions: Sessions) -> Result<Response, Failure> {
    let mut listed = BTreeMap::new();
    for info in sessions.list().await? {
        if let Some(id) = sessions.id_of(&info) {
            listed.insert(id.to_owned(), described(id, &info));
        }
    }
    Ok(done(json!({"sessions": listed})))
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    session_id: Option<String>,
    cwd: Option<String>,
    max_idle_time: Option<u64>,
}

/// Creates a session, or returns the existing one with this id.
pub(super) async fn create(
    sessions: Sessions,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Failure> {
    let fresh = || CommandId::fresh().to_string();
    let session = request.session_id.unwrap_or_else(fresh);
    let note = request.max_idle_time.map(|seconds| SessionNote {
        idle_s: Some(seconds),
        ..SessionNote::default()
    });
    let created = sessions.create(&session, request.cwd, note).await?;
    Ok(done(json!({
        "session_id": session,
        "created": !created.existed,
        "session": described(&session, &created.info),
    })))
}

/// Describes a session.
pub(super) async fn get(
    sessions: Sessions,
    Path(path): Path<SessionPath>,
) -> Result<Response, Failure> {
    let info = sessions.find(&path.session).await?;
    Ok(done(
        json!({"session_id": path.session, "session": described(&path.session, &info)}),
    ))
}

#[derive(Debug, Deserialize)]
pub(super) struct UpdateRequest {
    max_idle_time: Option<u64>,
    cwd: Option<String>,
}

/// Changes the directory of a session.
pub(super) async fn update(
    sessions: Sessions,
    Path(path): Path<SessionPath>,
    Json(request): Json<UpdateRequest>,
) -> Result<Response, Failure> {
    if request.max_idle_time.is_some() {
        let message = "max_idle_time: fixed at the creation of a session";
        return Err(Failure::unserved(message));
    }
    sessions.find(&path.session).await?;
    if let Some(cwd) = request.cwd {
        let move_to = format!("process.chdir({})", json!(cwd));
        let ran = run_code(&sessions, &path.session, move_to, None, None).await?;
        if ran.status != "ok" {
            return Err(Invalid::new("cwd", "must be a directory").into());
        }
    }
    let info = sessions.find(&path.session).await?;
    Ok(done(json!({
        "session_id": path.session,
        "updated": true,
        "session": described(&path.session, &info),
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
    Ok(done(json!({"session_id": path.session, "deleted": true})))
}
