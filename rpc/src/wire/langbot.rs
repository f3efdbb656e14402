//! LangBot's action frames.
//!
//! A request has `seq_id`, `action`, `data` and perhaps `context`; a response has all of `seq_id`,
//! `code`, `message`, `data` and `chunk_status`. Unknown members are ignored, so our own peers send
//! `deadline_ms` and `key` beside them. What is no frame is ignored and never answered. The kind of
//! an error is the prefix of its text.

use std::borrow::Cow;
use std::io::Write as _;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::meta::milliseconds;
use super::{Ends, Payload, parse_fault, write_object, write_text, written};
use crate::error::{Code, Fault, LimitDetail, RpcError};
use crate::limits::Limits;
use crate::message::{CallId, Control, Grant, Message, Meta, Part, Unreadable};

/// Chunks a stream may be ahead of its reader.
pub(crate) const STREAM_WINDOW: u32 = 8;
/// The id under which a request without a usable one is answered.
const UNKNOWN_ID: i64 = -1;
/// Longest error text without its class, in characters.
const ERROR_CHARS: usize = 4096;

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(borrow, default)]
    seq_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    action: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
    #[serde(borrow, default)]
    context: Option<&'a RawValue>,
    #[serde(default)]
    stream_flow_control: Option<One>,
    #[serde(default)]
    deadline_ms: Option<u64>,
    #[serde(borrow, default)]
    key: Option<Cow<'a, str>>,
    #[serde(default)]
    code: Option<i64>,
    #[serde(borrow, default)]
    message: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    chunk_status: Option<Cow<'a, str>>,
    #[serde(default)]
    stream_index: Option<u64>,
}

/// The number 1; there is no other flow control.
#[derive(Deserialize)]
#[serde(try_from = "u8")]
struct One;

impl TryFrom<u8> for One {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        let one = (number == 1).then_some(Self);
        one.ok_or("stream_flow_control must be 1")
    }
}

pub(super) fn recognises(text: &str) -> bool {
    serde_json::from_str::<Frame<'_>>(text).is_ok_and(|frame| {
        frame.seq_id.is_some() && (frame.action.is_some() || frame.code.is_some())
    })
}

pub(super) fn decode<'a>(text: &'a str, limits: &Limits) -> Result<Message<'a>, Unreadable> {
    let frame: Frame<'a> =
        serde_json::from_str(text).map_err(|error| misshapen(text, &error, limits))?;
    let id = frame
        .seq_id
        .and_then(|id| CallId::from_token(id.get(), limits.id_bytes));
    let object = frame
        .data
        .map(RawValue::get)
        .filter(|data| data.starts_with('{'));
    if let Some(code) = frame.code {
        let (Some(id), Some(message), Some(data)) = (id, frame.message, object) else {
            return Ok(Message::Ignored);
        };
        let outcome = if code == 0 {
            Ok(data)
        } else {
            Err(read_error(&message))
        };
        let part = match (&outcome, frame.chunk_status.as_deref()) {
            (Ok(_), Some("continue") | None) => Part::Either {
                index: frame.stream_index,
            },
            _ => Part::Whole,
        };
        return Ok(Message::Answer {
            id,
            outcome,
            part,
            checked: true,
        });
    }
    let Some(action) = frame.action else {
        return Ok(Message::Ignored);
    };
    let Some(id) = id.filter(|id| matches!(id, CallId::Number(_))) else {
        let error = RpcError::fault(Fault::InvalidMessage, "seq_id must be a whole number");
        return Err(Unreadable {
            id: Some(CallId::Number(UNKNOWN_ID)),
            error,
        });
    };
    let Some(params) = object else {
        let error = RpcError::fault(Fault::InvalidMessage, "data must be an object");
        return Err(Unreadable {
            id: Some(id),
            error,
        });
    };
    if let Some(control) = read_control(&action, params) {
        return Ok(Message::Control {
            ask: Some(id),
            control,
            context: frame.context.map(RawValue::get),
        });
    }
    let meta = Meta {
        deadline: frame.deadline_ms.map(Duration::from_millis),
        key: frame.key.map(Cow::into_owned),
        credit: if frame.stream_flow_control.is_some() {
            STREAM_WINDOW
        } else {
            0
        },
        context: frame.context.map(|context| context.get().into()),
    };
    Ok(Message::Call {
        id: Some(id),
        action,
        params,
        checked: true,
        meta_inside: false,
        meta,
    })
}

