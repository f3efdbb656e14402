//! Every shape of both wires, written down. A change of the wire fails here first.

use std::time::Duration;

use serde_json::{Value, json};

mod properties;
mod unreadable;

use super::*;
use crate::message::{Grant, Message, Part};

fn limits() -> Limits {
    Limits::default()
}

fn decode(dialect: Dialect, text: &str) -> Result<Message<'_>, Unreadable> {
    match dialect.decode(text, &limits()) {
        Decoded::One(one) => one,
        Decoded::Batch(_) => panic!("a batch: {text}"),
    }
}

fn full_meta() -> Meta {
    Meta {
        deadline: Some(Duration::from_millis(1500)),
        key: Some("k-1".into()),
        credit: 8,
        context: Some("{\"who\":\"me\"}".into()),
    }
}

#[allow(clippy::too_many_lines)] // a list
/// One example of everything that can be said, and its text in each dialect; empty where a dialect
/// has no word for it.
fn shapes() -> Vec<(&'static str, [String; 2])> {
    let both =
        |write: &dyn Fn(Dialect) -> String| [write(Dialect::JsonRpc), write(Dialect::LangBot)];
    let params = json!({"a": 1});
    let (empty, none) = (json!({}), Meta::default());
    let number = CallId::Number(7);
    let token = CallId::Token("\"seven\"".into());
    let error = |error: &RpcError| {
        both(&|dialect| {
            dialect
                .error(Some(&CallId::Number(7)), error)
                .unwrap_or_default()
        })
    };
    let control = |control: &Control<'_>| {
        both(&|dialect| {
            dialect
                .control(control)
                .map(|text| stable(&text))
                .unwrap_or_default()
        })
    };
    vec![
        (
            "call",
            both(&|dialect| dialect.call(Some(7), "act", &params, &none).unwrap()),
        ),
        (
            "call without parameters",
            both(&|dialect| dialect.call(Some(7), "act", &empty, &none).unwrap()),
        ),
        (
            "call with everything",
            both(&|dialect| dialect.call(Some(7), "act", &params, &full_meta()).unwrap()),
        ),
        (
            "call with only meta",
            both(&|dialect| dialect.call(Some(7), "act", &empty, &full_meta()).unwrap()),
        ),
        (
            "notification",
            both(&|dialect| dialect.call(None, "act", &params, &none).unwrap()),
        ),
        (
            "result",
            both(&|dialect| dialect.result(&number, &params, Ends::Call).unwrap()),
        ),
        (
            "result to a string id",
            both(&|dialect| dialect.result(&token, &params, Ends::Call).unwrap()),
        ),
        (
            "end of a stream",
            both(&|dialect| dialect.result(&number, &empty, Ends::Stream).unwrap()),
        ),
        (
            "chunk",
            both(&|dialect| dialect.chunk(&number, 3, &params, 0).unwrap()),
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
            error(&RpcError::capacity("Box session capacity reached (2)")),
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
                "calls at once",
                "in_flight",
                128,
            )),
        ),
        ("internal", error(&RpcError::internal("oops"))),
        (
            "unknown action",
            error(&RpcError::fault(
                Fault::UnknownAction,
                "Action nope not found",
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
            both(&|dialect| {
                dialect
                    .error(None, &RpcError::fault(Fault::Parse, "not JSON"))
                    .unwrap_or_default()
            }),
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
                grant: Grant::ReadUpTo(4),
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

fn shown(text: &str) -> String {
    if text.is_empty() {
        "(nothing)".to_owned()
    } else {
        stable(text)
    }
}

/// LangBot's control requests count their ids down over the whole process.
fn stable(text: &str) -> String {
    let mut text = text.to_owned();
    if let Some(rest) = text.strip_prefix("{\"seq_id\":-") {
        let end = rest.find(',').unwrap();
        text = format!("{{\"seq_id\":-N{}", &rest[end..]);
    }
    text
}

#[test]
fn every_shape_is_written_as_documented() {
    let mut written = String::new();
    for (name, [native, langbot]) in shapes() {
        written += &[
            name,
            "\n  ",
            &shown(&native),
            "\n  ",
            &shown(&langbot),
            "\n",
        ]
        .concat();
    }
    let expected = include_str!("shapes.txt");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/src/wire/shapes.txt"),
            &written,
        )
        .unwrap();
    }
    assert_eq!(
        written, expected,
        "the wire changed; if that is meant, run with UPDATE_SNAPSHOTS=1"
    );
}

#[test]
fn every_error_survives_both_wires() {
    // Words that LangBot has no prefix for arrive as their nearest.
    let changed = [(Code::Unsupported, Code::Unavailable)];
    for code in Code::ALL {
        let error = RpcError::new(code, "why not");
        for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
            let text = dialect.error(Some(&CallId::Number(1)), &error).unwrap();
            let Ok(Message::Answer {
                outcome: Err(read), ..
            }) = decode(dialect, &text)
            else {
                panic!("{text}")
            };
            let lossy = matches!(code, Code::TooLarge | Code::Overloaded);
            let expected = match dialect {
                Dialect::JsonRpc => code,
                Dialect::LangBot if lossy => Code::Internal,
                Dialect::LangBot => changed
                    .iter()
                    .find(|(from, _)| *from == code)
                    .map_or(code, |(_, to)| *to),
            };
            assert_eq!(read.code(), expected, "{text}");
        }
    }
}

