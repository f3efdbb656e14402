//! Encoding and decoding are inverse for every message.

use std::borrow::Cow;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::*;
use super::decode;

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[^_]{0,6}", inner, 0..4)
                .prop_map(|map| Value::from(serde_json::Map::from_iter(map))),
        ]
    })
}

fn any_object() -> impl Strategy<Value = Value> {
    prop::collection::btree_map("[^_]{0,8}", any_json(), 0..5)
        .prop_map(|map| Value::from(serde_json::Map::from_iter(map)))
}

fn any_meta() -> impl Strategy<Value = Meta> {
    (
        any::<Option<u32>>(),
        proptest::option::of(".{1,20}"),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(deadline, key, credit, context)| Meta {
            deadline: deadline.map(|ms| Duration::from_millis(ms.into())),
            key,
            credit: if credit { 8 } else { 0 },
            context: context.then(|| "{\"w\":[1,\"x\"]}".into()),
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_are_read_as_they_were_written(
        id in 1..i64::MAX, name in "[^_$]\\PC{0,20}", params in any_object(), meta in any_meta(),
    ) {
        let text = JsonRpc.call(Some(id), &name, &params, &meta).unwrap();
        let Ok(Message::Call { id: read_id, action, params: raw, has_meta, meta: read_meta, .. }) = decode(&text)
        else { panic!("{text}") };
        prop_assert_eq!(read_id, Some(CallId::Number(id)));
        prop_assert_eq!(action.as_ref(), name.as_str());
        prop_assert_eq!(&read_meta, &meta);
        prop_assert_eq!(parse_params::<Value>(raw, has_meta).unwrap(), params.clone());
    }

    #[test]
    fn answers_and_chunks_are_read_as_they_were_written(
        id in prop_oneof![any::<i64>().prop_map(CallId::Number), "[a-z\"\\\\é]{0,9}".prop_map(|id| CallId::Token(json!(id).to_string().into()))],
        body in any_object(), index in 1_u64..1000,
    ) {
        let text = JsonRpc.result(&id, &body, CallKind::Plain).unwrap();
        let Ok(Message::Response { id: read, outcome: Ok(raw), part: Part::Whole, .. }) = decode(&text) else { panic!("{text}") };
        prop_assert_eq!(&read, &id);
        prop_assert_eq!(serde_json::from_str::<Value>(raw).unwrap(), body.clone());
        let text = JsonRpc.chunk(&id, index, &body, 0).unwrap();
        let Ok(Message::Response { id: read, outcome: Ok(raw), part, .. }) = decode(&text) else { panic!("{text}") };
        prop_assert_eq!(&read, &id);
        prop_assert_eq!(serde_json::from_str::<Value>(raw).unwrap(), body.clone());
        prop_assert_ne!(part, Part::Whole);
    }

    #[test]
    fn errors_are_read_as_they_were_written(
        code in prop::sample::select(Code::ALL.to_vec()), message in "\\PC{0,60}", detail in proptest::option::of(any_object()),
    ) {
        let mut error = RpcError::new(code, message);
        if let Some(detail) = &detail {
            error = error.with_detail(detail);
        }
        let text = JsonRpc.error(Some(&CallId::Number(3)), &error).unwrap();
        let Ok(Message::Response { outcome: Err(read), .. }) = decode(&text) else { panic!("{text}") };
        prop_assert_eq!(read, error);
    }

    #[test]
    fn controls_are_read_as_they_were_written(id in 0..i64::MAX, more in any::<u32>(), reason in "\\PC{0,20}", restart: bool) {
        let id = CallId::Number(id);
        for control in [
            Control::Cancel { id: id.clone() },
            Control::Grant { id: id.clone(), grant: Grant::More(more) },
            Control::Ping,
            Control::Pong,
            Control::Bye { reason: Cow::Borrowed(&reason), restart },
        ] {
            let text = JsonRpc.control(&control).unwrap();
            let Ok(Message::Control { control: read, .. }) = decode(&text) else { panic!("{text}") };
            prop_assert_eq!(&read, &control);
        }
    }

    #[test]
    fn any_text_is_read_or_refused_without_a_panic(text in "\\PC{0,200}") {
        crate::fuzzing::decode(&JsonRpc, &text);
    }
}
