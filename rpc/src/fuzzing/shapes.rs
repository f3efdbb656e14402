//! One example of every message that a codec can write.

use std::time::Duration;

use serde_json::json;

use crate::codec::{CallId, CallKind, Codec, Control, Grant, Meta};
use crate::error::{Code, Fault, RpcError};

fn full_meta() -> Meta {
    Meta {
        deadline: Some(Duration::from_millis(1500)),
        key: Some("k-1".into()),
        credit: 8,
        context: Some("{\"who\":\"me\"}".into()),
    }
}

/// Returns the name and text of each example; empty if the codec lacks it.
#[allow(clippy::too_many_lines)] // a list
pub fn shapes(codec: &dyn Codec) -> Vec<(&'static str, String)> {
    let params = json!({"a": 1});
    let (empty, none) = (json!({}), Meta::default());
    let number = CallId::Number(7);
    let token = CallId::Token("\"seven\"".into());
    let error = |error: &RpcError| {
        let text = codec.error(Some(&CallId::Number(7)), error);
        text.unwrap_or_default()
    };
    let control = |control: &Control<'_>| codec.control(control).unwrap_or_default();
    vec![
        (
            "call",
            codec
                .call(Some(7), "act", &params, &none)
                .unwrap_or_default(),
        ),
        (
            "call without parameters",
            codec
                .call(Some(7), "act", &empty, &none)
                .unwrap_or_default(),
        ),
        (
            "call with everything",
            codec
                .call(Some(7), "act", &params, &full_meta())
                .unwrap_or_default(),
        ),
        (
            "call with only meta",
            codec
                .call(Some(7), "act", &empty, &full_meta())
                .unwrap_or_default(),
        ),
        (
            "notification",
            codec.call(None, "act", &params, &none).unwrap_or_default(),
        ),
        (
            "result",
            codec
                .result(&number, &params, CallKind::Plain)
                .unwrap_or_default(),
        ),
        (
            "result to a string id",
            codec
                .result(&token, &params, CallKind::Plain)
                .unwrap_or_default(),
        ),
        (
            "end of a stream",
            codec
                .result(&number, &empty, CallKind::Stream)
                .unwrap_or_default(),
        ),
        (
            "chunk",
            codec.chunk(&number, 3, &params, 0).unwrap_or_default(),
        ),
        ("conflict", error(&RpcError::conflict("taken"))),
        (
            "conflict of a process",
            error(&RpcError::conflict("taken").with_detail(&json!({"subject": "process"}))),
        ),
        ("not found", error(&RpcError::not_found("none"))),
        (
            "not found, a process",
            error(&RpcError::not_found("none").with_detail(&json!({"subject": "process"}))),
        ),
        (
            "validation",
            error(&RpcError::validation("cmd must not be empty")),
        ),
        ("unavailable", error(&RpcError::unavailable("no backend"))),
        (
            "unavailable, not ready",
            error(&RpcError::unavailable("no").with_detail(&json!({"subject": "readiness"}))),
        ),
        ("unsupported", error(&RpcError::unsupported("never"))),
        ("denied", error(&RpcError::denied("no"))),
        (
            "denied, no grant",
            error(&RpcError::denied("no").with_detail(&json!({"subject": "grant"}))),
        ),
        (
            "capacity",
            error(&RpcError::capacity("the limit of boxes is reached (2)")),
        ),
        ("timeout", error(&RpcError::timeout("late"))),
        ("cancelled", error(&RpcError::cancelled("gone"))),
        (
            "too large",
            error(&RpcError::limit(
                Code::TooLarge,
                "message",
                "message_bytes",
                16_777_216,
            )),
        ),
        (
            "overloaded",
            error(&RpcError::limit(
                Code::Overloaded,
                "number of concurrent calls",
                "in_flight",
                128,
            )),
        ),
        ("internal", error(&RpcError::internal("oops"))),
        (
            "unknown action",
            error(&RpcError::fault(
                Fault::UnknownAction,
                "method: unknown action nope",
            )),
        ),
        (
            "bad parameters",
            error(&RpcError::fault(Fault::InvalidParams, "expected a string")),
        ),
        (
            "missing parameter",
            error(&RpcError::fault(
                Fault::InvalidParams,
                "missing field `session_id` at line 1",
            )),
        ),
        (
            "invalid message",
            error(&RpcError::fault(Fault::InvalidMessage, "odd")),
        ),
        (
            "not JSON",
            codec
                .error(None, &RpcError::fault(Fault::Parse, "not JSON"))
                .unwrap_or_default(),
        ),
        ("cancel", control(&Control::Cancel { id: number.clone() })),
        (
            "credit",
            control(&Control::Grant {
                id: number.clone(),
                grant: Grant::More(8),
            }),
        ),
        (
            "acknowledgement",
            control(&Control::Grant {
                id: number.clone(),
                grant: Grant::UpTo { read: 4, window: 8 },
            }),
        ),
        ("ping", control(&Control::Ping)),
        ("pong", control(&Control::Pong)),
        (
            "bye",
            control(&Control::Bye {
                reason: "restarting".into(),
                restart: true,
            }),
        ),
    ]
}