#[test]
fn details_survive() {
    let error = RpcError::conflict("x").with_detail(&json!({"field": "image", "n": [1, 2]}));
    let text = Dialect::JsonRpc
        .error(Some(&CallId::Number(1)), &error)
        .unwrap();
    let Ok(Message::Answer {
        outcome: Err(read), ..
    }) = decode(Dialect::JsonRpc, &text)
    else {
        panic!()
    };
    assert_eq!(read, error);
    let error = RpcError::limit(Code::Overloaded, "calls", "in_flight", 128);
    let text = Dialect::LangBot
        .error(Some(&CallId::Number(1)), &error)
        .unwrap();
    let Ok(Message::Answer {
        outcome: Err(read), ..
    }) = decode(Dialect::LangBot, &text)
    else {
        panic!()
    };
    assert_eq!(read, error);
}

#[test]
fn langbots_captured_frames_are_understood() {
    let ping = r#"{"seq_id": 28010, "action": "__ping", "data": {}}"#;
    assert_eq!(
        decode(Dialect::LangBot, ping),
        Ok(Message::Control {
            ask: Some(CallId::Number(28010)),
            control: Control::Ping,
            context: None,
        })
    );
    let exec = r#"{"seq_id": 28014, "action": "box_exec", "data": {"cmd": "echo hi"}, "context": {"instance_uuid": "inst-0001"}, "later": 1}"#;
    let Ok(Message::Call {
        action,
        params,
        meta,
        ..
    }) = decode(Dialect::LangBot, exec)
    else {
        panic!()
    };
    assert_eq!(
        (action.as_ref(), params),
        ("box_exec", r#"{"cmd": "echo hi"}"#)
    );
    assert_eq!(
        meta.context.as_deref(),
        Some(r#"{"instance_uuid": "inst-0001"}"#)
    );
    let conflict = r#"{"seq_id": 28017, "code": 1, "message": "BoxSessionConflictError: Box session x already exists with memory_mb=512", "data": {}, "chunk_status": "continue"}"#;
    let Ok(Message::Answer {
        outcome: Err(error),
        ..
    }) = decode(Dialect::LangBot, conflict)
    else {
        panic!()
    };
    assert_eq!(
        error,
        RpcError::conflict("Box session x already exists with memory_mb=512")
    );
    for dropped in [
        r#"{"seq_id":1,"code":0,"data":{}}"#,
        r#"{"seq_id":1,"code":0,"message":"x"}"#,
        r#"{"x":1}"#,
    ] {
        assert_eq!(
            decode(Dialect::LangBot, dropped),
            Ok(Message::Ignored),
            "{dropped}"
        );
    }
    let no_status = r#"{"seq_id":1,"code":0,"message":"success","data":{}}"#;
    let Ok(Message::Answer { part, .. }) = decode(Dialect::LangBot, no_status) else {
        panic!()
    };
    assert_eq!(part, Part::Either { index: None });
}

#[test]
fn a_long_langbot_error_is_cut() {
    let error = RpcError::internal("é".repeat(5000));
    let text = Dialect::LangBot
        .error(Some(&CallId::Number(1)), &error)
        .unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let message = value["message"].as_str().unwrap();
    assert!(message.ends_with("é... [protocol error truncated]"));
    assert_eq!(
        message.chars().count(),
        "RuntimeError: ".len() + 4096 + "... [protocol error truncated]".len()
    );
}

#[test]
fn what_we_write_is_taken_apart_unread_and_anything_else_is_not() {
    let checked = |text: &str| decode(Dialect::JsonRpc, text).unwrap().checked();
    assert!(!checked(
        r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":1}}"#
    ));
    assert!(!checked(r#"{"jsonrpc":"2.0","id":7,"result":{}}"#));
    let chunk = Dialect::JsonRpc.chunk(&CallId::Number(7), 0, &json!({"a": {}}), 0);
    assert!(!checked(&chunk.unwrap()));
    for other in [
        r#"{"jsonrpc":"2.0","method":"$/chunk","params":{"id":"7","chunk":{}}}"#,
        r#"{"jsonrpc":"2.0","method":"$/chunk","params":{"chunk":{},"id":7}}"#,
        r#"{"jsonrpc":"2.0","method":"$/chunk","params":{"id":7,"chunk":[{}]}}"#,
        r#"{"jsonrpc":"2.0","id":7,"method":"a\u0063t","params":{"a":1}}"#,
        r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"_meta":{}}}"#,
        r#"{"jsonrpc":"2.0","id":"7","method":"act","params":{}}"#,
        r#"{"jsonrpc":"2.0","id":7,"method":"act"}"#,
        r#"{"jsonrpc":"2.0","id":7,"result":[]}"#,
        r#" {"jsonrpc":"2.0","id":7,"result":{}}"#,
    ] {
        assert!(checked(other), "{other}");
    }
}

#[test]
fn a_chunk_taken_apart_unread_is_read_again_when_it_cannot_be() {
    use crate::ledger::Body;
    let parse = |text: &str| {
        let Ok(Message::Answer {
            id: CallId::Number(7),
            outcome: Ok(body),
            part: Part::Chunk { index: None },
            checked: false,
        }) = decode(Dialect::JsonRpc, text)
        else {
            panic!("{text}")
        };
        let range = Body::range_of(text, body);
        Body::new(text.to_owned(), range, false).parse::<Value>(&limits())
    };
    let begin = r#"{"jsonrpc":"2.0","method":"$/chunk","params":{"id":7,"chunk":"#;
    let text = |rest: &str| format!("{begin}{rest}");
    assert_eq!(parse(&text(r#"{"a":{}}}}"#)).unwrap(), json!({"a": {}}));
    let more = text(r#"{"a":1},"later":{"b":{}}}}"#);
    assert_eq!(
        parse(&more).unwrap(),
        json!({"a": 1}),
        "a member we do not know"
    );
    assert!(parse(&text(r#"{"a":1},"id":{"b":{}}}}"#)).is_err(), "twice");
    assert!(parse(&text(r#"{"a":}}}"#)).is_err(), "broken");
}

#[test]
fn a_text_taken_apart_unread_is_read_again_when_its_parameters_cannot_be() {
    use crate::ledger::Body;
    let parse = |text: &str| {
        let Ok(Message::Call {
            params,
            checked: false,
            ..
        }) = decode(Dialect::JsonRpc, text)
        else {
            panic!("{text}")
        };
        let range = Body::range_of(text, params);
        Body::new(text.to_owned(), range, false).parse_params::<Value>(false, &limits())
    };
    let more = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":1},"later":{}}"#;
    assert_eq!(parse(more), Ok(json!({"a": 1})), "a member we do not know");
    let twice = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{},"params":{"a":1}}"#;
    assert_eq!(
        parse(twice).unwrap_err().written_wrongly(),
        Some(Fault::InvalidMessage)
    );
    let broken = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":}}"#;
    assert_eq!(
        parse(broken).unwrap_err().written_wrongly(),
        Some(Fault::Parse)
    );
}

#[test]
fn the_first_message_tells_the_dialect() {
    assert_eq!(
        Dialect::of("{\"jsonrpc\":\"2.0\",\"method\":\"a\"}"),
        Some(Dialect::JsonRpc)
    );
    assert_eq!(Dialect::of(" [1]"), Some(Dialect::JsonRpc));
    assert_eq!(
        Dialect::of("{\"seq_id\":1,\"action\":\"a\",\"data\":{}}"),
        Some(Dialect::LangBot)
    );
    assert_eq!(Dialect::of("{\"seq_id\":1}"), None);
    assert_eq!(Dialect::of("GET / HTTP/1.1"), None);
}

#[test]
fn meta_does_not_disturb_parameters_that_refuse_unknown_members() {
    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Strict {
        a: u32,
        b: Vec<String>,
    }
    let expected = Strict {
        a: 1,
        b: vec!["x".into()],
    };
    for text in [
        r#"{"_meta":{"credit":3},"a":1,"b":["x"]}"#,
        r#"{"a":1,"_meta":{"nested":{"a":2}},"b":["x"]}"#,
        r#"{"a":1,"b":["x"],"_meta":null}"#,
    ] {
        assert_eq!(
            parse_params::<Strict>(text, true).unwrap(),
            expected,
            "{text}"
        );
    }
    for (text, rest) in [
        (r#"{"_meta":{"credit":3},"a" : 1}"#, r#"{"a":1}"#),
        (
            r#"{"a":1,"_meta":{},"a":"\u00e9\n"}"#,
            r#"{"a":1,"a":"\u00e9\n"}"#,
        ),
        (r#" { "_meta" : null } "#, "{}"),
        (r#"{"a":{"_meta":1}}"#, r#"{"a":{"_meta":1}}"#),
    ] {
        let as_text = parse_params::<Box<serde_json::value::RawValue>>(text, true).unwrap();
        assert_eq!(
            as_text.get(),
            rest,
            "an action that reads its parameters as text"
        );
    }
    let null = r#"{"jsonrpc":"2.0","id":7,"method":"a","params":{"_meta":null}}"#;
    let read = decode(Dialect::JsonRpc, null);
    assert!(
        matches!(
            read,
            Ok(Message::Call {
                meta_inside: true,
                ..
            })
        ),
        "{read:?}"
    );
    assert!(parse_params::<Strict>(r#"{"a":1,"b":[],"c":2,"_meta":{}}"#, true).is_err());
    assert!(
        parse_params::<Strict>(r#"{"a":1,"b":[{"_meta":1}]}"#, true).is_err(),
        "only the outermost"
    );
}
