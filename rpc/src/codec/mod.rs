//! How messages are written. Nothing outside of a [`Codec`] knows it.
//!
//! The engine asks one codec per connection, through one vtable: an indirect call costs about a nanosecond, a message
//! more than a microsecond, and a codec of another crate needs no type parameter on every handle of the engine.
//!
//! - `message`: what every codec decodes a text to.
//! - [`JsonRpc`]: JSON-RPC 2.0, the native wire, built in; `meta`: the member `_meta` of its parameters.

mod jsonrpc;
mod message;
mod meta;

use std::fmt;

use serde::Serialize;

use crate::error::{Code, Fault, RpcError};
use crate::large::Growing;
use crate::limits::Limits;

pub use jsonrpc::JsonRpc;
pub use message::{CallId, Control, Decoded, Grant, Message, Meta, Part, Unreadable};
pub(crate) use meta::parse_params;

/// Writes and reads the messages of a connection. Has no state: one value serves all connections.
///
/// Every text is JSON. Ids below zero are the codec's own, for requests whose answers it passes over; the engine gives
/// its calls positive ones.
pub trait Codec: fmt::Debug + Send + Sync + 'static {
    /// What it is called in errors.
    fn name(&self) -> &'static str;

    /// Whether a connection's first message is written in it.
    fn recognises(&self, text: &str) -> bool;

    /// The same, of a first message of which only the beginning is known.
    fn recognises_head(&self, head: &str) -> bool;

    /// Reads a text. It is not longer than a message may be, nor nested deeper than `limits.depth`.
    fn decode<'a>(&self, text: &'a str, limits: &Limits) -> Decoded<'a>;

    /// Reads a text again that [`decode`](Self::decode) took apart without reading all of it (`checked` is false), now
    /// all of it. The engine asks when the part in question turns out not to be what was expected.
    fn read_again<'a>(&self, text: &'a str, limits: &Limits) -> Result<Message<'a>, Unreadable> {
        match self.decode(text, limits) {
            Decoded::One(one) => one,
            Decoded::Batch(_) => Ok(Message::Ignored),
        }
    }

    /// The id of the message that begins like this and cannot be read whole; see [`id_at_start`].
    fn id_at_start(&self, head: &str, limits: &Limits) -> Option<CallId>;

    /// Whether the message that begins like this and cannot be read whole is an answer; see [`members_at_start`].
    fn is_answer(&self, head: &str) -> bool;

    /// The call whose chunk begins like this, where a chunk is not written as an answer.
    fn chunk_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        let _ = (head, limits);
        None
    }

    /// A call; without an id no answer is wanted.
    fn call(
        &self,
        id: Option<i64>,
        action: &str,
        params: &dyn Payload,
        meta: &Meta,
    ) -> Result<String, serde_json::Error>;

    /// What ends a call well.
    fn result(
        &self,
        id: &CallId,
        body: &dyn Payload,
        ends: Ends,
    ) -> Result<String, serde_json::Error>;

    /// What ends a call badly. `None` where the codec keeps silent about such an error.
    fn error(&self, id: Option<&CallId>, error: &RpcError) -> Option<String>;

    /// One chunk, the `index`th from 1. `room` is a guess at the length of the text.
    fn chunk(
        &self,
        id: &CallId,
        index: u64,
        body: &dyn Payload,
        room: usize,
    ) -> Result<String, serde_json::Error>;

    /// A control message. `None` where the codec has none for it.
    fn control(&self, control: &Control<'_>) -> Option<String>;

    /// How the reader of a stream paces its writer.
    fn flow(&self) -> Flow {
        Flow::Credit
    }

    /// Whether a call is answered that its caller has cancelled.
    fn answers_cancelled(&self) -> bool {
        true
    }
}

/// How the reader of a stream paces its writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The reader chooses how far the writer may be ahead, and grants so many chunks more.
    Credit,
    /// The writer may always be this far ahead, and the reader says up to where it has read.
    Window(u32),
}

/// Which codec a connection uses.
#[derive(Debug, Clone, Copy)]
pub enum Codecs {
    /// This one, from the beginning: what the peer speaks is known.
    Only(&'static dyn Codec),
    /// The first of these that recognises the peer's first message. If nothing has come when the first message is
    /// sent, the first of all.
    FirstOf(&'static [&'static dyn Codec]),
}

impl Default for Codecs {
    /// JSON-RPC, once the peer has spoken it.
    fn default() -> Self {
        Self::FirstOf(&[&JsonRpc])
    }
}

impl Codecs {
    /// JSON-RPC, from the beginning.
    pub const JSON_RPC: Self = Self::Only(&JsonRpc);

