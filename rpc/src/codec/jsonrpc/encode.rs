//! Encoding of JSON-RPC messages.

use std::io::Write as _;

use super::{CHUNK, FAULTS, number};
use crate::codec::{
    CallId, Control, Grant, Meta, Payload, encode_with, meta, write_object, write_text,
};
use crate::error::RpcError;

/// Initial capacity for a message of the usual size.
const MESSAGE_CAPACITY: usize = 512;

pub(super) fn call(
    id: Option<i64>,
    action: &str,
    params: &dyn Payload,
    meta: &Meta,
) -> Result<String, serde_json::Error> {
    encode_with(MESSAGE_CAPACITY, |out| {
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

fn open_response(out: &mut Vec<u8>, id: Option<&CallId>) {
    out.extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    match id {
        Some(id) => write_id(out, id),
        None => out.extend_from_slice(b"null"),
    }
    out.push(b',');
}

pub(super) fn result(id: &CallId, body: &dyn Payload) -> Result<String, serde_json::Error> {
    encode_with(MESSAGE_CAPACITY, |out| {
        open_response(out, Some(id));
        out.extend_from_slice(b"\"result\":");
        write_object(out, body)?;
        out.push(b'}');
        Ok(())
    })
}

pub(super) fn error(id: Option<&CallId>, error: &RpcError) -> String {
    let number = match error.protocol_fault() {
        Some(fault) => FAULTS
            .iter()
            .find(|(of, _)| *of == fault)
            .map_or(-32600, |(_, number)| *number),
        None => number(error.code()),
    };
    let mut out = Vec::with_capacity(160);
    open_response(&mut out, id);
    let _ = write!(out, "\"error\":{{\"code\":{number},\"message\":");
    write_text(&mut out, error.message());
    let _ = write!(out, ",\"data\":{{\"code\":\"{}\"", error.code());
    if let Some(detail) = error.raw_detail() {
        let _ = write!(out, ",\"detail\":{detail}");
    }
    out.extend_from_slice(b"}}}");
    String::from_utf8(out).unwrap_or_default()
}

/// Writes a chunk; `capacity` estimates its length.
/// A text that grows while it is written is copied repeatedly.
pub(super) fn chunk(
    id: &CallId,
    body: &dyn Payload,
    capacity: usize,
) -> Result<String, serde_json::Error> {
    encode_with(capacity.max(MESSAGE_CAPACITY), |out| {
        out.extend_from_slice(CHUNK.as_bytes());
        write_id(out, id);
        out.extend_from_slice(b",\"chunk\":");
        write_object(out, body)?;
        out.extend_from_slice(b"}}");
        Ok(())
    })
}

pub(super) fn control(control: &Control<'_>) -> Option<String> {
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
