//! LangBot's action frames.
//!
//! A request has `seq_id`, `action`, `data` and optionally `context`. A response has all of `seq_id`, `code`,
//! `message`, `data` and `chunk_status`. Decoders ignore unknown members, so our own peers add `deadline_ms` and `key`.
//! The codec ignores messages that are not frames and never answers them. The class of an error is the prefix of its
//! text (see `classes`).

pub(super) mod classes;

use std::borrow::Cow;
use std::io::Write as _;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use box_rpc::codec::{
    CallId, CallKind, Control, DecodeError, Decoded, Flow, Grant, Message, Meta, Part, Payload,
    encode_with, id_at_start, members_at_start, parse_fault, write_object, write_text,
};
use box_rpc::{Codec, Fault, Limits, RpcError};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::errors::value_error;

use self::classes::{error_text, read_error};

/// The number of chunks that a stream may be ahead of its reader.
const STREAM_WINDOW: u32 = 8;
/// The id in the answer to a request without a usable id.
const UNKNOWN_ID: i64 = -1;

/// The request that carries a chunk of a file.
pub(super) const FILE_CHUNK: &str = "__file_chunk";

/// LangBot's action frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frames;

impl Codec for Frames {
    fn name(&self) -> &'static str {
        "LangBot"
    }

    fn recognises(&self, text: &str) -> bool {
        serde_json::from_str::<Frame<'_>>(text).is_ok_and(|frame| {
            frame.seq_id.is_some() && (frame.action.is_some() || frame.code.is_some())
        })
    }

    fn recognises_head(&self, head: &str) -> bool {
        head.contains("\"seq_id\"")
    }

    fn decode<'a>(&self, text: &'a str, limits: &Limits) -> Decoded<'a> {
        Decoded::One(decode(text, limits))
    }

    fn id_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        id_at_start(head, "\"seq_id\"", limits)
    }

    fn is_response(&self, head: &str) -> bool {
        let members = members_at_start(head);
        !members.contains("\"action\"") && members.contains("\"code\"")
    }

    fn call(
        &self,
        id: Option<i64>,
        action: &str,
        params: &dyn Payload,
        meta: &Meta,
    ) -> Result<String, serde_json::Error> {
        // The protocol has no notifications; the peer ignores the answer to this request.
        call(id.unwrap_or_else(ignored_id), action, params, meta)
    }

    fn result(
        &self,
        id: &CallId,
        body: &dyn Payload,
        kind: CallKind,
    ) -> Result<String, serde_json::Error> {
        let status = if kind == CallKind::Stream {
            "end"
        } else {
            "continue"
        };
        success(id, body, status, None)
    }

    fn error(&self, id: Option<&CallId>, error: &RpcError) -> Option<String> {
        let (id, text) = (id?, error_text(error));
        let mut out = Vec::with_capacity(128);
        let _ = write!(out, "{{\"seq_id\":{id},\"code\":1,\"message\":");
        write_text(&mut out, &text);
        out.extend_from_slice(b",\"data\":{},\"chunk_status\":\"continue\"}");
        String::from_utf8(out).ok()
    }

    fn chunk(
        &self,
        id: &CallId,
        index: u64,
        body: &dyn Payload,
        _: usize,
    ) -> Result<String, serde_json::Error> {
        success(id, body, "continue", Some(index))
    }

    fn control(&self, control: &Control<'_>) -> Option<String> {
        control_text(control)
    }

    fn flow(&self) -> Flow {
        Flow::Window(STREAM_WINDOW)
    }

    /// LangBot expects no answer to a cancelled action.
    fn responds_to_cancelled(&self) -> bool {
        false
    }
}

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
    stream_flow_control: Option<FlowControl>,
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

/// The number 1, the only flow-control value.
#[derive(Deserialize)]
#[serde(try_from = "u8")]
struct FlowControl;

impl TryFrom<u8> for FlowControl {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        let flow_control = (number == 1).then_some(Self);
        flow_control.ok_or("stream_flow_control must be 1")
    }
}

