//! The Connect protocol with JSON: unary calls, and streams of envelopes.

use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf as _, BytesMut};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::error::EnvdError;
use super::spec::USER;
use crate::http::body::from_json;
use crate::http::framing::connect_envelope;
use crate::http::refusal::json_response;

/// The media type of streams.
const STREAM: &str = "application/connect+json";

/// The flag of the last envelope.
const LAST: u8 = 2;

/// The length of the head of an envelope: flags and length.
const HEAD_BYTES: usize = 5;

/// The maximum length of an envelope that a client sends.
const MAX_ENVELOPE_BYTES: usize = 16 * 1024 * 1024;

/// The time without output after which a stream has a keepalive, unless the client asks for another.
const KEEPALIVE: Duration = Duration::from_secs(50);

/// Answers a unary call.
pub(super) fn unary(body: &Value) -> Response {
    json_response(StatusCode::OK, body)
}

/// Writes a message of a stream.
pub(super) fn message(payload: &[u8]) -> Bytes {
    connect_envelope(0, payload)
}

/// Writes the end of a stream.
pub(super) fn end(error: Option<&EnvdError>) -> Bytes {
    let body = error.map_or(json!({}), |error| json!({"error": error.to_json()}));
    connect_envelope(LAST, body.to_string().as_bytes())
}

/// Answers a call with a stream.
pub(super) fn stream(body: Body) -> Response {
    (StatusCode::OK, [(CONTENT_TYPE, STREAM)], body).into_response()
}

/// Answers a call of a stream that failed before its first message.
///
/// The status of a stream is always 200, but for a box that is gone: a proxy would answer then.
pub(super) fn failed(error: EnvdError) -> Response {
    if error.is_gone() {
        return error.into_response();
    }
    stream(Body::from(end(Some(&error))))
}

/// Returns the user that a call acts as; `None` for the usual one. Clients send it as Basic authentication without a
/// password.
pub(super) fn user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let (name, _) = text.split_once(':').unwrap_or((&text, ""));
    other_user(Some(name))
}

/// Returns a user other than the one of the box.
///
/// Clients act as `user` or as `root`. A box has one user, so both names mean it, and `root` has no further rights.
pub(super) fn other_user(name: Option<&str>) -> Option<String> {
    let name = name.filter(|name| !["", USER, "root"].contains(name));
    name.map(str::to_owned)
}

/// The part of a call's time, and the most milliseconds, by which the server ends the call before the client does.
const EARLIER_PART: u64 = 20;
const EARLIER_MS: u64 = 50;

/// Returns the time limit of a call in milliseconds.
///
/// The client measures the same time. If it ended the call first, its user would see a lost connection instead of a timeout.
pub(super) fn timeout_ms(headers: &HeaderMap) -> Result<Option<u64>, EnvdError> {
    let Some(value) = headers.get("connect-timeout-ms") else {
        return Ok(None);
    };
    let number = value
        .to_str()
        .ok()
        .and_then(|text| text.parse::<u64>().ok());
    let invalid = || EnvdError::invalid("connect-timeout-ms: must be a number of milliseconds");
    let asked = number.ok_or_else(invalid)?;
    Ok(Some(asked - EARLIER_MS.min(asked / EARLIER_PART)))
}

/// Returns the time without output after which the client expects a keepalive.
pub(super) fn keepalive(headers: &HeaderMap) -> Duration {
    let asked = headers.get("keepalive-ping-interval");
    let asked = asked.and_then(|value| value.to_str().ok()?.parse().ok());
    let asked = asked.filter(|seconds| (1..=3600).contains(seconds));
    asked.map_or(KEEPALIVE, Duration::from_secs)
}

/// Reads the only message of a call that answers with a stream.
pub(super) async fn request<T: DeserializeOwned>(
    parts: &Parts,
    body: Body,
) -> Result<T, EnvdError> {
    let mut messages = Messages::new(&parts.headers, body)?;
    let first = messages.next().await?;
    // Reads the end of the body, too: a connection with an unread rest cannot be used again.
    let second = messages.next().await?;
    let first = first.filter(|_| second.is_none());
    let first = first.ok_or_else(|| EnvdError::invalid("body: must have one message"))?;
    Ok(from_json(&first)?)
}

