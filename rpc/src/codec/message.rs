//! What every codec decodes a text to. Borrowed from the text.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::RpcError;

/// The id of a call: the JSON its caller wrote, echoed exactly.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallId {
    /// A whole number; all of our own calls have one.
    Number(i64),
    /// Any other JSON token: a string with its quotes, or an odd number.
    Token(Box<str>),
    /// A call that wants no answer. Never on the wire; numbered so that it can be aborted.
    Unanswered(u64),
}

impl CallId {
    /// Reads a JSON token. `None` if it is neither a string nor a number, or too long.
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

/// What travels beside the parameters of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Time left for the call.
    pub deadline: Option<Duration>,
    /// Request key: the call runs once however often it is sent.
    pub key: Option<String>,
    /// Chunks the caller is ready to take; 0 asks for none.
    pub credit: u32,
    /// Who the call is made for, as JSON; not read by the engine.
    pub context: Option<Arc<str>>,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Message<'a> {
    /// Do this. Without an id, no answer is wanted.
    Call {
        /// The caller's id for it.
        id: Option<CallId>,
        /// The action's name.
        action: Cow<'a, str>,
        /// Its parameters, a JSON object.
        params: &'a str,
        /// Whether the codec has read the whole text as JSON; see [`Codec::read_again`](super::Codec::read_again).
        checked: bool,
        /// The parameters contain the member `_meta`, which is not the action's.
        meta_inside: bool,
        /// What travels beside the parameters.
        meta: Meta,
    },
    /// An answer, or a part of one, to a call of ours.
    Answer {
        /// The id of our call.
        id: CallId,
        /// The result or chunk, a JSON object, or the error.
        outcome: Result<&'a str, RpcError>,
        /// How much of the answer this is.
        part: Part,
        /// Whether the codec has read the whole text as JSON; see [`Codec::read_again`](super::Codec::read_again).
        checked: bool,
    },
    /// For the engine itself. With `ask`, an answer is expected.
    Control {
        /// The id under which the sender waits for an answer.
        ask: Option<CallId>,
        /// What it says.
        control: Control<'a>,
        /// Who sends it, as JSON, in a codec whose control messages say so.
        context: Option<&'a str>,
    },
    /// Understood, and nothing is to be done.
    Ignored,
}

impl Message<'_> {
    /// Whether the codec has read the whole text as JSON.
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
pub enum Part {
    /// The end of the call.
    Whole,
    /// One chunk of a stream.
    Chunk {
        /// The chunk's number, if the codec writes it.
        index: Option<u64>,
    },
    /// A chunk if the call streams, the end if it does not.
    Either {
        /// The chunk's number, if the codec writes it.
        index: Option<u64>,
    },
}

/// What the engines say to each other.
#[derive(Debug, Clone, PartialEq)]
pub enum Control<'a> {
    /// The caller withdraws a call.
    Cancel {
        /// Which one.
        id: CallId,
    },
    /// The caller can take more chunks of a stream.
    Grant {
        /// Which one.
        id: CallId,
        /// How many.
        grant: Grant,
    },
    /// Asks for a sign of life.
    Ping,
    /// The sign of life.
    Pong,
    /// The sender is about to end the connection.
    Bye {
        /// Why, for people.
        reason: Cow<'a, str>,
        /// Whether to connect again at once.
        restart: bool,
    },
    /// A request that the engine does not know; a [`ControlPolicy`](super::ControlPolicy) answers it.
    Other {
        /// What it is called.
        name: &'static str,
        /// What it carries, a JSON object.
        data: &'a str,
    },
    /// A request with wrong content, answered with this error.
    Invalid(RpcError),
}

/// More credit for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// So many chunks more.
    More(u32),
    /// All chunks up to `read` have been read, and `window` more may follow.
    UpTo {
        /// The number of the last chunk read, from 1.
        read: u64,
        /// How far the stream may be ahead of its reader.
        window: u32,
    },
}

/// A text that is no message, and what to say about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Unreadable {
    /// The call it was, if that much could be read.
    pub id: Option<CallId>,
    /// What is wrong with it.
    pub error: RpcError,
}

/// What one text holds.
#[derive(Debug, PartialEq)]
pub enum Decoded<'a> {
    /// One message.
    One(Result<Message<'a>, Unreadable>),
    /// Several, each with its own text. Their answers go out together.
    Batch(Vec<(&'a str, Result<Message<'a>, Unreadable>)>),
}
