//! Errors of the protocol: a status, a code and a message.

use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use box_protocol::error::{Detail, Ended, Subject};
use box_protocol::{BoxError, Code, Invalid};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::http::body::Params;
use crate::http::refusal::{Refusal, RefusalReason, flat_error, json_response, status_of};

/// Returns a parameter that the query must have.
pub(super) fn required<'a>(params: &'a Params, name: &str) -> Result<&'a str, Error> {
    params.get(name).ok_or_else(|| Error::missing_query(name))
}

/// The parameters of a path.
pub(super) struct InPath<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for InPath<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(params)) => Ok(Self(params)),
            Err(error) => Err(Error::invalid(format!("path: {}", error.body_text()))),
        }
    }
}

/// The code of an invalid request to execd.
const INVALID: &str = "INVALID_REQUEST_BODY";

/// The code of an invalid request to the lifecycle API.
const INVALID_PARAMETER: &str = "SANDBOX::INVALID_PARAMETER";

/// The code of what execd does not serve.
const UNSUPPORTED: &str = "NOT_SUPPORTED";

/// The code of what the lifecycle API does not serve.
const API_UNSUPPORTED: &str = "SANDBOX::API_NOT_SUPPORTED";

/// Writes a refusal of execd.
pub(super) fn execd_error(refusal: &Refusal) -> (StatusCode, Value) {
    with_code(refusal, INVALID)
}

/// Writes a refusal of the lifecycle API.
pub(super) fn lifecycle_error(refusal: &Refusal) -> (StatusCode, Value) {
    with_code(refusal, INVALID_PARAMETER)
}

fn with_code(refusal: &Refusal, invalid: &str) -> (StatusCode, Value) {
    let (status, mut body) = flat_error(refusal);
    if refusal.reason == RefusalReason::Malformed {
        body["code"] = invalid.into();
    }
    (status, body)
}

/// Gives an error of the lifecycle API the code that its reference has. Errors begin with the codes of execd.
pub(super) async fn lifecycle_code(mut response: Response) -> Response {
    let Some(mut error) = response.extensions_mut().remove::<Error>() else {
        return response;
    };
    error.code = match error.code {
        INVALID => INVALID_PARAMETER,
        UNSUPPORTED => API_UNSUPPORTED,
        _ => return response,
    };
    error.into_response()
}

/// A failed request.
#[derive(Debug, Clone)]
pub(super) struct Error {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Error {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
        }
    }

    /// A request that this server does not serve.
    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, UNSUPPORTED, message)
    }

    /// An invalid request.
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// An invalid expiry of a sandbox.
    pub(super) fn invalid_expiry(message: impl Into<String>) -> Self {
        let code = "DOCKER::INVALID_EXPIRATION";
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// A missing parameter of the query.
    pub(super) fn missing_query(name: &str) -> Self {
        let message = format!("{name}: missing query parameter");
        Self::new(StatusCode::BAD_REQUEST, "MISSING_QUERY", message)
    }

    /// A failure for which execd has no other status.
    pub(super) fn runtime(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, "RUNTIME_ERROR", message)
    }

    /// A missing sandbox.
    pub(super) fn no_sandbox(id: &str) -> Self {
        let message = format!("sandbox {id} not found");
        Self::new(StatusCode::NOT_FOUND, "DOCKER::SANDBOX_NOT_FOUND", message)
    }

    /// Returns whether a command, session or context is missing.
    pub(super) fn is_missing(&self) -> bool {
        self.code == "CONTEXT_NOT_FOUND"
    }

    /// A missing command, session or context.
    pub(super) fn no_context(what: &str, id: &str) -> Self {
        let message = format!("{what} {id} not found");
        Self::new(StatusCode::NOT_FOUND, "CONTEXT_NOT_FOUND", message)
    }
}

/// Returns the subject of an error. A system error is about a file.
fn subject(detail: &Detail) -> Subject {
    let file = detail.errno.as_ref().map(|_| Subject::File);
    detail.subject.or(file).unwrap_or(Subject::Box)
}

