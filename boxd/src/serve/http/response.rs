//! Responses and refusals.

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, UPGRADE, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::routes::Route;

/// A response; a gateway may stream its body.
pub(super) type HttpResponse = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

/// Creates a response with this text.
pub(super) fn text_response(
    status: StatusCode,
    kind: &'static str,
    text: impl Into<Bytes>,
) -> HttpResponse {
    let body = Full::new(text.into()).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // The state of a box changes, so responses must not be cached.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Creates a response with this JSON.
pub(super) fn json_response(status: StatusCode, value: &Value) -> HttpResponse {
    text_response(status, "application/json", value.to_string())
}

/// Why the server refuses a request before a gateway handles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefusalReason {
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
    /// The upstream server does not answer, or not in HTTP.
    BadGateway,
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
            Self::BadGateway => (StatusCode::BAD_GATEWAY, "BAD_GATEWAY", "BadGateway"),
        }
    }
}

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: RefusalReason,
    /// The problem and its remedy; never a secret.
    message: String,
}

impl Refusal {
    pub(super) fn new(reason: RefusalReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }

    /// Creates the response.
    ///
    /// Its body is `{"code", "message"}`, or `{"error": {"code", "message"}}` for LangBot's relay.
    pub(super) fn response(&self, route: Option<Route>) -> HttpResponse {
        let (status, code, class) = self.reason.status_and_codes();
        if self.reason == RefusalReason::UnknownInstance {
            return text_response(status, "text/plain; charset=utf-8", self.message.clone());
        }
        let message = self.message.as_str();
        let body = match route {
            Some(Route::Relay) => json!({"error": {"code": class, "message": message}}),
            _ => json!({"code": code, "message": message}),
        };
        let mut response = json_response(status, &body);
        let extra_header = match self.reason {
            RefusalReason::NoToken | RefusalReason::WrongToken => {
                Some((WWW_AUTHENTICATE, "Bearer"))
            }
            RefusalReason::NoUpgrade => Some((UPGRADE, "websocket")),
            RefusalReason::Method => Some((ALLOW, "GET, HEAD")),
            _ => None,
        };
        if let Some((name, value)) = extra_header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}
