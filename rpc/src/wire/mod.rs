//! The two dialects. Nothing outside this module knows how a message is written.
//!
//! - [`jsonrpc`]: JSON-RPC 2.0, the native wire.
//! - [`langbot`]: LangBot's action frames.
//! - [`meta`]: the member `_meta` of JSON-RPC parameters.

mod jsonrpc;
mod langbot;
mod meta;

use serde::Serialize;

use crate::error::{Code, Fault, RpcError};
use crate::large::Growing;
use crate::limits::Limits;
use crate::message::{CallId, Control, Decoded, Message, Meta, Unreadable};

pub(crate) use langbot::{STREAM_WINDOW as LANGBOT_STREAM_WINDOW, value_error};
pub(crate) use meta::parse_params;

/// How messages are written on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// JSON-RPC 2.0.
    JsonRpc,
    /// LangBot's action frames.
    LangBot,
}

/// Something to be written as a JSON object.
pub(crate) trait Payload {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error>;
}

impl<T: Serialize> Payload for T {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        serde_json::to_writer(Growing(out), self)
    }
}

/// JSON that has been written already.
pub(crate) struct Encoded<'a>(pub(crate) &'a str);

impl Payload for Encoded<'_> {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        crate::large::reserve(out, self.0.len());
        out.extend_from_slice(self.0.as_bytes());
        Ok(())
    }
}

/// How an answer ends: LangBot marks the end of a stream differently from a plain answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    Call,
    Stream,
}

impl Dialect {
    /// The dialect of a connection's first message; `None` if it is neither's.
    pub(crate) fn of(text: &str) -> Option<Self> {
        if jsonrpc::recognises(text) {
            Some(Self::JsonRpc)
        } else if langbot::recognises(text) {
            Some(Self::LangBot)
        } else {
            None
        }
    }

    pub(crate) fn decode<'a>(self, text: &'a str, limits: &Limits) -> Decoded<'a> {
        if too_deep(text.as_bytes(), limits.depth) {
            let error = RpcError::limit(Code::Validation, "nesting", "depth", limits.depth);
            let id = self.id_at_start(text, limits);
            return Decoded::One(Err(Unreadable { id, error }));
        }
        match self {
            Self::JsonRpc => jsonrpc::decode(text, limits),
            Self::LangBot => Decoded::One(langbot::decode(text, limits)),
        }
    }

    /// Reads a text again whose beginning and end looked as if we had written it, now all of it.
    pub(crate) fn read_again<'a>(
        text: &'a str,
        limits: &Limits,
    ) -> Result<Message<'a>, Unreadable> {
        jsonrpc::one(text, limits)
    }

    /// The id written at the start of a message that cannot be read whole.
    pub(crate) fn id_at_start(self, head: &str, limits: &Limits) -> Option<CallId> {
        let member = match self {
            Self::JsonRpc => "\"id\"",
            Self::LangBot => "\"seq_id\"",
        };
        let start = &head[..head.floor_char_boundary(512)];
        // Beyond the first nested value the member could be somebody else's.
        let nested = start
            .char_indices()
            .skip(1)
            .find(|(_, c)| matches!(c, '{' | '['));
        let own = &start[..nested.map_or(start.len(), |(at, _)| at)];
        let rest = own[own.find(member)? + member.len()..].trim_start();
        let rest = rest.strip_prefix(':')?.trim_start();
        let (token, after) = match rest.as_bytes().first()? {
            b'"' => rest.split_at(rest[1..].find('"')? + 2),
            _ => rest.split_at(rest.find(|c: char| c != '-' && !c.is_ascii_digit())?),
        };
        // An escape, or a number that goes on, would make it another id.
        let whole = !token.contains('\\') && after.starts_with([',', '}', ' ', '\t', '\r', '\n']);
        CallId::from_token(token, limits.id_bytes).filter(|_| whole)
    }

    /// Whether a text that cannot be read whole is an answer: only what stands before the first nested
    /// value belongs to the message itself.
    pub(crate) fn is_answer(head: &str) -> bool {
        let start = &head[..head.floor_char_boundary(512)];
        let mut nested = start
            .char_indices()
            .skip(1)
            .filter(|(_, c)| matches!(c, '{' | '['));
        let own = &start[..nested.next().map_or(start.len(), |(at, _)| at)];
        let has = |member: &str| own.contains(member);
        !has("\"method\"")
            && !has("\"action\"")
            && ["\"result\"", "\"error\"", "\"code\""].into_iter().any(has)
    }

    /// The call whose chunk this is the beginning of.
    pub(crate) fn chunk_at_start(self, head: &str, limits: &Limits) -> Option<CallId> {
        let (before, about) = head.split_once("\"params\":")?;
        before
            .contains("\"$/chunk\"")
            .then(|| self.id_at_start(about.trim_start(), limits))
            .flatten()
    }

    pub(crate) fn call(
        self,
        id: Option<i64>,
        action: &str,
        params: &impl Serialize,
        meta: &Meta,
    ) -> Result<String, serde_json::Error> {
        match self {
            Self::JsonRpc => jsonrpc::call(id, action, params, meta),
            // LangBot has no notifications: the answer to this one is ignored.
            Self::LangBot => {
                langbot::call(id.unwrap_or_else(langbot::ignored_id), action, params, meta)
            }
        }
    }

    pub(crate) fn result(
        self,
        id: &CallId,
        body: &dyn Payload,
        ends: Ends,
    ) -> Result<String, serde_json::Error> {
        match self {
            Self::JsonRpc => jsonrpc::result(id, body),
            Self::LangBot => langbot::result(id, body, ends),
        }
    }

    /// `None` where the dialect keeps silent about such an error.
    pub(crate) fn error(self, id: Option<&CallId>, error: &RpcError) -> Option<String> {
        match self {
            Self::JsonRpc => Some(jsonrpc::error(id, error)),
            Self::LangBot => langbot::error(id?, error),
        }
    }

    /// `room` is a guess at the length of the text.
    pub(crate) fn chunk(
        self,
        id: &CallId,
        index: u64,
        body: &dyn Payload,
        room: usize,
    ) -> Result<String, serde_json::Error> {
        match self {
            Self::JsonRpc => jsonrpc::chunk(id, body, room),
            Self::LangBot => langbot::chunk(id, index, body),
        }
    }

    /// `None` where the dialect has no word for it.
    pub(crate) fn control(self, control: &Control<'_>) -> Option<String> {
        match self {
            Self::JsonRpc => jsonrpc::control(control),
            Self::LangBot => langbot::control(control),
        }
    }
}

