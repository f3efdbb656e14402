//! Every form of the frames; a change of the wire format fails here first.

use box_rpc::Code;
use box_rpc::fuzzing;
use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn limits() -> Limits {
    Limits::default()
}

fn decode(text: &str) -> Result<Message<'_>, DecodeError> {
    super::decode(text, &limits())
}

/// Replaces ids of control requests, which count down over the whole process.
fn stable(text: &str) -> String {
    match text
        .strip_prefix("{\"seq_id\":-")
        .and_then(|rest| rest.split_once(','))
    {
        Some((_, rest)) => format!("{{\"seq_id\":-N,{rest}"),
        None => text.to_owned(),
    }
}

#[test]
fn every_frame_is_encoded_as_documented() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/langbot/codec/shapes.txt");
    fuzzing::assert_shapes(&Frames, stable, include_str!("shapes.txt"), file);
}

#[test]
fn every_error_survives_as_the_nearest_class() {
    for code in Code::ALL {
        let error = RpcError::new(code, "why not");
        let text = Frames.error(Some(&CallId::Number(1)), &error).unwrap();
        let Ok(Message::Response {
            outcome: Err(read), ..
        }) = decode(&text)
        else {
            panic!("{text}")
        };
        let expected = match code {
            Code::TooLarge | Code::Overloaded => Code::Internal,
            Code::Unsupported => Code::Unavailable,
            code => code,
        };
        assert_eq!(read.code(), expected, "{text}");
    }
    let error = RpcError::limit(Code::Overloaded, "calls", "in_flight", 128);
    let text = Frames.error(Some(&CallId::Number(1)), &error).unwrap();
    let Ok(Message::Response {
        outcome: Err(read), ..
    }) = decode(&text)
    else {
        panic!()
    };
    assert_eq!(read, error);
}

#[test]
fn the_documented_error_table_has_every_class() {
    let page = include_str!("../../../../docs/langbot.md");
    for code in Code::ALL {
        let class = classes::class_of(&RpcError::new(code, ""));
        let row = format!("| `{code}` | `");
        let line = page.lines().find(|line| line.starts_with(&row));
        assert!(line.is_some_and(|line| line.contains(class)), "{code}");
    }
}

#[test]
fn a_first_message_is_recognised() {
    assert!(Frames.recognises("{\"seq_id\":1,\"action\":\"a\",\"data\":{}}"));
    assert!(!Frames.recognises("{\"seq_id\":1}"));
    assert!(!Frames.recognises("{\"jsonrpc\":\"2.0\",\"method\":\"a\"}"));
    assert!(!Frames.recognises("GET / HTTP/1.1"));
}

#[test]
fn the_id_of_an_unreadable_message_is_found_at_its_start() {
    let id = Frames.id_at_start("{\"seq_id\": 12, \"action\"", &limits());
    assert_eq!(id, Some(CallId::Number(12)));
}

