//! JSON-RPC 2.0 codec.
//!
//! The messages of the engine itself are notifications with names that begin with `$/`: `$/cancel {id}`, `$/chunk {id,
//! chunk}`, `$/credit {id, credit}`, `$/ping`, `$/pong`, `$/bye {reason, restart}`. The codec ignores an unknown
//! notification with such a name.

use std::borrow::Cow;
use std::io::Write as _;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{
    CallId, Codec, Control, Decoded, Ends, Grant, Message, Meta, Part, Payload, Unreadable,
    id_at_start, members_at_start, meta, parse_fault, write_object, write_text, written,
};
use crate::error::{Code, Fault, RpcError};
use crate::limits::Limits;

/// JSON-RPC 2.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonRpc;

impl Codec for JsonRpc {
    fn name(&self) -> &'static str {
        "JSON-RPC 2.0"
    }

    fn recognises(&self, text: &str) -> bool {
        recognises(text)
    }

    fn recognises_head(&self, head: &str) -> bool {
        head.contains("\"jsonrpc\"")
    }

    fn decode<'a>(&self, text: &'a str, limits: &Limits) -> Decoded<'a> {
        decode(text, limits)
    }

    fn read_again<'a>(&self, text: &'a str, limits: &Limits) -> Result<Message<'a>, Unreadable> {
        one(text, limits)
    }

    fn id_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        id_at_start(head, "\"id\"", limits)
    }

    fn is_answer(&self, head: &str) -> bool {
        let members = members_at_start(head);
        !members.contains("\"method\"")
            && (members.contains("\"result\"") || members.contains("\"error\""))
    }

    fn chunk_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        let (before, about) = head.split_once("\"params\":")?;
        before
            .contains("\"$/chunk\"")
            .then(|| self.id_at_start(about.trim_start(), limits))
            .flatten()
    }

    fn call(
        &self,
        id: Option<i64>,
        action: &str,
        params: &dyn Payload,
        meta: &Meta,
    ) -> Result<String, serde_json::Error> {
        call(id, action, params, meta)
    }

    fn result(
        &self,
        id: &CallId,
        body: &dyn Payload,
        _: Ends,
    ) -> Result<String, serde_json::Error> {
        result(id, body)
    }

    fn error(&self, id: Option<&CallId>, error: &RpcError) -> Option<String> {
        Some(error_text(id, error))
    }

    fn chunk(
        &self,
        id: &CallId,
        _: u64,
        body: &dyn Payload,
        room: usize,
    ) -> Result<String, serde_json::Error> {
        chunk(id, body, room)
    }

    fn control(&self, control: &Control<'_>) -> Option<String> {
        control_text(control)
    }
}

/// Initial capacity for a message of the usual size.
const MESSAGE: usize = 512;

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

fn recognises(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Marked {
        #[allow(dead_code)]
        jsonrpc: serde::de::IgnoredAny,
    }
    text.trim_start().starts_with('[') || serde_json::from_str::<Marked>(text).is_ok()
}

fn decode<'a>(text: &'a str, limits: &Limits) -> Decoded<'a> {
    if let Some(message) = as_we_write(text) {
        return Decoded::One(Ok(message));
    }
    if !text.trim_start().starts_with('[') {
        return Decoded::One(one(text, limits));
    }
    let refused = |error| Decoded::One(Err(Unreadable { id: None, error }));
    match serde_json::from_str::<Vec<&'a RawValue>>(text) {
        Err(error) => refused(parse_fault(&error)),
        Ok(items) if items.is_empty() => refused(RpcError::fault(
            Fault::InvalidMessage,
            "a batch must not be empty",
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
                .map(|item| (item.get(), one(item.get(), limits)))
                .collect(),
        ),
    }
}

/// Beginning of a chunk, up to the id of its call.
const CHUNK: &str = "{\"jsonrpc\":\"2.0\",\"method\":\"$/chunk\",\"params\":{\"id\":";

/// Fast path for messages written exactly as this codec writes them.
///
/// It splits a call without `_meta`, a result or a chunk (see [`call`], [`result`] and [`chunk`]) without reading the
/// parameters or the result. This saves one of two scans of nearly every message. The code that parses the body checks
/// it.
fn as_we_write(text: &str) -> Option<Message<'_>> {
    if let Some(rest) = text.strip_prefix(CHUNK) {
        let (id, rest) = number_at_start(rest)?;
        let rest = rest.strip_prefix(",\"chunk\":")?;
        let whole = rest.len() >= 4 && rest.starts_with('{') && rest.ends_with("}}}");
        return whole.then(|| Message::Answer {
            id,
            outcome: Ok(&rest[..rest.len() - 2]),
            part: Part::Chunk { index: None },
            checked: false,
        });
    }
    let rest = text.strip_prefix("{\"jsonrpc\":\"2.0\",\"id\":")?;
    let (id, rest) = number_at_start(rest)?;
    let object = |rest: &'_ str| rest.len() >= 3 && rest.starts_with('{') && rest.ends_with("}}");
    let inner = |rest: &'_ str| rest.len() - 1;
    if let Some(rest) = rest.strip_prefix(",\"result\":") {
        let outcome = object(rest).then(|| Ok(&rest[..inner(rest)]))?;
        return Some(Message::Answer {
            id,
            outcome,
            part: Part::Whole,
            checked: false,
        });
    }
    let rest = rest.strip_prefix(",\"method\":\"")?;
    let (action, rest) = rest.split_at(memchr::memchr2(b'"', b'\\', rest.as_bytes())?);
    let rest = rest.strip_prefix("\",\"params\":")?;
    if !object(rest) || action.starts_with("$/") || meta::is_inside(rest) {
        return None;
    }
    Some(Message::Call {
        id: Some(id),
        action: Cow::Borrowed(action),
        params: &rest[..inner(rest)],
        checked: false,
        meta_inside: false,
        meta: Meta::default(),
    })
}

