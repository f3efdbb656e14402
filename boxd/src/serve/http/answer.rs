//! Answers and refusals.

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, UPGRADE, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::routes::Door;

/// An answer; a gateway may stream its body.
pub(super) type Answer = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

/// Creates an answer with this text.
pub(super) fn text(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Answer {
    let body = Full::new(text.into()).map_err(|never| match never {});
    let mut answer = Response::new(body.boxed_unsync());
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // The state of a box changes, so answers must not be cached.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// Creates an answer with this JSON.
pub(super) fn json(status: StatusCode, value: &Value) -> Answer {
    text(status, "application/json", value.to_string())
}

/// Why the server refuses a request before a gateway handles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
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
    /// Another LangBot instance sent the request; the answer gives no details.
    Stranger,
    /// The server is starting or draining.
    NotReady,
    /// The target is in the wrong state for the request.
    Conflict,
    /// The upstream server does not answer, or not in HTTP.
    BadGateway,
}

impl Why {
    /// Returns the HTTP status, the error code and the class.
    fn words(self) -> (StatusCode, &'static str, &'static str) {
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
            Self::Stranger => (StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "Unauthorized"),
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
    pub(super) why: Why,
    /// The problem and its remedy; never a secret.
    message: String,
}

impl Refusal {
    pub(super) fn new(why: Why, message: impl Into<String>) -> Self {
        Self {
            why,
            message: message.into(),
        }
    }

    /// Creates the answer.
    ///
    /// Its body is `{"code", "message"}`, or `{"error": {"code", "message"}}` for LangBot's relay.
    pub(super) fn answer(&self, door: Option<Door>) -> Answer {
        let (status, code, class) = self.why.words();
        if self.why == Why::Stranger {
            return text(status, "text/plain; charset=utf-8", self.message.clone());
        }
        let message = self.message.as_str();
        let body = match door {
            Some(Door::Relay) => json!({"error": {"code": class, "message": message}}),
            _ => json!({"code": code, "message": message}),
        };
        let mut answer = json(status, &body);
        let more = match self.why {
            Why::NoToken | Why::WrongToken => Some((WWW_AUTHENTICATE, "Bearer")),
            Why::NoUpgrade => Some((UPGRADE, "websocket")),
            Why::Method => Some((ALLOW, "GET, HEAD")),
            _ => None,
        };
        if let Some((name, value)) = more {
            let value = HeaderValue::from_static(value);
            answer.headers_mut().insert(name, value);
        }
        answer
    }
}
