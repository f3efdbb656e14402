//! Codecs: the only code that knows how messages are written.
//!
//! The engine uses one [`Codec`] per connection through a vtable. The indirect call costs about a nanosecond, and a
//! message more than a microsecond. In return, a codec of another crate needs no type parameter on every handle of the
//! engine.
//!
//! - `message`: the messages that every codec decodes a text to.
//! - [`JsonRpc`]: JSON-RPC 2.0, the native wire format, built in; `meta`: the member `_meta` of its parameters.

mod jsonrpc;
mod message;
mod meta;

use std::fmt;

use serde::Serialize;

use crate::buffer_pool::PooledWriter;
use crate::error::{Code, Fault, RpcError};
use crate::limits::Limits;

pub use jsonrpc::JsonRpc;
pub use message::{CallId, Control, DecodeError, Decoded, Grant, Message, Meta, Part};
pub(crate) use meta::parse_params;

/// Writes and reads the messages of a connection.
///
/// It has no state: one value serves all connections. Every text is JSON. Negative ids belong to the codec, for
/// requests with answers that it ignores. The engine gives its calls positive ids.
pub trait Codec: fmt::Debug + Send + Sync + 'static {
    /// Name of the codec in errors.
    fn name(&self) -> &'static str;

    /// Whether the first message of a connection is written in this codec.
    fn recognises(&self, text: &str) -> bool;

    /// Like `recognises`, for the beginning of a first message.
    fn recognises_head(&self, head: &str) -> bool;

    /// Decodes a text.
    /// The engine has checked its length, and its nesting against `limits.depth`.
    fn decode<'a>(&self, text: &'a str, limits: &Limits) -> Decoded<'a>;

    /// Decodes a text completely after [`decode`](Self::decode) skipped a part of it.
    ///
    /// In that case `checked` is false. The engine calls this when the skipped part is not as expected.
    fn decode_fully<'a>(&self, text: &'a str, limits: &Limits) -> Result<Message<'a>, DecodeError> {
        match self.decode(text, limits) {
            Decoded::One(one) => one,
            Decoded::Batch(_) => Ok(Message::Ignored),
        }
    }

    /// Returns the id at the start of an unreadable message; see [`id_at_start`].
    fn id_at_start(&self, head: &str, limits: &Limits) -> Option<CallId>;

    /// Whether an unreadable message is a response; see [`members_at_start`].
    fn is_response(&self, head: &str) -> bool;

    /// Returns the call of a chunk that begins with `head`.
    /// Used where a chunk is not written as a response.
    fn chunk_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        let _ = (head, limits);
        None
    }

    /// Writes a call; without an id the caller wants no response.
    fn call(
        &self,
        id: Option<i64>,
        action: &str,
        params: &dyn Payload,
        meta: &Meta,
    ) -> Result<String, serde_json::Error>;

    /// Writes the result of a call.
    fn result(
        &self,
        id: &CallId,
        body: &dyn Payload,
        kind: CallKind,
    ) -> Result<String, serde_json::Error>;

    /// Writes the error of a call; `None` if the codec does not transmit it.
    fn error(&self, id: Option<&CallId>, error: &RpcError) -> Option<String>;

    /// Writes chunk number `index`, from 1; `capacity` estimates the length of the text.
    fn chunk(
        &self,
        id: &CallId,
        index: u64,
        body: &dyn Payload,
        capacity: usize,
    ) -> Result<String, serde_json::Error>;

    /// Writes a control message; `None` if the codec does not have it.
    fn control(&self, control: &Control<'_>) -> Option<String>;

    /// Returns the flow control of streams.
    fn flow(&self) -> Flow {
        Flow::Credit
    }

    /// Whether the callee answers a call that its caller has cancelled.
    fn responds_to_cancelled(&self) -> bool {
        true
    }
}

/// Flow control of streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The reader chooses the window and grants chunks by number.
    Credit,
    /// The window is fixed, and the reader reports the last chunk it has read.
    Window(u32),
}

/// Codecs that a connection may use.
#[derive(Debug, Clone, Copy)]
pub enum Codecs {
    /// This codec from the beginning: the codec of the peer is known.
    Only(&'static dyn Codec),
    /// The first of these that recognises the peer's first message.
    /// If this side sends first, the first of the list.
    FirstOf(&'static [&'static dyn Codec]),
}

impl Default for Codecs {
    /// JSON-RPC, once the peer has used it.
    fn default() -> Self {
        Self::FirstOf(&[&JsonRpc])
    }
}

