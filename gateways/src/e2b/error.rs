//! Errors of the API, and of the inside of boxes.

use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code, Invalid};
use serde_json::{Value, json};

use crate::http::refusal::{Refusal, RefusalReason, json_response, status_of};

/// Tells a client whether to repeat a request.
const SHOULD_RETRY: &str = "should-retry";

/// The words by which clients know that a box is gone.
pub(super) const GONE: &str = "The sandbox was not found";

/// An error of the API: `{"code", "message"}`, where the code is the status.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// A member of the protocol that this server does not have.
    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    pub(super) fn no_sandbox(id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("sandbox {id:?} not found"))
    }

    /// Returns the error as a member of another response.
    pub(super) fn to_json(&self) -> Value {
        json!({"code": self.status.as_u16(), "message": self.message})
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }
}

impl From<BoxError> for ApiError {
    fn from(error: BoxError) -> Self {
        let status = match error.code() {
            Code::Capacity if !is_about_disk(&error) => StatusCode::TOO_MANY_REQUESTS,
            _ => status_of(&error),
        };
        let mut message = error.message().to_owned();
        if let Some(output) = detail(&error).output {
            message.extend(["\n", &output]);
        }
        Self::new(status, message)
    }
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        Self::new(StatusCode::BAD_REQUEST, invalid.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.to_json());
        // Clients repeat 502, 503 and 504 by themselves.
        if self.status == StatusCode::NOT_IMPLEMENTED {
            let value = HeaderValue::from_static("false");
            response.headers_mut().insert(SHOULD_RETRY, value);
        }
        response
    }
}

/// Writes a refusal of the API.
pub(super) fn api_refusal(refusal: &Refusal) -> (StatusCode, Value) {
    let error = ApiError::new(refusal.status(), refusal.message());
    (error.status, error.to_json())
}

/// Refuses the secrets of E2B's cloud.
pub(super) async fn no_secrets() -> ApiError {
    ApiError::unsupported("secrets: not supported by this server; use envVars of a sandbox")
}

/// Answers a request whose path this server does not serve.
pub(super) async fn unknown(Path(path): Path<String>) -> ApiError {
    /// Parts of E2B's cloud.
    const CLOUD: [&str; 6] = [
        "access-tokens",
        "api-keys",
        "billing",
        "default-templates",
        "events",
        "nodes",
    ];
    let name = path.split('/').next().unwrap_or_default();
    if CLOUD.contains(&name) {
        let message = format!("{name}: not supported by this server; use boxd on its machine");
        return ApiError::unsupported(message);
    }
    ApiError::new(StatusCode::NOT_FOUND, format!("path: unknown /{path}"))
}

/// Refuses the teams of E2B's cloud.
pub(super) async fn no_teams() -> ApiError {
    ApiError::unsupported("teams: not supported by this server; each token has its own sandboxes")
}

/// An error of a call into a box.
#[derive(Debug, Clone)]
pub(super) struct EnvdError {
    /// The word of the Connect protocol.
    code: &'static str,
    message: String,
    /// The status outside of the Connect protocol, if the word does not give it.
    plain: Option<StatusCode>,
}

/// The words of the Connect protocol and their statuses.
const STATUSES: [(&str, StatusCode); 11] = [
    ("invalid_argument", StatusCode::BAD_REQUEST),
    ("unauthenticated", StatusCode::UNAUTHORIZED),
    ("permission_denied", StatusCode::FORBIDDEN),
    ("not_found", StatusCode::NOT_FOUND),
    ("already_exists", StatusCode::CONFLICT),
    ("failed_precondition", StatusCode::BAD_REQUEST),
    ("resource_exhausted", StatusCode::TOO_MANY_REQUESTS),
    ("unimplemented", StatusCode::NOT_IMPLEMENTED),
    ("unavailable", StatusCode::SERVICE_UNAVAILABLE),
    ("deadline_exceeded", StatusCode::GATEWAY_TIMEOUT),
    ("data_loss", StatusCode::INTERNAL_SERVER_ERROR),
];

impl EnvdError {
    pub(super) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            plain: None,
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid_argument", message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new("not_found", message)
    }

    pub(super) fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new("unauthenticated", message)
    }

    pub(super) fn unimplemented(message: impl Into<String>) -> Self {
        Self::new("unimplemented", message)
    }

    /// Returns whether the box is gone, which clients must see in the status.
    pub(super) fn is_gone(&self) -> bool {
        self.message == GONE
    }

    /// Returns the error as JSON of the Connect protocol.
    pub(super) fn to_json(&self) -> Value {
        json!({"code": self.code, "message": self.message})
    }

    fn status(&self) -> StatusCode {
        if self.is_gone() {
            return StatusCode::BAD_GATEWAY;
        }
        let known = STATUSES.iter().find(|(code, _)| *code == self.code);
        known.map_or(StatusCode::INTERNAL_SERVER_ERROR, |(_, status)| *status)
    }

    /// Returns the status of `/files` and of the code interpreter.
    fn plain_status(&self) -> StatusCode {
        self.plain.unwrap_or_else(|| self.status())
    }
}

/// A box that is gone, paused or failed.
pub(super) fn gone() -> EnvdError {
    EnvdError::new("unavailable", GONE)
}

