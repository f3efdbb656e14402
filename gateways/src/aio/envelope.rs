//! The format of answers and errors.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code, Invalid};
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::refusal::{Refusal, RefusalReason, json_response, status_of, text_response};

/// An answer, which is written without a copy of its data: that may be long.
#[derive(Serialize)]
struct Done<T> {
    success: bool,
    message: &'static str,
    data: T,
    hint: Option<()>,
}

/// Answers with data.
pub(super) fn done(data: impl Serialize) -> Response {
    let body = Done {
        success: true,
        message: "Operation successful",
        data,
        hint: None,
    };
    match serde_json::to_string(&body) {
        Ok(text) => text_response(StatusCode::OK, "application/json", text),
        Err(error) => {
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

/// Writes a refusal: a malformed body in the form of `FastAPI`, which clients know, and others in the envelope.
pub(super) fn refused(refusal: &Refusal) -> (StatusCode, Value) {
    let message = refusal.message();
    if refusal.reason == RefusalReason::Malformed {
        let (loc, message) = located(message);
        let problem = json!({"loc": loc, "msg": message, "type": "value_error"});
        let body = json!({"detail": [problem], "success": false, "message": message, "data": null});
        return (StatusCode::UNPROCESSABLE_ENTITY, body);
    }
    (refusal.status(), failed(message, &Value::Null))
}

/// Returns where a request is malformed, and the message.
fn located(message: &str) -> (Value, &str) {
    match message.split_once(": ") {
        Some(("body", _)) | None => (json!(["body"]), message),
        Some(("path", _)) => (json!(["path"]), message),
        // The error of a body that is no object has no field, and names a type of this program.
        Some((field, _)) if field.contains(' ') => (json!(["body"]), "body: must be a JSON object"),
        Some((field, _)) => (json!(["body", field]), message),
    }
}

fn failed(message: &str, data: &Value) -> Value {
    json!({"success": false, "message": message, "data": data})
}

/// An error of a handler.
#[derive(Debug)]
pub(super) enum Failure {
    /// A refusal, which a layer writes.
    Refused(Refusal),
    /// An error with its status.
    Failed {
        status: StatusCode,
        message: String,
        data: Value,
    },
}

impl Failure {
    /// An error without data.
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self::Failed {
            status,
            message: message.into(),
            data: Value::Null,
        }
    }

    /// A request for what a box does not have.
    pub(super) fn unserved(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    /// A session that does not exist.
    pub(super) fn no_session() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Session not found")
    }
}

impl From<Invalid> for Failure {
    fn from(invalid: Invalid) -> Self {
        Self::new(StatusCode::BAD_REQUEST, invalid.to_string())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<BoxError> for Failure {
    fn from(error: BoxError) -> Self {
        let detail: Detail = error.detail().unwrap_or_default();
        if error.code() == Code::NotFound && detail.subject == Some(Subject::Shell) {
            return Self::no_session();
        }
        // A client may repeat a request after 409, 429 or 5xx, and the command of this one may have run.
        let is_file = detail.subject == Some(Subject::File);
        let status = if detail.ended.is_some() && error.code() != Code::NotFound {
            StatusCode::GONE
        } else if is_file && error.code() == Code::Conflict {
            StatusCode::BAD_REQUEST
        } else {
            status_of(&error)
        };
        let is_disk = detail.subject == Some(Subject::Disk) && detail.errno.is_some();
        let data = if is_file || is_disk {
            file_problem(&error, detail.errno.as_deref())
        } else {
            Value::Null
        };
        Self::Failed {
            status,
            message: error.message().to_owned(),
            data,
        }
    }
}

/// Returns the members of AIO's `FileOperationError`.
fn file_problem(error: &BoxError, errno: Option<&str>) -> Value {
    let kind = match (error.code(), errno) {
        (_, Some("EROFS")) => "read_only_filesystem",
        (Code::NotFound, _) => "not_found",
        (Code::Denied, _) => "permission_denied",
        (Code::Capacity, _) => "no_space_left",
        // No request creates only what is missing: the conflict is a file in the place of a directory.
        (Code::Conflict, _) | (Code::Validation, Some("EISDIR" | "ENOTDIR")) => "invalid_target",
        (Code::Validation, _) => "invalid_path",
        _ => "io_error",
    };
    json!({"message": error.message(), "error_type": kind, "errno_name": errno, "retryable": false})
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        match self {
            Self::Refused(refusal) => refusal.into_response(),
            Self::Failed {
                status,
                message,
                data,
            } => json_response(status, &failed(&message, &data)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_shell_is_an_unknown_session() {
        let error = BoxError::not_found("shell").with_detail(&Detail::about(Subject::Shell));
        let Failure::Failed {
            status, message, ..
        } = Failure::from(error)
        else {
            panic!("not an answer");
        };
        assert_eq!((status.as_u16(), &*message), (404, "Session not found"));
    }

    #[test]
    fn a_file_in_the_place_of_a_directory_is_no_conflict_that_a_client_repeats() {
        let detail = Detail {
            errno: Some("EEXIST".to_owned()),
            ..Detail::about(Subject::File)
        };
        let error = BoxError::conflict("/etc/passwd/x: already exists").with_detail(&detail);
        let Failure::Failed { status, data, .. } = Failure::from(error) else {
            panic!("not an answer");
        };
        assert_eq!(
            (status.as_u16(), &data["error_type"]),
            (400, &json!("invalid_target"))
        );
    }

    #[test]
    fn a_malformed_body_has_the_form_of_fastapi() {
        let (status, body) = refused(&Invalid::new("command", "missing").into());
        assert_eq!(status, 422);
        assert_eq!(body["detail"][0]["loc"], json!(["body", "command"]));
        for (message, loc, shown) in [
            (
                "invalid type: string \"x\", expected struct ExecRequest",
                json!(["body"]),
                "body: must be a JSON object",
            ),
            ("body: not JSON: x", json!(["body"]), "body: not JSON: x"),
            (
                "path: must be UTF-8",
                json!(["path"]),
                "path: must be UTF-8",
            ),
        ] {
            let (_, body) = refused(&Refusal::new(RefusalReason::Malformed, message));
            assert_eq!(
                (&body["detail"][0]["loc"], &body["message"]),
                (&loc, &json!(shown))
            );
        }
        let other = Refusal::new(RefusalReason::NotFound, "unknown path");
        let (status, body) = refused(&other);
        assert_eq!((status.as_u16(), &body["success"]), (404, &json!(false)));
    }
}