    /// The codec that is used if this side speaks first.
    pub(crate) fn preferred(self) -> &'static dyn Codec {
        match self {
            Self::Only(codec) => codec,
            Self::FirstOf(codecs) => codecs.first().copied().unwrap_or(&JsonRpc),
        }
    }

    /// The codec that the connection uses whatever comes.
    pub(crate) fn settled(self) -> Option<&'static dyn Codec> {
        match self {
            Self::Only(codec) => Some(codec),
            Self::FirstOf(_) => None,
        }
    }

    /// The first that this is so of.
    pub(crate) fn find(self, is: impl Fn(&dyn Codec) -> bool) -> Option<&'static dyn Codec> {
        let offered = match &self {
            Self::Only(codec) => std::slice::from_ref(codec),
            Self::FirstOf(codecs) => codecs,
        };
        offered.iter().copied().find(|codec| is(*codec))
    }

    /// The names of all, for an error.
    pub(crate) fn names(self) -> String {
        match self {
            Self::Only(codec) => codec.name().to_owned(),
            Self::FirstOf(codecs) => {
                let names: Vec<_> = codecs.iter().map(|codec| codec.name()).collect();
                names.join(" or ")
            }
        }
    }
}

/// Decides about the control messages of one connection, for an endpoint whose peers share connections: there a message
/// carries the context of the peer that sends it. Without a policy, all of them are obeyed.
pub trait ControlPolicy: Send + Sync + 'static {
    /// Whether this message may be sent in this context, which is JSON.
    fn check(&self, control: &Control<'_>, context: Option<&str>) -> Result<(), RpcError>;

    /// Whether a call of this action that was made in the context `of` may be cancelled, or be granted chunks, in
    /// `context`.
    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool;

    /// Answers [`Control::Other`]. What succeeds is answered with an empty object.
    fn other(&self, name: &str, data: &str) -> Result<(), RpcError>;
}

impl fmt::Debug for dyn ControlPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlPolicy")
    }
}

/// Something to be written as a JSON object.
pub trait Payload {
    /// Writes it at the end of `out`.
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error>;
}

impl<T: Serialize> Payload for T {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        serde_json::to_writer(Growing(out), self)
    }
}

/// JSON that has been written already.
#[derive(Debug)]
pub struct Encoded<'a>(pub &'a str);

impl Payload for Encoded<'_> {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        crate::large::reserve(out, self.0.len());
        out.extend_from_slice(self.0.as_bytes());
        Ok(())
    }
}

/// What a result ends, for a codec that marks the end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    /// A call that sent no chunks.
    Call,
    /// A call that was made as a stream.
    Stream,
}

/// Reads a text, unless it is nested too deeply.
pub(crate) fn decode<'a>(codec: &dyn Codec, text: &'a str, limits: &Limits) -> Decoded<'a> {
    if too_deep(text.as_bytes(), limits.depth) {
        let error = RpcError::limit(Code::Validation, "nesting", "depth", limits.depth);
        let id = codec.id_at_start(text, limits);
        return Decoded::One(Err(Unreadable { id, error }));
    }
    codec.decode(text, limits)
}

/// The id that is the value of `member`, a name in quotes, at the start of a message that cannot be read whole.
pub fn id_at_start(head: &str, member: &str, limits: &Limits) -> Option<CallId> {
    let (_, rest) = members_at_start(head).split_once(member)?;
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let (token, after) = match rest.as_bytes().first()? {
        b'"' => rest.split_at(rest[1..].find('"')? + 2),
        _ => rest.split_at(rest.find(|c: char| c != '-' && !c.is_ascii_digit())?),
    };
    // An escape, or a number that goes on, would make it another id.
    let whole = !token.contains('\\') && after.starts_with([',', '}', ' ', '\t', '\r', '\n']);
    CallId::from_token(token, limits.id_bytes).filter(|_| whole)
}

/// The beginning of a text, up to its first nested value: beyond that a member could belong to that value.
pub fn members_at_start(head: &str) -> &str {
    let start = &head[..head.floor_char_boundary(512)];
    let mut nested = start
        .char_indices()
        .skip(1)
        .filter(|(_, c)| matches!(c, '{' | '['));
    &start[..nested.next().map_or(start.len(), |(at, _)| at)]
}

/// The text written by `write`, or the error of writing it.
pub fn written(
    capacity: usize,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), serde_json::Error>,
) -> Result<String, serde_json::Error> {
    let mut out = Vec::with_capacity(capacity);
    write(&mut out)?;
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// Writes a payload, which must be an object.
pub fn write_object(out: &mut Vec<u8>, body: &dyn Payload) -> Result<(), serde_json::Error> {
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

/// Writes a string as JSON.
pub fn write_text(out: &mut Vec<u8>, text: &str) {
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
pub fn parse_fault(error: &serde_json::Error) -> RpcError {
    match error.classify() {
        serde_json::error::Category::Data => {
            RpcError::fault(Fault::InvalidMessage, "not a message of this protocol")
        }
        _ => RpcError::fault(Fault::Parse, "not JSON"),
    }
}

#[cfg(test)]
mod tests;