/// A frame with a member of the wrong type: a request is answered all the same, an answer is passed over.
fn misshapen(text: &str, error: &serde_json::Error, limits: &Limits) -> Unreadable {
    #[derive(Deserialize)]
    struct Outline<'a> {
        #[serde(borrow, default)]
        seq_id: Option<&'a RawValue>,
        #[serde(default)]
        action: Option<IgnoredAny>,
        #[serde(default)]
        code: Option<IgnoredAny>,
    }
    let outline = serde_json::from_str::<Outline<'_>>(text).ok();
    let request = outline.filter(|outline| outline.action.is_some() && outline.code.is_none());
    let Some(request) = request else {
        return Unreadable {
            id: None,
            error: parse_fault(error),
        };
    };
    let id = request
        .seq_id
        .and_then(|id| CallId::from_token(id.get(), limits.id_bytes));
    Unreadable {
        id: Some(id.unwrap_or(CallId::Number(UNKNOWN_ID))),
        error: RpcError::fault(Fault::InvalidMessage, error.to_string()),
    }
}

fn read_control<'a>(action: &str, data: &'a str) -> Option<Control<'a>> {
    #[derive(Deserialize)]
    struct Whose {
        seq_id: i64,
    }
    #[derive(Deserialize)]
    struct Read {
        seq_id: i64,
        index: i64,
    }
    Some(match action {
        "__ping" => Control::Ping,
        "__cancel_action" => match serde_json::from_str::<Whose>(data) {
            Ok(whose) => Control::Cancel {
                id: CallId::Number(whose.seq_id),
            },
            Err(_) => Control::Malformed {
                request: "__cancel_action",
                why: "Cancellation requires an integer seq_id",
            },
        },
        "__stream_ack" => match serde_json::from_str::<Read>(data) {
            Ok(read) => Control::Grant {
                id: CallId::Number(read.seq_id),
                // One below zero is of no chunk, and so is one that was never sent.
                grant: Grant::ReadUpTo(u64::try_from(read.index).unwrap_or(u64::MAX)),
            },
            Err(_) => Control::Malformed {
                request: "__stream_ack",
                why: "Stream acknowledgement requires integer sequence and index",
            },
        },
        "__file_chunk" => Control::FilePiece(data),
        _ => return None,
    })
}

/// An error that LangBot's own server would raise as a `ValueError`.
pub(crate) fn value_error(message: impl Into<String>) -> RpcError {
    let class = Class {
        class: "ValueError".into(),
    };
    RpcError::validation(message).with_detail(&class)
}

/// An id for a request whose answer nobody waits for: negative, which no call's is.
pub(super) fn ignored_id() -> i64 {
    static NEXT: AtomicI64 = AtomicI64::new(UNKNOWN_ID - 1);
    NEXT.fetch_sub(1, Ordering::Relaxed)
}

/// The prefixes, in the order in which LangBot's client looks for them. Some stand for a narrower
/// subject than the word does; the error's detail `subject` says which.
const PREFIXES: [(&str, Code, Option<&str>); 14] = [
    ("BoxAdmissionError", Code::Denied, Some("grant")),
    ("BoxReadinessError", Code::Unavailable, Some("readiness")),
    ("BoxCapacityExceededError", Code::Capacity, None),
    ("BoxValidationError", Code::Validation, None),
    ("BoxSessionNotFoundError", Code::NotFound, None),
    ("BoxSessionConflictError", Code::Conflict, None),
    (
        "BoxManagedProcessNotFoundError",
        Code::NotFound,
        Some("process"),
    ),
    (
        "BoxManagedProcessConflictError",
        Code::Conflict,
        Some("process"),
    ),
    ("BoxBackendUnavailableError", Code::Unavailable, None),
    ("PermissionError", Code::Denied, None),
    ("TimeoutError", Code::Timeout, None),
    ("CancelledError", Code::Cancelled, None),
    ("RuntimeError", Code::Internal, None),
    ("ValidationError", Code::Validation, None),
];

