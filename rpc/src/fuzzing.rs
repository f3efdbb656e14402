//! Entry points for the fuzzer and the tests of codecs.

mod shapes;

use serde_json::Value;

use crate::codec::{self, Codec, Decoded, Encoded, Ends, Message, Unreadable, parse_params};
use crate::limits::Limits;

pub use shapes::shapes;

/// Decodes a text, and checks that readable messages survive a round trip.
///
/// It writes and reads calls and answers again, and compares them.
///
/// # Panics
/// If they differ.
pub fn decode(codec: &dyn Codec, text: &str) {
    let limits = Limits::default();
    let _ = (codec.recognises(text), codec.recognises_head(text));
    let _ = (codec.is_answer(text), codec.id_at_start(text, &limits));
    let messages = match codec::decode(codec, text, &limits) {
        Decoded::One(one) => vec![one],
        Decoded::Batch(items) => items.into_iter().map(|(_, item)| item).collect(),
    };
    for message in messages {
        if matches!(&message, Ok(message) if !message.checked()) {
            shortcut(codec, text, &message, &limits);
        }
        check(codec, message, &limits);
    }
}

/// Checks the fast path against a full parse.
/// The full parse must give the same message, or find invalid JSON in the skipped part.
fn shortcut(
    codec: &dyn Codec,
    text: &str,
    taken: &Result<Message<'_>, Unreadable>,
    limits: &Limits,
) {
    let body = match taken {
        Ok(Message::Call { params, .. }) => *params,
        Ok(Message::Answer {
            outcome: Ok(body), ..
        }) => body,
        _ => return,
    };
    if serde_json::from_str::<Value>(body).is_err() {
        return;
    }
    match (taken, codec.read_again(text, limits)) {
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
            Ok(Message::Answer { id, .. }),
            Ok(Message::Answer {
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

fn check(codec: &dyn Codec, message: Result<Message<'_>, Unreadable>, limits: &Limits) {
    match message {
        Ok(Message::Call {
            action,
            params,
            meta_inside,
            meta,
            ..
        }) => {
            let Ok(Value::Object(params)) = parse_params::<Value>(params, meta_inside) else {
                return;
            };
            let Ok(again) = codec.call(Some(1), &action, &params, &meta) else {
                return;
            };
            let Decoded::One(Ok(Message::Call {
                action: action_again,
                params: params_again,
                meta: meta_again,
                meta_inside,
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
                parse_params::<Value>(params_again, meta_inside).unwrap_or_default()
            );
        }
        Ok(Message::Answer {
            id,
            outcome: Ok(body),
            ..
        }) if body.starts_with('{') => {
            let Ok(again) = codec.result(&id, &Encoded(body), Ends::Call) else {
                return;
            };
            let Decoded::One(Ok(Message::Answer {
                id: id_again,
                outcome: Ok(body_again),
                ..
            })) = codec::decode(codec, &again, limits)
            else {
                panic!("{again}");
            };
            assert_eq!((id, body), (id_again, body_again));
        }
        Ok(Message::Answer {
            id,
            outcome: Err(error),
            ..
        }) => {
            let _ = codec.error(Some(&id), &error);
        }
        Err(Unreadable { id, error }) => {
            let _ = codec.error(id.as_ref(), &error);
        }
        Ok(_) => {}
    }
}