impl Codecs {
    /// JSON-RPC, from the beginning.
    pub const JSON_RPC: Self = Self::Only(&JsonRpc);

    /// Returns the codec to use if this side sends first.
    pub(crate) fn preferred(self) -> &'static dyn Codec {
        match self {
            Self::Only(codec) => codec,
            Self::FirstOf(codecs) => codecs.first().copied().unwrap_or(&JsonRpc),
        }
    }

    /// Returns the codec that is fixed from the beginning.
    pub(crate) fn fixed(self) -> Option<&'static dyn Codec> {
        match self {
            Self::Only(codec) => Some(codec),
            Self::FirstOf(_) => None,
        }
    }

    /// Returns the first codec that satisfies `is`.
    pub(crate) fn find(self, is: impl Fn(&dyn Codec) -> bool) -> Option<&'static dyn Codec> {
        let offered = match &self {
            Self::Only(codec) => std::slice::from_ref(codec),
            Self::FirstOf(codecs) => codecs,
        };
        offered.iter().copied().find(|codec| is(*codec))
    }

    /// Returns the names of all codecs, for an error.
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

/// Decides about the control messages of one connection.
///
/// It serves an endpoint with several peers on one connection, where a message carries the context of its sender.
/// Without a policy, the engine obeys all of them.
pub trait ControlPolicy: Send + Sync + 'static {
    /// Checks whether this message may be sent in this context, which is JSON.
    fn check(&self, control: &Control<'_>, context: Option<&str>) -> Result<(), RpcError>;

    /// Whether `context` may cancel a call, or grant it chunks.
    /// The call is of this action and was made in the context `of`.
    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool;

    /// Answers [`Control::Other`]. The response to a success is an empty object.
    fn other(&self, name: &str, data: &str) -> Result<(), RpcError>;
}

impl fmt::Debug for dyn ControlPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlPolicy")
    }
}

/// A value that is written as a JSON object.
pub trait Payload {
    /// Appends it to `out`.
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error>;
}

impl<T: Serialize> Payload for T {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        serde_json::to_writer(PooledWriter(out), self)
    }
}

/// JSON text, already encoded.
#[derive(Debug)]
pub struct Encoded<'a>(pub &'a str);

impl Payload for Encoded<'_> {
    fn write(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        crate::buffer_pool::reserve(out, self.0.len());
        out.extend_from_slice(self.0.as_bytes());
        Ok(())
    }
}

/// Kind of call that a result ends, for a codec that marks the end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallKind {
    /// A call that sent no chunks.
    Plain,
    /// A call that was made as a stream.
    Stream,
}

/// Decodes a text, unless it is nested too deeply.
pub(crate) fn decode<'a>(codec: &dyn Codec, text: &'a str, limits: &Limits) -> Decoded<'a> {
    if too_deep(text.as_bytes(), limits.depth) {
        let error = RpcError::limit(Code::Validation, "nesting", "depth", limits.depth);
        let id = codec.id_at_start(text, limits);
        return Decoded::One(Err(DecodeError { id, error }));
    }
    codec.decode(text, limits)
}

/// Returns the id in `member` at the start of an unreadable message.
/// `member` is a name in quotes.
pub fn id_at_start(head: &str, member: &str, limits: &Limits) -> Option<CallId> {
    let (_, rest) = members_at_start(head).split_once(member)?;
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let (token, after) = match rest.as_bytes().first()? {
        b'"' => rest.split_at(rest[1..].find('"')? + 2),
        _ => rest.split_at(rest.find(|c: char| c != '-' && !c.is_ascii_digit())?),
    };
    // An escape, or a number that continues, would make it another id.
    let whole = !token.contains('\\') && after.starts_with([',', '}', ' ', '\t', '\r', '\n']);
    CallId::from_token(token, limits.id_bytes).filter(|_| whole)
}

/// Returns the beginning of a text, up to its first nested value.
/// A later member could belong to that value.
pub fn members_at_start(head: &str) -> &str {
    let start = &head[..head.floor_char_boundary(512)];
    let mut nested = start
        .char_indices()
        .skip(1)
        .filter(|(_, c)| matches!(c, '{' | '['));
    &start[..nested.next().map_or(start.len(), |(at, _)| at)]
}

/// Returns the text that `write` produced, or its error.
pub fn encode_with(
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
    // Nearly every message has fewer brackets in total than the limit, even with those in strings.
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

/// Returns the error for a text that could not be parsed at all.
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
