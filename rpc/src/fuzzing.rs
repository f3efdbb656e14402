//! Entry points for the fuzzer and the tests of codecs.

mod shapes;

use serde_json::Value;

use crate::codec::{self, CallKind, Codec, DecodeError, Decoded, Encoded, Message, parse_params};
use crate::limits::Limits;

pub use shapes::shapes;

/// Compares the examples of [`shapes`] with a snapshot; `file` is its path.
///
/// `stable` replaces the parts of a text that differ with each run. The variable `UPDATE_SNAPSHOTS` makes it write the
/// file.
///
/// # Panics
/// If they differ, or the file cannot be written.
pub fn assert_shapes(
    codec: &dyn Codec,
    stable: impl Fn(&str) -> String,
    expected: &str,
    file: &str,
) {
    let mut written = String::new();
    for (name, text) in shapes(codec) {
        let text = if text.is_empty() {
            "(nothing)".to_owned()
        } else {
            stable(&text)
        };
        written += &[name, "\n  ", &text, "\n"].concat();
    }
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        assert!(std::fs::write(file, &written).is_ok(), "{file}");
    }
    assert_eq!(
        written, expected,
        "the wire format changed; if intended, run with UPDATE_SNAPSHOTS=1"
    );
}

/// Decodes a text, and checks that readable messages survive a round trip.
///
/// It writes and reads calls and answers again, and compares them.
///
/// # Panics
/// If they differ.
pub fn decode(codec: &dyn Codec, text: &str) {
    let limits = Limits::default();
    let _ = (codec.recognises(text), codec.recognises_head(text));
    let _ = (codec.is_response(text), codec.id_at_start(text, &limits));
    let messages = match codec::decode(codec, text, &limits) {
        Decoded::One(one) => vec![one],
        Decoded::Batch(items) => items.into_iter().map(|(_, item)| item).collect(),
    };
    for message in messages {
        if matches!(&message, Ok(message) if !message.checked()) {
            check_fast_path(codec, text, &message, &limits);
        }
        check_round_trip(codec, message, &limits);
    }
}

/// Checks the fast path against a full parse.
/// The full parse must give the same message, or find invalid JSON in the skipped part.
fn check_fast_path(
    codec: &dyn Codec,
    text: &str,
    fast: &Result<Message<'_>, DecodeError>,
    limits: &Limits,
) {
    let body = match fast {
        Ok(Message::Call { params, .. }) => *params,
        Ok(Message::Response {
            outcome: Ok(body), ..
        }) => body,
        _ => return,
    };
    if serde_json::from_str::<Value>(body).is_err() {
        return;
    }
    match (fast, codec.decode_fully(text, limits)) {
        (
            Ok(Message::Call {
                id, action, params, ..
            }),
            Ok(Message::Call {
                id: i,
                action: a,
                params: p,
                ..
            }),
        ) => {
            assert_eq!((id, action, *params), (&i, &a, p));
        }
        (
            Ok(Message::Response { id, .. }),
            Ok(Message::Response {
                id: i,
                outcome: Ok(b),
                ..
            }),
        ) => {
            assert_eq!((id, body), (&i, b));
        }
        (_, Err(_)) => assert!(text.bytes().any(|byte| byte < 0x20), "{text}"),
        (_, other) => panic!("{text}: {other:?}"),
    }
}

fn check_round_trip(codec: &dyn Codec, message: Result<Message<'_>, DecodeError>, limits: &Limits) {
    match message {
        Ok(Message::Call {
            action,
            params,
            has_meta,
            meta,
            ..
        }) => {
            let Ok(Value::Object(params)) = parse_params::<Value>(params, has_meta) else {
                return;
            };
            let Ok(again) = codec.call(Some(1), &action, &params, &meta) else {
                return;
            };
            let Decoded::One(Ok(Message::Call {
                action: action_again,
                params: params_again,
                meta: meta_again,
                has_meta,
                ..
            })) = codec::decode(codec, &again, limits)
            else {
                return assert!(
                    params.contains_key("_meta")
                        || again.len() > 1000
                        || action.starts_with(['$', '_']),
                    "{again}"
                );
            };
            assert_eq!(action, action_again);
            assert_eq!(meta, meta_again);
            assert_eq!(
                Value::Object(params),
                parse_params::<Value>(params_again, has_meta).unwrap_or_default()
            );
        }
        Ok(Message::Response {
            id,
            outcome: Ok(body),
            ..
        }) if body.starts_with('{') => {
            let Ok(again) = codec.result(&id, &Encoded(body), CallKind::Plain) else {
                return;
            };
            let Decoded::One(Ok(Message::Response {
                id: id_again,
                outcome: Ok(body_again),
                ..
            })) = codec::decode(codec, &again, limits)
            else {
                panic!("{again}");
            };
            assert_eq!((id, body), (id_again, body_again));
        }
        Ok(Message::Response {
            id,
            outcome: Err(error),
            ..
        }) => {
            let _ = codec.error(Some(&id), &error);
        }
        Err(DecodeError { id, error }) => {
            let _ = codec.error(id.as_ref(), &error);
        }
        Ok(_) => {}
    }
}