impl From<BoxError> for EnvdError {
    fn from(error: BoxError) -> Self {
        let detail = detail(&error);
        let is_about_box =
            matches!(detail.subject, None | Some(Subject::Box)) && detail.errno.is_none();
        let code = match error.code() {
            Code::NotFound if is_about_box => return gone(),
            Code::Conflict if detail.subject == Some(Subject::Box) => return gone(),
            Code::Unavailable if detail.ended.is_some() => return gone(),
            Code::NotFound => "not_found",
            Code::Validation => "invalid_argument",
            Code::Denied => "permission_denied",
            Code::Conflict if detail.errno.as_deref() == Some("EEXIST") => "already_exists",
            Code::Conflict => "failed_precondition",
            Code::Capacity | Code::TooLarge | Code::Overloaded => "resource_exhausted",
            Code::Unsupported => "unimplemented",
            Code::Unavailable if detail.lasting => "unimplemented",
            Code::Unavailable => "unavailable",
            Code::Timeout => "deadline_exceeded",
            Code::Cancelled => "canceled",
            Code::Internal => "internal",
        };
        let plain = match error.code() {
            Code::TooLarge => Some(StatusCode::PAYLOAD_TOO_LARGE),
            Code::Capacity if is_about_disk(&error) => Some(StatusCode::INSUFFICIENT_STORAGE),
            _ => None,
        };
        Self {
            plain,
            ..Self::new(code, error.message())
        }
    }
}

impl From<Invalid> for EnvdError {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.to_string())
    }
}

impl From<Refusal> for EnvdError {
    fn from(refusal: Refusal) -> Self {
        let code = match refusal.reason {
            // A token whose box is gone cannot be told from a wrong one.
            RefusalReason::WrongToken => return gone(),
            RefusalReason::NoToken => "unauthenticated",
            RefusalReason::Malformed | RefusalReason::NoUpgrade => "invalid_argument",
            RefusalReason::Browser | RefusalReason::UnknownInstance => "permission_denied",
            RefusalReason::NotFound | RefusalReason::Method | RefusalReason::Misdirected => {
                "unimplemented"
            }
            RefusalReason::TooLarge | RefusalReason::Overloaded => "resource_exhausted",
            RefusalReason::Conflict => "failed_precondition",
            RefusalReason::NotReady | RefusalReason::BadGateway | RefusalReason::BadResponse => {
                "unavailable"
            }
            RefusalReason::GatewayTimeout => "deadline_exceeded",
        };
        let is_too_large = refusal.reason == RefusalReason::TooLarge;
        Self {
            plain: is_too_large.then_some(StatusCode::PAYLOAD_TOO_LARGE),
            ..Self::new(code, refusal.message())
        }
    }
}

impl IntoResponse for EnvdError {
    fn into_response(self) -> Response {
        json_response(self.status(), &self.to_json())
    }
}

/// An error of `/files` and of the code interpreter.
#[derive(Debug)]
pub(super) struct PlainError(EnvdError);

impl<E: Into<EnvdError>> From<E> for PlainError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PlainError {
    fn into_response(self) -> Response {
        let status = self.0.plain_status();
        let body = json!({"code": status.as_u16(), "message": self.0.message});
        json_response(status, &body)
    }
}

/// Writes a refusal of a call.
pub(super) fn rpc_refusal(refusal: &Refusal) -> (StatusCode, Value) {
    let error = EnvdError::from(refusal.clone());
    (error.status(), error.to_json())
}

/// Writes a refusal of `/files` and of the code interpreter.
pub(super) fn envd_refusal(refusal: &Refusal) -> (StatusCode, Value) {
    let error = EnvdError::from(refusal.clone());
    let status = error.plain_status();
    let body = json!({"code": status.as_u16(), "message": error.message});
    (status, body)
}

fn detail(error: &BoxError) -> Detail {
    error.detail().unwrap_or_default()
}

fn is_about_disk(error: &BoxError) -> bool {
    let detail = detail(error);
    let errno = detail.errno.as_deref();
    detail.subject == Some(Subject::Disk) || matches!(errno, Some("ENOSPC" | "EDQUOT"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_that_is_gone_is_told_from_a_missing_file() {
        let file = BoxError::not_found("no").with_detail(&Detail::about(Subject::File));
        assert_eq!(EnvdError::from(file).status(), StatusCode::NOT_FOUND);
        let paused = BoxError::conflict("no").with_detail(&Detail::about(Subject::Box));
        for error in [BoxError::not_found("no"), paused] {
            let error = EnvdError::from(error);
            assert!(error.is_gone() && error.status() == StatusCode::BAD_GATEWAY);
        }
        let wrong = Refusal::new(RefusalReason::WrongToken, "no");
        assert_eq!(rpc_refusal(&wrong).0, StatusCode::BAD_GATEWAY);
        let none = Refusal::new(RefusalReason::NoToken, "no");
        assert_eq!(envd_refusal(&none).0, StatusCode::UNAUTHORIZED);
    }

    #[test]
    fn a_full_disk_and_a_large_body_have_statuses_of_their_own() {
        let full = Detail {
            errno: Some("ENOSPC".to_owned()),
            ..Detail::default()
        };
        let full = BoxError::new(Code::Capacity, "no space left").with_detail(&full);
        let full = EnvdError::from(full);
        assert_eq!(full.plain_status(), StatusCode::INSUFFICIENT_STORAGE);
        assert_eq!(full.to_json()["code"], "resource_exhausted");
        let large = Refusal::new(RefusalReason::TooLarge, "no");
        assert_eq!(envd_refusal(&large).0, StatusCode::PAYLOAD_TOO_LARGE);
        let busy = EnvdError::from(BoxError::new(Code::Capacity, "no"));
        assert_eq!(busy.plain_status(), StatusCode::TOO_MANY_REQUESTS);
    }
}
