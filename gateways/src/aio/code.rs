//! `/v1/code`: Python and JavaScript, once or in a session.

use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::code_run::{CodeRequest, TIMEOUT_SECONDS, execute_code};
use super::envelope::{Failure, done};
use super::sessions::{Kind, Sessions};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Language {
    Python,
    JavaScript,
}

#[derive(Debug, Deserialize)]
pub(super) struct ExecuteRequest {
    language: Language,
    code: String,
    timeout: Option<f64>,
    cwd: Option<String>,
    stateful: Option<bool>,
    session_id: Option<String>,
}

/// Runs code.
pub(super) async fn execute(
    sessions: Sessions,
    Json(request): Json<ExecuteRequest>,
) -> Result<Response, Failure> {
    let kind = match request.language {
        Language::Python => Kind::Python,
        Language::JavaScript => Kind::Node,
    };
    let sessions = sessions.of(kind);
    let code = CodeRequest {
        code: request.code.clone(),
        timeout: request.timeout,
        cwd: request.cwd,
        stateful: request.stateful,
        session_id: request.session_id,
        ..CodeRequest::default()
    };
    let (session, ran) = execute_code(&sessions, code).await?;
    Ok(done(json!({
        "language": request.language,
        "status": ran.status,
        "outputs": ran.outputs,
        "code": request.code,
        "stdout": ran.stdout,
        "stderr": ran.stderr,
        "exit_code": ran.exit_code,
        "traceback": ran.traceback,
        "session_id": session,
    })))
}

/// Lists the languages that the box has.
pub(super) async fn info(context: Context, InBox(box_id): InBox) -> Result<Response, Failure> {
    let guest = context.runtime().guest(&context.caller, &box_id).await?;
    let languages: Vec<Value> = [Language::Python, Language::JavaScript]
        .into_iter()
        .filter(|language| {
            let name = json!(language);
            guest.interpreters.keys().any(|known| name == json!(known))
        })
        .map(|language| {
            json!({
                "language": language,
                "description": "the interpreter of the box",
                "default_timeout": TIMEOUT_SECONDS,
            })
        })
        .collect();
    Ok(done(json!({"languages": languages})))
}