#[derive(Serialize, Deserialize)]
struct Subject<'a> {
    #[serde(borrow)]
    subject: Cow<'a, str>,
}

/// A gateway that answers as LangBot's own server would may name the class itself.
#[derive(Serialize, Deserialize)]
struct Class<'a> {
    #[serde(borrow)]
    class: Cow<'a, str>,
}

fn error_text(error: &RpcError) -> String {
    let message = shortened(error.message());
    let limit = error.detail::<LimitDetail>();
    let max = limit.as_ref().map(|limit| limit.max);
    let of_bytes = limit.is_some_and(|limit| limit.limit.contains("bytes"));
    match (error.written_wrongly(), error.code(), max) {
        (Some(Fault::UnknownAction), ..) => return format!("ValueError: {message}"),
        (Some(Fault::InvalidMessage), ..) => return format!("ValidationError: {message}"),
        (Some(Fault::InvalidParams), ..) => {
            // What a Python handler says when it takes a missing key out of `data`.
            let missing = message.split_once("missing field `");
            return match missing.and_then(|(_, rest)| rest.split_once('`')) {
                Some((field, _)) => format!("KeyError: '{field}'"),
                None => format!("BoxValidationError: {message}"),
            };
        }
        (_, Code::TooLarge, Some(max)) => {
            return format!("ValueError: Runtime message exceeds {max} byte limit");
        }
        (_, Code::Overloaded, Some(max)) if !of_bytes => {
            return format!("Runtime connection is busy (max {max} concurrent actions)");
        }
        (_, Code::TooLarge | Code::Overloaded, _) => return format!("ValueError: {message}"),
        _ => {}
    }
    let named = error
        .raw_detail()
        .and_then(|detail| serde_json::from_str::<Class<'_>>(detail).ok());
    if let Some(Class { class }) = named {
        return format!("{class}: {message}");
    }
    let subject = error
        .raw_detail()
        .and_then(|detail| serde_json::from_str::<Subject<'_>>(detail).ok());
    let subject = subject.as_ref().map(|detail| detail.subject.as_ref());
    let wanted = if error.code() == Code::Unsupported {
        Code::Unavailable
    } else {
        error.code()
    };
    let exact = PREFIXES
        .iter()
        .find(|(_, code, of)| *code == wanted && of.is_some() && *of == subject);
    let plain = || {
        PREFIXES
            .iter()
            .find(|(_, code, of)| *code == wanted && of.is_none())
    };
    let prefix = exact
        .or_else(plain)
        .map_or("RuntimeError", |(prefix, ..)| prefix);
    format!("{prefix}: {message}")
}

/// A text no longer than LangBot's own server would send it.
fn shortened(message: &str) -> Cow<'_, str> {
    match message.char_indices().nth(ERROR_CHARS) {
        Some((cut, _)) => format!("{}... [protocol error truncated]", &message[..cut]).into(),
        None => message.into(),
    }
}

fn read_error(text: &str) -> RpcError {
    if let Some(rest) = text.strip_prefix("Runtime connection is busy (max ") {
        let max = rest
            .split(' ')
            .next()
            .and_then(|max| max.parse().ok())
            .unwrap_or(0);
        return RpcError::limit(Code::Overloaded, "calls", "in_flight", max);
    }
    if let Some(rest) = text.strip_prefix("ValueError: Runtime message exceeds ") {
        let max = rest
            .split(' ')
            .next()
            .and_then(|max| max.parse().ok())
            .unwrap_or(0);
        return RpcError::limit(Code::TooLarge, "message", "message_bytes", max);
    }
    if text.starts_with("ValueError: Action ") && text.ends_with(" not found") {
        return RpcError::fault(Fault::UnknownAction, &text["ValueError: ".len()..]);
    }
    if let Some(key) = text
        .strip_prefix("KeyError: '")
        .and_then(|rest| rest.strip_suffix('\''))
    {
        return RpcError::fault(Fault::InvalidParams, format!("missing field `{key}`"));
    }
    let found = PREFIXES.iter().find_map(|(prefix, code, subject)| {
        let at = text
            .match_indices(prefix)
            .find(|(at, _)| text[at + prefix.len()..].starts_with(": "))?
            .0;
        let message = if at == 0 {
            &text[prefix.len() + 2..]
        } else {
            text
        };
        Some((message, *code, *subject))
    });
    match found {
        Some((message, code, Some(subject))) => {
            RpcError::new(code, message).with_detail(&Subject {
                subject: subject.into(),
            })
        }
        Some((message, code, None)) => RpcError::new(code, message),
        None => RpcError::new(Code::Internal, text),
    }
}

pub(super) fn call(
    id: i64,
    action: &str,
    params: &impl Serialize,
    meta: &Meta,
) -> Result<String, serde_json::Error> {
    written(256, |out| {
        let _ = write!(out, "{{\"seq_id\":{id},\"action\":");
        write_text(out, action);
        out.extend_from_slice(b",\"data\":");
        write_object(out, params)?;
        if let Some(context) = &meta.context {
            let _ = write!(out, ",\"context\":{context}");
        }
        if meta.credit > 0 {
            out.extend_from_slice(b",\"stream_flow_control\":1");
        }
        if let Some(deadline) = meta.deadline {
            let _ = write!(out, ",\"deadline_ms\":{}", milliseconds(deadline));
        }
        if let Some(key) = &meta.key {
            out.extend_from_slice(b",\"key\":");
            write_text(out, key);
        }
        out.push(b'}');
        Ok(())
    })
}

fn success(
    id: &CallId,
    body: &dyn Payload,
    status: &str,
    index: Option<u64>,
) -> Result<String, serde_json::Error> {
    written(256, |out| {
        let _ = write!(
            out,
            "{{\"seq_id\":{id},\"code\":0,\"message\":\"success\",\"data\":"
        );
        write_object(out, body)?;
        let _ = write!(out, ",\"chunk_status\":\"{status}\"");
        if let Some(index) = index {
            let _ = write!(out, ",\"stream_index\":{index}");
        }
        out.push(b'}');
        Ok(())
    })
}

pub(super) fn result(
    id: &CallId,
    body: &dyn Payload,
    ends: Ends,
) -> Result<String, serde_json::Error> {
    let status = if ends == Ends::Stream {
        "end"
    } else {
        "continue"
    };
    success(id, body, status, None)
}

pub(super) fn chunk(
    id: &CallId,
    index: u64,
    body: &dyn Payload,
) -> Result<String, serde_json::Error> {
    success(id, body, "continue", Some(index))
}

pub(super) fn error(id: &CallId, error: &RpcError) -> Option<String> {
    let text = error_text(error);
    let mut out = Vec::with_capacity(128);
    let _ = write!(out, "{{\"seq_id\":{id},\"code\":1,\"message\":");
    write_text(&mut out, &text);
    out.extend_from_slice(b",\"data\":{},\"chunk_status\":\"continue\"}");
    String::from_utf8(out).ok()
}

pub(super) fn control(control: &Control<'_>) -> Option<String> {
    let (action, data) = match control {
        Control::Cancel { id } => ("__cancel_action", format!("{{\"seq_id\":{id}}}")),
        Control::Grant {
            id,
            grant: Grant::ReadUpTo(index),
        } => (
            "__stream_ack",
            format!("{{\"seq_id\":{id},\"index\":{index}}}"),
        ),
        Control::Ping => ("__ping", "{}".to_owned()),
        Control::FilePiece(piece) => ("__file_chunk", (*piece).to_owned()),
        Control::Grant {
            grant: Grant::More(_),
            ..
        }
        | Control::Malformed { .. }
        | Control::Pong
        | Control::Bye { .. } => return None,
    };
    let id = ignored_id();
    Some(format!(
        "{{\"seq_id\":{id},\"action\":\"{action}\",\"data\":{data}}}"
    ))
}