fn decode<'a>(text: &'a str, limits: &Limits) -> Result<Message<'a>, DecodeError> {
    let frame: Frame<'a> =
        serde_json::from_str(text).map_err(|error| malformed(text, &error, limits))?;
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
        return Ok(Message::Response {
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
        return Err(DecodeError {
            id: Some(CallId::Number(UNKNOWN_ID)),
            error,
        });
    };
    let Some(params) = object else {
        let error = RpcError::fault(Fault::InvalidMessage, "data must be an object");
        return Err(DecodeError {
            id: Some(id),
            error,
        });
    };
    if let Some(control) = read_control(&action, params) {
        return Ok(Message::Control {
            reply_to: Some(id),
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
        has_meta: false,
        meta,
    })
}

/// Handles a frame with a member of the wrong type.
///
/// The codec answers such a request and ignores such a response.
fn malformed(text: &str, error: &serde_json::Error, limits: &Limits) -> DecodeError {
    #[derive(Deserialize)]
    struct FrameHead<'a> {
        #[serde(borrow, default)]
        seq_id: Option<&'a RawValue>,
        #[serde(default)]
        action: Option<IgnoredAny>,
        #[serde(default)]
        code: Option<IgnoredAny>,
    }
    let head = serde_json::from_str::<FrameHead<'_>>(text).ok();
    let request = head.filter(|head| head.action.is_some() && head.code.is_none());
    let Some(request) = request else {
        return DecodeError {
            id: None,
            error: parse_fault(error),
        };
    };
    let id = request
        .seq_id
        .and_then(|id| CallId::from_token(id.get(), limits.id_bytes));
    DecodeError {
        id: Some(id.unwrap_or(CallId::Number(UNKNOWN_ID))),
        error: RpcError::fault(Fault::InvalidMessage, error.to_string()),
    }
}

fn read_control<'a>(action: &str, data: &'a str) -> Option<Control<'a>> {
    #[derive(Deserialize)]
    struct CallRef {
        seq_id: i64,
    }
    #[derive(Deserialize)]
    struct Ack {
        seq_id: i64,
        index: i64,
    }
    Some(match action {
        "__ping" => Control::Ping,
        "__cancel_action" => match serde_json::from_str::<CallRef>(data) {
            Ok(call) => Control::Cancel {
                id: CallId::Number(call.seq_id),
            },
            Err(_) => Control::Invalid(value_error("Cancellation requires an integer seq_id")),
        },
        "__stream_ack" => match serde_json::from_str::<Ack>(data) {
            Ok(read) => Control::Grant {
                id: CallId::Number(read.seq_id),
                // A negative or unknown number acknowledges no chunk.
                grant: Grant::UpTo {
                    read: u64::try_from(read.index).unwrap_or(u64::MAX),
                    window: STREAM_WINDOW,
                },
            },
            Err(_) => Control::Invalid(value_error(
                "Stream acknowledgement requires integer sequence and index",
            )),
        },
        FILE_CHUNK => Control::Other {
            name: FILE_CHUNK,
            data,
        },
        _ => return None,
    })
}

/// Returns a negative id, which no call has, for a request with an ignored answer.
fn ignored_id() -> i64 {
    static NEXT: AtomicI64 = AtomicI64::new(UNKNOWN_ID - 1);
    NEXT.fetch_sub(1, Ordering::Relaxed)
}

fn call(
    id: i64,
    action: &str,
    params: &dyn Payload,
    meta: &Meta,
) -> Result<String, serde_json::Error> {
    encode_with(256, |out| {
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
            let milliseconds = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            let _ = write!(out, ",\"deadline_ms\":{milliseconds}");
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
    encode_with(256, |out| {
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

fn control_text(control: &Control<'_>) -> Option<String> {
    let (action, data) = match control {
        Control::Cancel { id } => ("__cancel_action", format!("{{\"seq_id\":{id}}}")),
        Control::Grant {
            id,
            grant: Grant::UpTo { read, .. },
        } => (
            "__stream_ack",
            format!("{{\"seq_id\":{id},\"index\":{read}}}"),
        ),
        Control::Ping => ("__ping", "{}".to_owned()),
        Control::Other { name, data } => (*name, (*data).to_owned()),
        Control::Grant {
            grant: Grant::More(_),
            ..
        }
        | Control::Invalid(_)
        | Control::Pong
        | Control::Bye { .. } => return None,
    };
    let id = ignored_id();
    Some(format!(
        "{{\"seq_id\":{id},\"action\":\"{action}\",\"data\":{data}}}"
    ))
}

#[cfg(test)]
mod tests;
