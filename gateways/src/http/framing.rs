//! The framings of streamed responses.

use axum::body::Bytes;
use serde::Serialize;

/// A JSON value and an empty line: the event stream of OpenSandbox.
pub fn bare_json(value: &impl Serialize) -> Bytes {
    json_with(value, b"\n\n")
}

/// A JSON value and a line end.
pub fn ndjson(value: &impl Serialize) -> Bytes {
    json_with(value, b"\n")
}

fn json_with(value: &impl Serialize, end: &[u8]) -> Bytes {
    let mut text = serde_json::to_vec(value).unwrap_or_default();
    text.extend_from_slice(end);
    text.into()
}

/// A server-sent event with a name and an id, if any. `data` may have several lines.
pub fn sse(event: Option<&str>, id: Option<&str>, data: &str) -> Bytes {
    let mut text = String::with_capacity(data.len() + 32);
    for (field, value) in [("event", event), ("id", id)] {
        if let Some(value) = value {
            text.extend([field, ": ", value, "\n"]);
        }
    }
    for line in data.split('\n') {
        text.extend(["data: ", line, "\n"]);
    }
    text.push('\n');
    text.into()
}

/// A comment of an event stream, which clients ignore.
pub const SSE_KEEPALIVE: Bytes = Bytes::from_static(b": keepalive\n\n");

/// An envelope of the Connect protocol: flags, length, payload.
///
/// The flag 2 marks the last envelope.
pub fn connect_envelope(flags: u8, payload: &[u8]) -> Bytes {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut envelope = Vec::with_capacity(payload.len() + 5);
    envelope.push(flags);
    envelope.extend_from_slice(&length.to_be_bytes());
    envelope.extend_from_slice(payload);
    envelope.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn frames_are_written_as_their_protocols_say() {
        assert_eq!(bare_json(&json!({"a": "x\ny"})), "{\"a\":\"x\\ny\"}\n\n");
        assert_eq!(ndjson(&json!([1])), "[1]\n");
        assert_eq!(
            sse(Some("stdout"), Some("7"), "a\nb"),
            "event: stdout\nid: 7\ndata: a\ndata: b\n\n"
        );
        assert_eq!(sse(None, None, ""), "data: \n\n");
        assert_eq!(connect_envelope(2, b"{}"), &b"\x02\0\0\0\x02{}"[..]);
    }
}
