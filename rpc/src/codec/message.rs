//! Messages that every codec decodes a text to, borrowed from the text.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::RpcError;

/// Id of a call: the JSON its caller wrote, echoed exactly.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallId {
    /// An integer; all calls of this side have one.
    Number(i64),
    /// Any other JSON token: a string with its quotes, or another number.
    Token(Box<str>),
    /// A call that wants no response.
    /// Never on the wire; the number lets the engine abort the call.
    Unanswered(u64),
}

impl CallId {
    /// Parses a JSON token.
    /// Returns `None` if it is neither a string nor a number, or is too long.
    pub fn from_token(token: &str, max_bytes: usize) -> Option<Self> {
        if token.len() > max_bytes {
            return None;
        }
        match token.as_bytes().first()? {
            b'"' => Some(Self::Token(token.into())),
            b'-' | b'0'..=b'9' => Some(match token.parse() {
                Ok(number) => Self::Number(number),
                Err(_) => Self::Token(token.into()),
            }),
            _ => None,
        }
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Token(token) => f.write_str(token),
            Self::Unanswered(_) => f.write_str("null"),
        }
    }
}

/// Metadata of a call, sent beside its parameters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Time left for the call.
    pub deadline: Option<Duration>,
    /// Idempotency key: the call runs once however often it is sent.
    pub key: Option<String>,
    /// Chunks the caller accepts; 0 requests none.
    pub credit: u32,
    /// Context of the call, as JSON; the engine does not read it.
    pub context: Option<Arc<str>>,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Message<'a> {
    /// A call. Without an id, the caller wants no response.
    Call {
        /// Id that the caller chose.
        id: Option<CallId>,
        /// Name of the action.
        action: Cow<'a, str>,
        /// Parameters, a JSON object.
        params: &'a str,
        /// Whether the codec has parsed the whole text as JSON.
        /// See [`Codec::decode_fully`](super::Codec::decode_fully).
        checked: bool,
        /// Whether the parameters contain `_meta`, which the action must not see.
        has_meta: bool,
        /// Metadata of the call.
        meta: Meta,
    },
    /// A response, or a part of one, to a call of this side.
    Response {
        /// Id of the call.
        id: CallId,
        /// The result or chunk, a JSON object, or the error.
        outcome: Result<&'a str, RpcError>,
        /// Which part of the response this is.
        part: Part,
        /// Whether the codec has parsed the whole text as JSON.
        /// See [`Codec::decode_fully`](super::Codec::decode_fully).
        checked: bool,
    },
    /// A message for the engine itself. With `reply_to`, the sender expects a response.
    Control {
        /// Id under which the sender waits for a response.
        reply_to: Option<CallId>,
        /// The control message.
        control: Control<'a>,
        /// Context of the sender, as JSON, if the codec transmits it.
        context: Option<&'a str>,
    },
    /// A valid message that needs no action.
    Ignored,
}

impl Message<'_> {
    /// Whether the codec has parsed the whole text as JSON.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn checked(&self) -> bool {
        match self {
            Self::Call { checked, .. } | Self::Response { checked, .. } => *checked,
            Self::Control { .. } | Self::Ignored => true,
        }
    }
}

/// Part of a call's response that a message contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The end of the call.
    Whole,
    /// One chunk of a stream.
    Chunk {
        /// Number of the chunk, if the codec writes it.
        index: Option<u64>,
    },
    /// A chunk if the call streams, the end if it does not.
    Either {
        /// Number of the chunk, if the codec writes it.
        index: Option<u64>,
    },
}

/// Control message between engines.
#[derive(Debug, Clone, PartialEq)]
pub enum Control<'a> {
    /// The caller cancels a call.
    Cancel {
        /// Id of the call.
        id: CallId,
    },
    /// The caller accepts more chunks of a stream.
    Grant {
        /// Id of the stream.
        id: CallId,
        /// Number of chunks.
        grant: Grant,
    },
    /// Requests a sign of life.
    Ping,
    /// Answers a ping.
    Pong,
    /// The sender is about to end the connection.
    Bye {
        /// Human-readable reason.
        reason: Cow<'a, str>,
        /// Whether to reconnect at once.
        restart: bool,
    },
    /// A request unknown to the engine.
    /// A [`ControlPolicy`](super::ControlPolicy) answers it.
    Other {
        /// Name of the request.
        name: &'static str,
        /// Data of the request, a JSON object.
        data: &'a str,
    },
    /// A request with invalid content, answered with this error.
    Invalid(RpcError),
}

/// More credit for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// This many more chunks.
    More(u32),
    /// The reader has read all chunks up to `read` and accepts `window` more.
    UpTo {
        /// Number of the last chunk read, from 1.
        read: u64,
        /// Number of chunks the stream may be ahead of its reader.
        window: u32,
    },
}

/// A text that is no valid message, with the error to answer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeError {
    /// Id of the call, if it could be read.
    pub id: Option<CallId>,
    /// The error.
    pub error: RpcError,
}

/// Content of one text.
#[derive(Debug, PartialEq)]
pub enum Decoded<'a> {
    /// One message.
    One(Result<Message<'a>, DecodeError>),
    /// Several messages, each with its own text. Their responses go out together.
    Batch(Vec<(&'a str, Result<Message<'a>, DecodeError>)>),
}
