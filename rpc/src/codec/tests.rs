//! Every message shape of the native wire format.
//!
//! A change of the wire format fails here first.

use serde_json::{Value, json};

mod decode_errors;
mod properties;

use super::*;

fn limits() -> Limits {
    Limits::default()
}

fn decode(text: &str) -> Result<Message<'_>, DecodeError> {
    match super::decode(&JsonRpc, text, &limits()) {
        Decoded::One(one) => one,
        Decoded::Batch(_) => panic!("a batch: {text}"),
    }
}

#[test]
fn every_shape_is_written_as_documented() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/codec/shapes.txt");
    crate::fuzzing::assert_shapes(&JsonRpc, str::to_owned, include_str!("shapes.txt"), file);
}

#[test]
fn every_error_code_survives_a_round_trip() {
    for code in Code::ALL {
        let error = RpcError::new(code, "why not");
        let text = JsonRpc.error(Some(&CallId::Number(1)), &error).unwrap();
        let Ok(Message::Response {
            outcome: Err(read), ..
        }) = decode(&text)
        else {
            panic!("{text}")
        };
        assert_eq!(read.code(), code, "{text}");
    }
}

#[test]
fn error_details_survive_a_round_trip() {
    let error = RpcError::conflict("x").with_detail(&json!({"field": "image", "n": [1, 2]}));
    let text = JsonRpc.error(Some(&CallId::Number(1)), &error).unwrap();
    let Ok(Message::Response {
        outcome: Err(read), ..
    }) = decode(&text)
    else {
        panic!()
    };
    assert_eq!(read, error);
}

#[test]
fn only_messages_written_by_this_codec_take_the_fast_path() {
    let checked = |text: &str| decode(text).unwrap().checked();
    assert!(!checked(
        r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":1}}"#
    ));
    assert!(!checked(r#"{"jsonrpc":"2.0","id":7,"result":{}}"#));
    let chunk = JsonRpc.chunk(&CallId::Number(7), 0, &json!({"a": {}}), 0);
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
fn a_chunk_of_the_fast_path_is_decoded_fully_if_its_body_is_invalid() {
    use crate::in_flight::Body;
    let parse = |text: &str| {
        let Ok(Message::Response {
            id: CallId::Number(7),
            outcome: Ok(body),
            part: Part::Chunk { index: None },
            checked: false,
        }) = decode(text)
        else {
            panic!("{text}")
        };
        let range = Body::range_of(text, body);
        Body::new(text.to_owned(), range, false).parse::<Value>(&JsonRpc, &limits())
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
fn a_call_of_the_fast_path_is_decoded_fully_if_its_parameters_are_invalid() {
    use crate::in_flight::Body;
    let parse = |text: &str| {
        let Ok(Message::Call {
            params,
            checked: false,
            ..
        }) = decode(text)
        else {
            panic!("{text}")
        };
        let range = Body::range_of(text, params);
        Body::new(text.to_owned(), range, false).parse_params::<Value>(false, &JsonRpc, &limits())
    };
    let more = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":1},"later":{}}"#;
    assert_eq!(parse(more), Ok(json!({"a": 1})), "a member we do not know");
    let twice = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{},"params":{"a":1}}"#;
    assert_eq!(
        parse(twice).unwrap_err().protocol_fault(),
        Some(Fault::InvalidMessage)
    );
    let broken = r#"{"jsonrpc":"2.0","id":7,"method":"act","params":{"a":}}"#;
    assert_eq!(
        parse(broken).unwrap_err().protocol_fault(),
        Some(Fault::Parse)
    );
}

#[test]
fn a_first_message_is_recognised() {
    assert!(JsonRpc.recognises("{\"jsonrpc\":\"2.0\",\"method\":\"a\"}"));
    assert!(JsonRpc.recognises(" [1]"));
    assert!(!JsonRpc.recognises("{\"id\":1}"));
    assert!(!JsonRpc.recognises("GET / HTTP/1.1"));
    let both = Codecs::FirstOf(&[&JsonRpc, &JsonRpc]);
    assert!(both.find(|codec| codec.recognises("[1]")).is_some());
    assert_eq!(both.names(), "JSON-RPC 2.0 or JSON-RPC 2.0");
}

#[test]
fn meta_is_removed_from_parameters_that_deny_unknown_members() {
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
    let read = decode(null);
    assert!(
        matches!(read, Ok(Message::Call { has_meta: true, .. })),
        "{read:?}"
    );
    assert!(parse_params::<Strict>(r#"{"a":1,"b":[],"c":2,"_meta":{}}"#, true).is_err());
    assert!(
        parse_params::<Strict>(r#"{"a":1,"b":[{"_meta":1}]}"#, true).is_err(),
        "only the outermost"
    );
}