#[test]
fn an_invalid_control_request_gets_langbots_error() {
    for (action, data, reason) in [
        (
            "__cancel_action",
            "{}",
            "Cancellation requires an integer seq_id",
        ),
        (
            "__stream_ack",
            r#"{"seq_id":1,"index":"2"}"#,
            "Stream acknowledgement requires integer sequence and index",
        ),
    ] {
        let text = format!(r#"{{"seq_id":1,"action":"{action}","data":{data}}}"#);
        let Ok(Message::Control {
            control: Control::Invalid(error),
            ..
        }) = decode(&text)
        else {
            panic!("{text}")
        };
        let answer = Frames.error(Some(&CallId::Number(1)), &error).unwrap();
        assert!(
            answer.contains(&format!("ValueError: {reason}")),
            "{answer}"
        );
    }
}

#[test]
fn captured_frames_of_langbot_are_decoded() {
    let ping = r#"{"seq_id": 28010, "action": "__ping", "data": {}}"#;
    assert_eq!(
        decode(ping),
        Ok(Message::Control {
            reply_to: Some(CallId::Number(28010)),
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
    }) = decode(exec)
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
    let Ok(Message::Response {
        outcome: Err(error),
        ..
    }) = decode(conflict)
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
        assert_eq!(decode(dropped), Ok(Message::Ignored), "{dropped}");
    }
    let no_status = r#"{"seq_id":1,"code":0,"message":"success","data":{}}"#;
    let Ok(Message::Response { part, .. }) = decode(no_status) else {
        panic!()
    };
    assert_eq!(part, Part::Either { index: None });
}

#[test]
fn a_long_error_is_truncated() {
    let error = RpcError::internal("é".repeat(5000));
    let text = Frames.error(Some(&CallId::Number(1)), &error).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let message = value["message"].as_str().unwrap();
    assert!(message.ends_with("é... [protocol error truncated]"));
    assert_eq!(
        message.chars().count(),
        "RuntimeError: ".len() + 4096 + "... [protocol error truncated]".len()
    );
}

fn any_object() -> impl Strategy<Value = Value> {
    let member = prop_oneof![
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from)
    ];
    let inner = prop::collection::vec(member, 0..4).prop_map(Value::from);
    prop::collection::btree_map("[^_]{0,8}", inner, 0..5)
        .prop_map(|map| Value::from(serde_json::Map::from_iter(map)))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_are_read_as_they_were_written(
        id in 1..i64::MAX, name in "[^_$]\\PC{0,20}", params in any_object(), deadline in any::<Option<u32>>(),
        key in proptest::option::of(".{1,20}"), credit: bool, context: bool,
    ) {
        let meta = Meta {
            deadline: deadline.map(|ms| Duration::from_millis(ms.into())),
            key,
            credit: if credit { STREAM_WINDOW } else { 0 },
            context: context.then(|| "{\"w\":[1,\"x\"]}".into()),
        };
        let text = Frames.call(Some(id), &name, &params, &meta).unwrap();
        let Ok(Message::Call { id: read_id, action, params: raw, meta: read_meta, .. }) = decode(&text)
        else { panic!("{text}") };
        prop_assert_eq!(read_id, Some(CallId::Number(id)));
        prop_assert_eq!(action.as_ref(), name.as_str());
        prop_assert_eq!(&read_meta, &meta);
        prop_assert_eq!(serde_json::from_str::<Value>(raw).unwrap(), params);
    }

    #[test]
    fn chunks_are_read_as_they_were_written(id in any::<i64>(), body in any_object(), index in 1_u64..1000) {
        let id = CallId::Number(id);
        let text = Frames.chunk(&id, index, &body, 0).unwrap();
        let Ok(Message::Response { id: read, outcome: Ok(raw), part, .. }) = decode(&text) else { panic!("{text}") };
        prop_assert_eq!(&read, &id);
        prop_assert_eq!(serde_json::from_str::<Value>(raw).unwrap(), body);
        prop_assert_eq!(part, Part::Either { index: Some(index) });
    }

    #[test]
    fn controls_are_read_as_they_were_written(id in 0..i64::MAX, read in any::<u32>()) {
        let id = CallId::Number(id);
        let grant = Grant::UpTo { read: read.into(), window: STREAM_WINDOW };
        for control in [
            Control::Cancel { id: id.clone() },
            Control::Grant { id: id.clone(), grant },
            Control::Ping,
            Control::Other { name: FILE_CHUNK, data: "{\"a\":1}" },
        ] {
            let text = Frames.control(&control).unwrap();
            let Ok(Message::Control { control: read, .. }) = decode(&text) else { panic!("{text}") };
            prop_assert_eq!(&read, &control);
        }
    }

    #[test]
    fn any_text_is_read_or_refused_without_a_panic(text in "\\PC{0,200}") {
        fuzzing::decode(&Frames, &text);
    }
}