/// The messages that a client sends.
#[derive(Debug)]
pub(super) struct Messages {
    body: BodyDataStream,
    unread: BytesMut,
}

impl Messages {
    pub(super) fn new(headers: &HeaderMap, body: Body) -> Result<Self, EnvdError> {
        let kind = headers
            .get(CONTENT_TYPE)
            .map(axum::http::HeaderValue::as_bytes);
        if !kind.is_some_and(|kind| kind.starts_with(STREAM.as_bytes())) {
            let message = format!("content-type: must be {STREAM}");
            return Err(EnvdError::unimplemented(message));
        }
        Ok(Self {
            body: body.into_data_stream(),
            unread: BytesMut::new(),
        })
    }

    /// Returns the next message; `None` after the last one.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, EnvdError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            match self.body.next().await {
                Some(Ok(more)) => self.unread.extend_from_slice(&more),
                None if self.unread.is_empty() => return Ok(None),
                Some(Err(_)) | None => return Err(EnvdError::invalid("body: ended early")),
            }
        }
    }

    fn take(&mut self) -> Result<Option<Bytes>, EnvdError> {
        let Some((head, rest)) = self.unread.split_first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let [flags, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if flags != 0 {
            return Err(EnvdError::unimplemented(
                "body: compression is not supported",
            ));
        }
        if length > MAX_ENVELOPE_BYTES {
            let message = format!("body: a message is longer than {MAX_ENVELOPE_BYTES} bytes");
            return Err(EnvdError::new("resource_exhausted", message));
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.unread.advance(HEAD_BYTES);
        Ok(Some(self.unread.split_to(length).freeze()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(pieces: Vec<Bytes>) -> Messages {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, STREAM.parse().unwrap());
        let pieces = pieces.into_iter().map(Ok::<_, std::io::Error>);
        let body = Body::from_stream(futures::stream::iter(pieces));
        Messages::new(&headers, body).unwrap()
    }

    #[test]
    fn a_call_ends_before_its_client_stops_waiting() {
        for (asked, limit) in [
            ("0", 0),
            ("19", 19),
            ("100", 95),
            ("1000", 950),
            ("60000", 59950),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("connect-timeout-ms", asked.parse().unwrap());
            assert_eq!(timeout_ms(&headers).unwrap(), Some(limit));
        }
        assert_eq!(timeout_ms(&HeaderMap::new()).unwrap(), None);
    }

    #[tokio::test]
    async fn messages_arrive_at_any_split_of_the_body() {
        let mut all = message(b"{\"a\":1}").to_vec();
        all.extend(message(b""));
        all.extend(message(b"{}"));
        for at in 0..=all.len() {
            let (head, tail) = all.split_at(at);
            let pieces = vec![Bytes::copy_from_slice(head), Bytes::copy_from_slice(tail)];
            let mut messages = messages(pieces);
            for expected in ["{\"a\":1}", "", "{}"] {
                assert_eq!(messages.next().await.unwrap().unwrap(), expected, "{at}");
            }
            assert_eq!(messages.next().await.unwrap(), None);
        }
    }

    #[tokio::test]
    async fn broken_messages_are_refused() {
        for bytes in [
            &b"\x00\x00\x00\x00\x05ab"[..],
            b"\x01\x00\x00\x00\x00",
            b"\x00\xff\xff\xff\xff",
            b"\x00\x00",
        ] {
            let mut messages = messages(vec![Bytes::copy_from_slice(bytes)]);
            assert!(messages.next().await.is_err(), "{bytes:?}");
        }
        assert!(Messages::new(&HeaderMap::new(), Body::empty()).is_err());
    }

    #[test]
    fn the_user_is_the_name_of_basic_authentication() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            user(&headers)
        };
        assert_eq!(of("Basic Z3Vlc3Q6"), Some("guest".to_owned()));
        assert_eq!(of("Basic dXNlcjo="), None, "the user of the box");
        assert_eq!(of("Basic cm9vdDo="), None, "the user of the box");
        assert_eq!(of("Bearer Z3Vlc3Q6"), None);
        assert_eq!(of("Basic ???"), None);
    }
}