/// The text written by `write`, or the error of writing it.
fn written(
    capacity: usize,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), serde_json::Error>,
) -> Result<String, serde_json::Error> {
    let mut out = Vec::with_capacity(capacity);
    write(&mut out)?;
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// Writes a payload, which must be an object.
fn write_object(out: &mut Vec<u8>, body: &dyn Payload) -> Result<(), serde_json::Error> {
    let start = out.len();
    body.write(out)?;
    if out.get(start) == Some(&b'{') {
        Ok(())
    } else {
        Err(serde::ser::Error::custom(
            "parameters, results and chunks must be JSON objects",
        ))
    }
}

/// Writes a whole number, faster than by formatting.
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

/// Writes a string as JSON.
fn write_text(out: &mut Vec<u8>, text: &str) {
    // Writing a string into memory does not fail.
    let _ = serde_json::to_writer(out, text);
}

/// Whether brackets outside strings nest deeper than `max`.
fn too_deep(text: &[u8], max: usize) -> bool {
    // Nearly every message has fewer brackets than the limit in all, strings included.
    if memchr::memchr2_iter(b'{', b'[', text).nth(max).is_none() {
        return false;
    }
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => {
                at += 1;
                while let Some(found) = memchr::memchr2(b'"', b'\\', &text[at.min(text.len())..]) {
                    at += found;
                    if text[at] == b'"' {
                        break;
                    }
                    at += 2;
                }
            }
            b'{' | b'[' => {
                depth += 1;
                if depth > max {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    false
}

/// What a text is that could not be parsed at all.
fn parse_fault(error: &serde_json::Error) -> RpcError {
    match error.classify() {
        serde_json::error::Category::Data => {
            RpcError::fault(Fault::InvalidMessage, "not a message of this protocol")
        }
        _ => RpcError::fault(Fault::Parse, "not JSON"),
    }
}

#[cfg(test)]
mod tests;