/// Parses the numeric id at the start of a text; returns it and the rest.
fn number_at_start(text: &str) -> Option<(CallId, &str)> {
    let (digits, rest) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let id = CallId::Number(digits.parse().ok()?);
    (digits.len() == 1 || !digits.starts_with('0')).then_some((id, rest))
}

fn one<'a>(text: &'a str, limits: &Limits) -> Result<Message<'a>, Unreadable> {
    let envelope: Envelope<'a> = serde_json::from_str(text).map_err(|error| Unreadable {
        id: None,
        error: parse_fault(&error),
    })?;
    let id = envelope
        .id
        .and_then(|id| CallId::from_token(id.get(), limits.id_bytes));
    let invalid = |message: &str| Unreadable {
        id: id.clone(),
        error: RpcError::fault(Fault::InvalidMessage, message),
    };
    if envelope.jsonrpc.as_deref() != Some("2.0") {
        return Err(invalid("jsonrpc must be \"2.0\""));
    }
    let Some(action) = envelope.method else {
        let Some(id) = id.clone() else {
            // The peer answers an unreadable message of this side with a null id.
            return if envelope.error.is_some() {
                Ok(Message::Ignored)
            } else {
                Err(invalid("method or id is missing"))
            };
        };
        return match (envelope.result, envelope.error) {
            (Some(result), None) => Ok(Message::Answer {
                id,
                outcome: Ok(result.get()),
                part: Part::Whole,
                checked: true,
            }),
            (None, Some(error)) => Ok(Message::Answer {
                id,
                outcome: Err(error.read()),
                part: Part::Whole,
                checked: true,
            }),
            _ => Err(invalid("method, or one of result and error, must be there")),
        };
    };
    if envelope.id.is_some() && id.is_none() {
        let rule = format!(
            "id must be a string or number of at most {} bytes (limit id_bytes)",
            limits.id_bytes
        );
        return Err(invalid(&rule));
    }
    let params = envelope.params.map_or("{}", RawValue::get);
    let bad_params = |of: &str, why: &dyn std::fmt::Display| {
        if envelope.id.is_none() && !action.starts_with("$/") {
            // A notification is never answered, but one of the engine may be a chunk that a call waits for.
            return Ok(Message::Ignored);
        }
        Err(Unreadable {
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
                ask: id,
                control,
                context: None,
            }),
            Some(Err((id, chunk))) => Ok(Message::Answer {
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
                meta_inside: false,
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
        meta_inside: meta::is_inside(params),
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
    struct About<'a> {
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
    let about = || -> Result<(CallId, About<'a>), serde_json::Error> {
        let about: About<'a> = serde_json::from_str(params)?;
        let id = CallId::from_token(about.id.get(), limits.id_bytes)
            .ok_or_else(|| serde::de::Error::custom("id must be a string or number"))?;
        Ok((id, about))
    };
    Ok(Some(match method {
        "$/cancel" => Ok(Control::Cancel { id: about()?.0 }),
        "$/credit" => {
            let (id, about) = about()?;
            Ok(Control::Grant {
                id,
                grant: Grant::More(about.credit),
            })
        }
        "$/chunk" => {
            let (id, about) = about()?;
            Err((id, about.chunk.map_or("{}", RawValue::get)))
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
        let word = data.as_ref().and_then(|data| Code::from_word(&data.code));
        let detail = match data {
            Some(data) => data.detail.map(|detail| detail.get().to_owned()),
            None => self.data.map(|data| data.get().to_owned()),
        };
        let error = match (fault_of(self.code), word) {
            (Some(fault), _) => RpcError::fault(fault, self.message),
            (None, word) => {
                let code = word
                    .or_else(|| code_of(self.code))
                    .unwrap_or(Code::Internal);
                RpcError::new(code, self.message)
            }
        };
        error.with_raw_detail(detail)
    }
}

/// Returns the JSON-RPC error number of each code.
fn number(code: Code) -> i64 {
    match code {
        Code::Conflict => -32001,
        Code::NotFound => -32002,
        Code::Validation => -32003,
        Code::Unavailable => -32004,
        Code::Denied => -32005,
        Code::Capacity => -32006,
        Code::Timeout => -32007,
        Code::Cancelled => -32008,
        Code::TooLarge => -32009,
        Code::Overloaded => -32010,
        Code::Unsupported => -32011,
        Code::Internal => -32603,
    }
}

fn code_of(wanted: i64) -> Option<Code> {
    Code::ALL.into_iter().find(|code| number(*code) == wanted)
}

const FAULTS: [(Fault, i64); 4] = [
    (Fault::Parse, -32700),
    (Fault::InvalidMessage, -32600),
    (Fault::UnknownAction, -32601),
    (Fault::InvalidParams, -32602),
];

fn fault_of(number: i64) -> Option<Fault> {
    FAULTS
        .iter()
        .find(|(_, of)| *of == number)
        .map(|(fault, _)| *fault)
}

fn call(
    id: Option<i64>,
    action: &str,
    params: &dyn Payload,
    meta: &Meta,
) -> Result<String, serde_json::Error> {
    written(MESSAGE, |out| {
        out.extend_from_slice(b"{\"jsonrpc\":\"2.0\",");
        if let Some(id) = id {
            out.extend_from_slice(b"\"id\":");
            write_number(out, id);
            out.push(b',');
        }
        out.extend_from_slice(b"\"method\":");
        write_text(out, action);
        out.extend_from_slice(b",\"params\":");
        if *meta == Meta::default() {
            write_object(out, params)?;
        } else {
            out.extend_from_slice(b"{\"_meta\":");
            meta::write(out, meta)?;
            let start = out.len();
            write_object(out, params)?;
            // The opening bracket of the parameters becomes the comma after `_meta`.
            if out[start..] == *b"{}" {
                out.truncate(start);
                out.push(b'}');
            } else {
                out[start] = b',';
            }
        }
        out.push(b'}');
        Ok(())
    })
}

/// Writes an integer, faster than by formatting.
fn write_number(out: &mut Vec<u8>, number: i64) {
    let _ = serde_json::to_writer(out, &number);
}

fn write_id(out: &mut Vec<u8>, id: &CallId) {
    match id {
        CallId::Number(number) => write_number(out, *number),
        CallId::Token(token) => out.extend_from_slice(token.as_bytes()),
        CallId::Unanswered(_) => out.extend_from_slice(b"null"),
    }
}

fn open_answer(out: &mut Vec<u8>, id: Option<&CallId>) {
    out.extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    match id {
        Some(id) => write_id(out, id),
        None => out.extend_from_slice(b"null"),
    }
    out.push(b',');
}

fn result(id: &CallId, body: &dyn Payload) -> Result<String, serde_json::Error> {
    written(MESSAGE, |out| {
        open_answer(out, Some(id));
        out.extend_from_slice(b"\"result\":");
        write_object(out, body)?;
        out.push(b'}');
        Ok(())
    })
}

fn error_text(id: Option<&CallId>, error: &RpcError) -> String {
    let number = match error.written_wrongly() {
        Some(fault) => FAULTS
            .iter()
            .find(|(of, _)| *of == fault)
            .map_or(-32600, |(_, number)| *number),
        None => number(error.code()),
    };
    let mut out = Vec::with_capacity(160);
    open_answer(&mut out, id);
    let _ = write!(out, "\"error\":{{\"code\":{number},\"message\":");
    write_text(&mut out, error.message());
    let _ = write!(out, ",\"data\":{{\"code\":\"{}\"", error.code());
    if let Some(detail) = error.raw_detail() {
        let _ = write!(out, ",\"detail\":{detail}");
    }
    out.extend_from_slice(b"}}}");
    String::from_utf8(out).unwrap_or_default()
}

/// Writes a chunk; `room` estimates its length.
/// A text that grows while it is written is copied repeatedly.
fn chunk(id: &CallId, body: &dyn Payload, room: usize) -> Result<String, serde_json::Error> {
    written(room.max(MESSAGE), |out| {
        out.extend_from_slice(CHUNK.as_bytes());
        write_id(out, id);
        out.extend_from_slice(b",\"chunk\":");
        write_object(out, body)?;
        out.extend_from_slice(b"}}");
        Ok(())
    })
}

fn control_text(control: &Control<'_>) -> Option<String> {
    let (method, params) = match control {
        Control::Cancel { id } => ("cancel", format!("{{\"id\":{id}}}")),
        Control::Grant {
            id,
            grant: Grant::More(more),
        } => ("credit", format!("{{\"id\":{id},\"credit\":{more}}}")),
        Control::Ping => ("ping", "{}".to_owned()),
        Control::Pong => ("pong", "{}".to_owned()),
        Control::Bye { reason, restart } => {
            let reason = serde_json::to_string(reason).ok()?;
            (
                "bye",
                format!("{{\"reason\":{reason},\"restart\":{restart}}}"),
            )
        }
        Control::Grant {
            grant: Grant::UpTo { .. },
            ..
        }
        | Control::Other { .. }
        | Control::Invalid(_) => return None,
    };
    Some(format!(
        "{{\"jsonrpc\":\"2.0\",\"method\":\"$/{method}\",\"params\":{params}}}"
    ))
}
