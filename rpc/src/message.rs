//! The one internal message both dialects decode to. Borrowed from the text it came in.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::RpcError;

/// The id of a call: whatever JSON its caller wrote, echoed exactly.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum CallId {
    /// A whole number; all of our own calls have one.
    Number(i64),
    /// Any other JSON token: a string with its quotes, or an odd number.
    Token(Box<str>),
    /// A call that wants no answer. Never on the wire; numbered so that it can be aborted.
    Unanswered(u64),
}

impl CallId {
    /// Reads a JSON token. `None` if it is neither a string nor a number, or too long.
    pub(crate) fn from_token(token: &str, max_bytes: usize) -> Option<Self> {
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

/// What travels beside the parameters of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Time left for the call.
    pub(crate) deadline: Option<Duration>,
    /// Request key: the call runs once however often it is sent.
    pub(crate) key: Option<String>,
    /// Chunks the caller is ready to take; 0 asks for none.
    pub(crate) credit: u32,
    /// Who the call is made for, as JSON; not read by the engine.
    pub(crate) context: Option<Arc<str>>,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Message<'a> {
    /// Do this. Without an id, no answer is wanted.
    Call {
        id: Option<CallId>,
        action: Cow<'a, str>,
        params: &'a str,
        /// See [`Message::checked`].
        checked: bool,
        /// The parameters contain the member `_meta`, which is not the action's.
        meta_inside: bool,
        meta: Meta,
    },
    /// An answer, or a part of one, to a call of ours.
    Answer {
        id: CallId,
        outcome: Result<&'a str, RpcError>,
        part: Part,
        /// See [`Message::checked`].
        checked: bool,
    },
    /// For the engine itself. With `ask`, an answer is expected.
    Control {
        ask: Option<CallId>,
        control: Control<'a>,
        /// As that of a call, in LangBot's dialect.
        context: Option<&'a str>,
    },
    /// Understood, and nothing is to be done.
    Ignored,
}

impl Message<'_> {
    /// Whether the whole text is known to be JSON. If not, it begins and ends exactly as we write a
    /// message, and whoever parses what is between must look again should that fail.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn checked(&self) -> bool {
        match self {
            Self::Call { checked, .. } | Self::Answer { checked, .. } => *checked,
            Self::Control { .. } | Self::Ignored => true,
        }
    }
}

/// How much of a call's answer a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The end of the call.
    Whole,
    /// One chunk of a stream.
    Chunk { index: Option<u64> },
    /// A chunk if the call streams, the end if it does not: LangBot's `continue`.
    Either { index: Option<u64> },
}

/// What the engines say to each other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Control<'a> {
    Cancel {
        id: CallId,
    },
    Grant {
        id: CallId,
        grant: Grant,
    },
    Ping,
    Pong,
    Bye {
        reason: Cow<'a, str>,
        restart: bool,
    },
    /// A piece of a file, LangBot's `__file_chunk`.
    FilePiece(&'a str),
    /// A request of LangBot's with wrong data: which one, and what is wrong.
    Malformed {
        request: &'static str,
        why: &'static str,
    },
}

impl Control<'_> {
    /// What LangBot calls it.
    pub(crate) fn langbot_name(&self) -> &'static str {
        match self {
            Self::Cancel { .. } => "__cancel_action",
            Self::Grant { .. } => "__stream_ack",
            Self::FilePiece(_) => "__file_chunk",
            Self::Malformed { request, .. } => request,
            Self::Ping | Self::Pong | Self::Bye { .. } => "__ping",
        }
    }
}

/// More credit for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grant {
    /// So many chunks more.
    More(u32),
    /// All chunks up to this index have been read; a window of eight lies beyond.
    ReadUpTo(u64),
}

/// A text that is no message, and what to say about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Unreadable {
    /// The call it was, if that much could be read.
    pub(crate) id: Option<CallId>,
    pub(crate) error: RpcError,
}

/// What one text holds.
#[derive(Debug, PartialEq)]
pub(crate) enum Decoded<'a> {
    One(Result<Message<'a>, Unreadable>),
    Batch(Vec<(&'a str, Result<Message<'a>, Unreadable>)>),
}
