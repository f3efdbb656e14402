//! Decoding of JSON-RPC messages.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{CHUNK, code_of, fault_of};
use crate::codec::{
    CallId, Control, DecodeError, Decoded, Grant, Message, Meta, Part, meta, parse_fault,
};
use crate::error::{Code, Fault, RpcError};
use crate::limits::Limits;

/// Every member a message can have, each as raw JSON.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default)]
    jsonrpc: Option<Cow<'a, str>>,
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<WireError<'a>>,
}

/// Deserializes a member that is present, including `null`.
fn present<'de: 'a, 'a, D: Deserializer<'de>>(from: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

#[derive(Deserialize)]
struct WireError<'a> {
    code: i64,
    message: String,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ErrorData<'a> {
    #[serde(borrow)]
    code: Cow<'a, str>,
    #[serde(borrow, default)]
    detail: Option<&'a RawValue>,
}

/// Whether a first message is a batch, or has the member `jsonrpc`.
pub(super) fn recognises(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Marked {
        #[allow(dead_code)]
        jsonrpc: serde::de::IgnoredAny,
    }
    text.trim_start().starts_with('[') || serde_json::from_str::<Marked>(text).is_ok()
}

/// Decodes a message or a batch.
pub(super) fn decode<'a>(text: &'a str, limits: &Limits) -> Decoded<'a> {
    if let Some(message) = decode_fast(text) {
        return Decoded::One(Ok(message));
    }
    if !text.trim_start().starts_with('[') {
        return Decoded::One(decode_one(text, limits));
    }
    let refused = |error| Decoded::One(Err(DecodeError { id: None, error }));
    match serde_json::from_str::<Vec<&'a RawValue>>(text) {
        Err(error) => refused(parse_fault(&error)),
        Ok(items) if items.is_empty() => refused(RpcError::fault(
            Fault::InvalidMessage,
            "batch: must not be empty",
        )),
        Ok(items) if items.len() > limits.batch => refused(RpcError::limit(
            Code::TooLarge,
            "batch",
            "batch",
            limits.batch,
        )),
        Ok(items) => Decoded::Batch(
            items
                .into_iter()
                .map(|item| (item.get(), decode_one(item.get(), limits)))
                .collect(),
        ),
    }
}

/// Fast path for messages written exactly as this codec writes them.
///
/// It splits a call without `_meta`, a result or a chunk (see [`encode`](super::encode)) without reading the
/// parameters or the result. This saves one of two scans of nearly every message. The code that parses the body checks
/// it.
fn decode_fast(text: &str) -> Option<Message<'_>> {
    if let Some(rest) = text.strip_prefix(CHUNK) {
        let (id, rest) = leading_id(rest)?;
        let rest = rest.strip_prefix(",\"chunk\":")?;
        let whole = rest.len() >= 4 && rest.starts_with('{') && rest.ends_with("}}}");
        return whole.then(|| Message::Response {
            id,
            outcome: Ok(&rest[..rest.len() - 2]),
            part: Part::Chunk { index: None },
            checked: false,
        });
    }
    let rest = text.strip_prefix("{\"jsonrpc\":\"2.0\",\"id\":")?;
    let (id, rest) = leading_id(rest)?;
    let object = |rest: &'_ str| rest.len() >= 3 && rest.starts_with('{') && rest.ends_with("}}");
    let inner = |rest: &'_ str| rest.len() - 1;
    if let Some(rest) = rest.strip_prefix(",\"result\":") {
        let outcome = object(rest).then(|| Ok(&rest[..inner(rest)]))?;
        return Some(Message::Response {
            id,
            outcome,
            part: Part::Whole,
            checked: false,
        });
    }
    let rest = rest.strip_prefix(",\"method\":\"")?;
    let (action, rest) = rest.split_at(memchr::memchr2(b'"', b'\\', rest.as_bytes())?);
    let rest = rest.strip_prefix("\",\"params\":")?;
    if !object(rest) || action.starts_with("$/") || meta::is_present(rest) {
        return None;
    }
    Some(Message::Call {
        id: Some(id),
        action: Cow::Borrowed(action),
        params: &rest[..inner(rest)],
        checked: false,
        has_meta: false,
        meta: Meta::default(),
    })
}

/// Parses the numeric id at the start of a text; returns it and the rest.
fn leading_id(text: &str) -> Option<(CallId, &str)> {
    let (digits, rest) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let id = CallId::Number(digits.parse().ok()?);
    (digits.len() == 1 || !digits.starts_with('0')).then_some((id, rest))
}

fn invalid(id: Option<CallId>, message: &str) -> DecodeError {
    DecodeError {
        id,
        error: RpcError::fault(Fault::InvalidMessage, message),
    }
}

/// Decodes a message without a method.
fn decode_response<'a>(
    id: Option<CallId>,
    result: Option<&'a RawValue>,
    error: Option<WireError<'a>>,
) -> Result<Message<'a>, DecodeError> {
    let Some(id) = id else {
        // The peer answers an unreadable message of this side with a null id.
        return if error.is_some() {
            Ok(Message::Ignored)
        } else {
            let rule = "method, id: both are missing; a message needs at least one";
            Err(invalid(None, rule))
        };
    };
    let outcome = match (result, error) {
        (Some(result), None) => Ok(result.get()),
        (None, Some(error)) => Err(error.read()),
        _ => {
            let rule = "method, result, error: exactly one must be present";
            return Err(invalid(Some(id), rule));
        }
    };
    Ok(Message::Response {
        id,
        outcome,
        part: Part::Whole,
        checked: true,
    })
}