impl From<BoxError> for Error {
    fn from(error: BoxError) -> Self {
        let detail: Detail = error.detail().unwrap_or_default();
        let subject = subject(&detail);
        let (status, code) = match error.code() {
            Code::NotFound => {
                let code = match subject {
                    Subject::File => "FILE_NOT_FOUND",
                    Subject::Command | Subject::Shell | Subject::Process => "CONTEXT_NOT_FOUND",
                    Subject::Snapshot => "SNAPSHOT::NOT_FOUND",
                    Subject::Volume => "VOLUME::PVC_NOT_FOUND",
                    Subject::Pool => "KUBERNETES::POOL_NOT_FOUND",
                    Subject::Image => "DOCKER::IMAGE_NOT_FOUND",
                    _ => "DOCKER::SANDBOX_NOT_FOUND",
                };
                (StatusCode::NOT_FOUND, code)
            }
            Code::Validation => (StatusCode::BAD_REQUEST, INVALID),
            Code::Unsupported => (StatusCode::NOT_IMPLEMENTED, UNSUPPORTED),
            Code::Conflict => (StatusCode::CONFLICT, "CONFLICT"),
            Code::Denied if error.message().starts_with("host_path:") => {
                (StatusCode::FORBIDDEN, "VOLUME::HOST_PATH_NOT_ALLOWED")
            }
            Code::Denied => (StatusCode::FORBIDDEN, "FORBIDDEN"),
            Code::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE"),
            // The client shows this as a rate limit.
            Code::Capacity if subject != Subject::Disk && detail.errno.is_none() => {
                (StatusCode::TOO_MANY_REQUESTS, "CAPACITY_EXCEEDED")
            }
            // Clients repeat what answers 503, but this box stays as it is.
            Code::Unavailable if detail.ended.is_some_and(|why| why != Ended::Shutdown) => {
                (StatusCode::CONFLICT, "CONFLICT")
            }
            _ => (status_of(&error), "RUNTIME_ERROR"),
        };
        Self::new(status, code, error.message())
    }
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.to_string())
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        if refusal.reason == RefusalReason::Malformed {
            return Self::invalid(refusal.message());
        }
        Self::new(refusal.status(), refusal.code(), refusal.message())
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let body = json!({"code": self.code, "message": self.message});
        let mut response = json_response(self.status, &body);
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            let headers = response.headers_mut();
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // The lifecycle API has other codes.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::error::with_end;

    use super::*;

    #[test]
    fn errors_have_the_codes_of_the_protocol() {
        let about = |subject| BoxError::not_found("x").with_detail(&Detail::about(subject));
        let ended = |why| with_end(BoxError::unavailable("x"), why);
        for (error, status, code) in [
            (BoxError::not_found("x"), 404, "DOCKER::SANDBOX_NOT_FOUND"),
            (about(Subject::File), 404, "FILE_NOT_FOUND"),
            (about(Subject::Shell), 404, "CONTEXT_NOT_FOUND"),
            (about(Subject::Snapshot), 404, "SNAPSHOT::NOT_FOUND"),
            (about(Subject::Volume), 404, "VOLUME::PVC_NOT_FOUND"),
            (about(Subject::Pool), 404, "KUBERNETES::POOL_NOT_FOUND"),
            (BoxError::unsupported("x"), 501, "NOT_SUPPORTED"),
            (BoxError::capacity("x"), 429, "CAPACITY_EXCEEDED"),
            (BoxError::internal("x"), 500, "RUNTIME_ERROR"),
            (BoxError::unavailable("x"), 503, "RUNTIME_ERROR"),
            (ended(Ended::Failed), 409, "CONFLICT"),
            (ended(Ended::Shutdown), 503, "RUNTIME_ERROR"),
        ] {
            let error = Error::from(error);
            assert_eq!((error.status.as_u16(), error.code), (status, code));
        }
    }
}
