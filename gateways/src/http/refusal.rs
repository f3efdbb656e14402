//! Responses and refusals, with the error body of each protocol.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, UPGRADE, WWW_AUTHENTICATE,
};
use axum::response::{IntoResponse, Response};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, Invalid};
use serde_json::{Value, json};

/// Creates a response with this text.
pub fn text_response(status: StatusCode, kind: &'static str, text: impl Into<Body>) -> Response {
    // The state of a box changes, so responses must not be cached.
    let headers = [(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-store")];
    (status, headers, text.into()).into_response()
}

/// Creates a response with this JSON.
pub fn json_response(status: StatusCode, value: &Value) -> Response {
    text_response(status, "application/json", value.to_string())
}

/// Writes the status and the body of a refusal in the format of a protocol.
pub type ErrorBody = fn(&Refusal) -> (StatusCode, Value);

/// `{"code", "message"}`: the format of this server, and of OpenSandbox.
pub fn flat_error(refusal: &Refusal) -> (StatusCode, Value) {
    let body = json!({"code": refusal.code(), "message": refusal.message()});
    (refusal.status(), body)
}

/// `{"error": {"code", "message"}}`, with the class names of LangBot's relay.
pub fn relay_error(refusal: &Refusal) -> (StatusCode, Value) {
    let body = json!({"error": {"code": refusal.class(), "message": refusal.message()}});
    (refusal.status(), body)
}

/// Returns the usual HTTP status of an error of a box.
///
/// A protocol that has other statuses overrides single codes before it asks here.
pub fn status_of(error: &BoxError) -> StatusCode {
    match error.code() {
        Code::Validation => StatusCode::BAD_REQUEST,
        Code::Denied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Conflict => StatusCode::CONFLICT,
        Code::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::Overloaded => StatusCode::TOO_MANY_REQUESTS,
        Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        Code::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable if error.detail().is_some_and(|detail: Detail| detail.lasting) => {
            StatusCode::NOT_IMPLEMENTED
        }
        Code::Unavailable | Code::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
        Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        Code::Capacity => StatusCode::INSUFFICIENT_STORAGE,
    }
}

/// Why the server refuses a request before a gateway handles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// The request is malformed.
    Malformed,
    /// The request has no token.
    NoToken,
    /// The request has an invalid token.
    WrongToken,
    /// The request comes from a web page.
    Browser,
    /// The path has no route.
    NotFound,
    /// The route does not allow the method.
    Method,
    /// The body exceeds the limit.
    TooLarge,
    /// The request names another host.
    Misdirected,
    /// The route serves only websockets.
    NoUpgrade,
    /// Another LangBot instance sent the request; the response gives no details.
    UnknownInstance,
    /// The server is starting or draining.
    NotReady,
    /// The target is in the wrong state for the request.
    Conflict,
    /// The upstream server cannot be reached.
    BadGateway,
    /// The upstream server does not answer in HTTP.
    BadResponse,
    /// The upstream server does not answer in time.
    GatewayTimeout,
    /// The caller has too many running calls.
    Overloaded,
}

impl RefusalReason {
    /// Returns the HTTP status, the error code and the class.
    fn status_and_codes(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Malformed => (
                StatusCode::BAD_REQUEST,
                "INVALID_REQUEST",
                "ValidationError",
            ),
            Self::NoToken => (StatusCode::UNAUTHORIZED, "MISSING_API_KEY", "Unauthorized"),
            Self::WrongToken => (StatusCode::UNAUTHORIZED, "INVALID_API_KEY", "Unauthorized"),
            Self::Browser => (StatusCode::FORBIDDEN, "FORBIDDEN", "Forbidden"),
            Self::NotFound => (StatusCode::NOT_FOUND, "NOT_FOUND", "NotFound"),
            Self::Method => (
                StatusCode::METHOD_NOT_ALLOWED,
                "METHOD_NOT_ALLOWED",
                "MethodNotAllowed",
            ),
            Self::TooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "PAYLOAD_TOO_LARGE",
                "PayloadTooLarge",
            ),
            Self::Misdirected => (
                StatusCode::MISDIRECTED_REQUEST,
                "MISDIRECTED_REQUEST",
                "MisdirectedRequest",
            ),
            Self::NoUpgrade => (
                StatusCode::UPGRADE_REQUIRED,
                "UPGRADE_REQUIRED",
                "UpgradeRequired",
            ),
            Self::UnknownInstance => (StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "Unauthorized"),
            Self::NotReady => (
                StatusCode::SERVICE_UNAVAILABLE,
                "UNAVAILABLE",
                "Unavailable",
            ),
            Self::Conflict => (StatusCode::CONFLICT, "CONFLICT", "Conflict"),
            Self::BadGateway | Self::BadResponse => {
                (StatusCode::BAD_GATEWAY, "BAD_GATEWAY", "BadGateway")
            }
            Self::GatewayTimeout => (
                StatusCode::GATEWAY_TIMEOUT,
                "GATEWAY_TIMEOUT",
                "GatewayTimeout",
            ),
            Self::Overloaded => (
                StatusCode::TOO_MANY_REQUESTS,
                "TOO_MANY_REQUESTS",
                "TooManyRequests",
            ),
        }
    }
}

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason, which decides the status.
    pub reason: RefusalReason,
    /// The problem and its remedy; never a secret.
    message: String,
}

impl Refusal {
    /// Creates a refusal; the message names the problem and its remedy.
    pub fn new(reason: RefusalReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }

    /// Returns the usual HTTP status.
    pub fn status(&self) -> StatusCode {
        self.reason.status_and_codes().0
    }

    /// Returns the code in capitals, such as `NOT_FOUND`.
    pub fn code(&self) -> &'static str {
        self.reason.status_and_codes().1
    }

    /// Returns the class, such as `NotFound`.
    pub fn class(&self) -> &'static str {
        self.reason.status_and_codes().2
    }

    /// Returns the problem and its remedy.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Creates the response with the error body of a protocol.
    pub fn response(&self, body: ErrorBody) -> Response {
        let (status, body) = body(self);
        if self.reason == RefusalReason::UnknownInstance {
            return text_response(status, "text/plain; charset=utf-8", self.message.clone());
        }
        let mut response = json_response(status, &body);
        let extra_header = match self.reason {
            RefusalReason::NoToken | RefusalReason::WrongToken => {
                Some((WWW_AUTHENTICATE, "Bearer"))
            }
            RefusalReason::NoUpgrade => Some((UPGRADE, "websocket")),
            RefusalReason::Overloaded => Some((RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = extra_header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl From<Invalid> for Refusal {
    fn from(invalid: Invalid) -> Self {
        Self::new(RefusalReason::Malformed, invalid.to_string())
    }
}

/// A response that carries the refusal to the layer that knows the protocol.
impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.reason.status_and_codes().0.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