/// Decodes one message by parsing all of it.
pub(super) fn decode_one<'a>(text: &'a str, limits: &Limits) -> Result<Message<'a>, DecodeError> {
    let envelope: Envelope<'a> = serde_json::from_str(text).map_err(|error| DecodeError {
        id: None,
        error: parse_fault(&error),
    })?;
    let id = envelope
        .id
        .and_then(|id| CallId::from_token(id.get(), limits.id_bytes));
    if envelope.jsonrpc.as_deref() != Some("2.0") {
        return Err(invalid(id, "jsonrpc: must be \"2.0\""));
    }
    let Some(action) = envelope.method else {
        return decode_response(id, envelope.result, envelope.error);
    };
    if envelope.id.is_some() && id.is_none() {
        let rule = format!(
            "id: must be a string or number of at most {} bytes (limit id_bytes)",
            limits.id_bytes
        );
        return Err(invalid(None, &rule));
    }
    let params = envelope.params.map_or("{}", RawValue::get);
    let bad_params = |of: &str, why: &dyn std::fmt::Display| {
        if envelope.id.is_none() && !action.starts_with("$/") {
            // A notification is never answered, but one of the engine may be a chunk that a call waits for.
            return Ok(Message::Ignored);
        }
        Err(DecodeError {
            id: id.clone(),
            error: RpcError::fault(Fault::InvalidParams, format!("{of}: {why}")),
        })
    };
    if !params.starts_with('{') {
        return bad_params("params", &"must be an object");
    }
    if action.starts_with("$/") {
        let read = match read_control(&action, params, limits) {
            Ok(read) => read,
            Err(error) => return bad_params(&action, &error),
        };
        return match read {
            Some(Ok(control)) => Ok(Message::Control {
                reply_to: id,
                control,
                context: None,
            }),
            Some(Err((id, chunk))) => Ok(Message::Response {
                id,
                outcome: Ok(chunk),
                part: Part::Chunk { index: None },
                checked: true,
            }),
            None if id.is_some() => Ok(Message::Call {
                id,
                action,
                params,
                checked: true,
                has_meta: false,
                meta: Meta::default(),
            }),
            None => Ok(Message::Ignored),
        };
    }
    let meta = match meta::read(params) {
        Ok(meta) => meta,
        Err(error) => return bad_params("_meta", &error),
    };
    Ok(Message::Call {
        id,
        action,
        params,
        checked: true,
        has_meta: meta::is_present(params),
        meta,
    })
}

type ControlOrChunk<'a> = Result<Control<'a>, (CallId, &'a str)>;

fn read_control<'a>(
    method: &str,
    params: &'a str,
    limits: &Limits,
) -> Result<Option<ControlOrChunk<'a>>, serde_json::Error> {
    #[derive(Deserialize)]
    struct CallRef<'a> {
        #[serde(borrow)]
        id: &'a RawValue,
        #[serde(default)]
        credit: u32,
        #[serde(borrow, default)]
        chunk: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Bye<'a> {
        #[serde(borrow, default)]
        reason: Cow<'a, str>,
        #[serde(default)]
        restart: bool,
    }
    let call = || -> Result<(CallId, CallRef<'a>), serde_json::Error> {
        let call: CallRef<'a> = serde_json::from_str(params)?;
        let id = CallId::from_token(call.id.get(), limits.id_bytes)
            .ok_or_else(|| serde::de::Error::custom("id must be a string or number"))?;
        Ok((id, call))
    };
    Ok(Some(match method {
        "$/cancel" => Ok(Control::Cancel { id: call()?.0 }),
        "$/credit" => {
            let (id, call) = call()?;
            Ok(Control::Grant {
                id,
                grant: Grant::More(call.credit),
            })
        }
        "$/chunk" => {
            let (id, call) = call()?;
            Err((id, call.chunk.map_or("{}", RawValue::get)))
        }
        "$/ping" => Ok(Control::Ping),
        "$/pong" => Ok(Control::Pong),
        "$/bye" => {
            let bye: Bye<'a> = serde_json::from_str(params)?;
            Ok(Control::Bye {
                reason: bye.reason,
                restart: bye.restart,
            })
        }
        _ => return Ok(None),
    }))
}

impl WireError<'_> {
    fn read(self) -> RpcError {
        let data = self
            .data
            .and_then(|data| serde_json::from_str::<ErrorData<'_>>(data.get()).ok());
        let named = data.as_ref().and_then(|data| Code::parse(&data.code));
        let detail = match data {
            Some(data) => data.detail.map(|detail| detail.get().to_owned()),
            None => self.data.map(|data| data.get().to_owned()),
        };
        let error = match (fault_of(self.code), named) {
            (Some(fault), _) => RpcError::fault(fault, self.message),
            (None, named) => {
                let code = named
                    .or_else(|| code_of(self.code))
                    .unwrap_or(Code::Internal);
                RpcError::new(code, self.message)
            }
        };
        error.with_raw_detail(detail)
    }
}
