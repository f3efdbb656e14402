//! Errors: one closed set of words, the error that travels, and what a caller gets.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// What kind of thing went wrong. Twelve words; every error of Box has one of them, on every wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// It exists already and differs, or its state forbids this.
    Conflict,
    /// No such thing, or none of yours.
    NotFound,
    /// A value of the request breaks a rule.
    Validation,
    /// Cannot be done now; may work later.
    Unavailable,
    /// Cannot be done here; asking again is useless.
    Unsupported,
    /// The caller may not.
    Denied,
    /// A configured amount is used up.
    Capacity,
    /// The time given for it is over.
    Timeout,
    /// The caller withdrew it, or its connection ended.
    Cancelled,
    /// A message or body is longer than its limit.
    TooLarge,
    /// Too many calls at once on this connection.
    Overloaded,
    /// A fault of the server.
    Internal,
}

impl Code {
    /// All words.
    pub const ALL: [Self; 12] = [
        Self::Conflict,
        Self::NotFound,
        Self::Validation,
        Self::Unavailable,
        Self::Unsupported,
        Self::Denied,
        Self::Capacity,
        Self::Timeout,
        Self::Cancelled,
        Self::TooLarge,
        Self::Overloaded,
        Self::Internal,
    ];

    /// The word as it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::NotFound => "not_found",
            Self::Validation => "validation",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
            Self::Denied => "denied",
            Self::Capacity => "capacity",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::TooLarge => "too_large",
            Self::Overloaded => "overloaded",
            Self::Internal => "internal",
        }
    }

    /// The code for a word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.as_str() == word)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A fault in how a call was written rather than in what it asked for. JSON-RPC has a number for
/// each; [`RpcError::code`] has a word for each as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The message is not JSON.
    Parse,
    /// The message is JSON, but no message of the dialect.
    InvalidMessage,
    /// There is no such action.
    UnknownAction,
    /// The parameters do not have the shape of the action's.
    InvalidParams,
}

/// Longest text about how a call was written, in bytes.
const FAULT_BYTES: usize = 400;

/// The details of an error about a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitDetail {
    /// The limit's name.
    pub limit: String,
    /// Its value.
    pub max: usize,
}

/// The error that travels: a word, a text for people, and optionally details for programs.
///
/// One pointer wide, so that results stay small.
#[derive(Clone, PartialEq, Eq)]
pub struct RpcError(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    code: Code,
    fault: Option<Fault>,
    message: String,
    detail: Option<String>,
}

impl RpcError {
    /// An error of this kind with this text.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            fault: None,
            message: message.into(),
            detail: None,
        }))
    }

    /// A fault in the writing of a call.
    pub fn fault(fault: Fault, message: impl Into<String>) -> Self {
        let code = match fault {
            Fault::UnknownAction => Code::Unsupported,
            Fault::Parse | Fault::InvalidMessage | Fault::InvalidParams => Code::Validation,
        };
        let mut message = message.into();
        // The text may quote what the peer wrote, which may be as long as a message.
        if message.len() > FAULT_BYTES {
            message.truncate(message.floor_char_boundary(FAULT_BYTES));
            message.push('…');
        }
        let mut error = Self::new(code, message);
        error.0.fault = Some(fault);
        error
    }

    /// An error that names the limit it is about and its value, in the text and in the details.
    pub fn limit(code: Code, what: &str, name: &str, max: usize) -> Self {
        Self::new(code, format!("{what} exceeds the limit {name} of {max}")).with_detail(
            &LimitDetail {
                limit: name.to_owned(),
                max,
            },
        )
    }

    /// Adds details for programs, written as JSON. Details that cannot be written are left out.
    pub fn with_detail(mut self, detail: &impl Serialize) -> Self {
        self.0.detail = serde_json::to_string(detail).ok();
        self
    }

    pub(crate) fn with_raw_detail(mut self, detail: Option<String>) -> Self {
        self.0.detail = detail;
        self
    }

    /// The word.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Set when the call was written wrongly.
    pub fn written_wrongly(&self) -> Option<Fault> {
        self.0.fault
    }

    /// The text for people.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The details, if there are any and they have this shape.
    pub fn detail<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_str(self.0.detail.as_deref()?).ok()
    }

    pub(crate) fn raw_detail(&self) -> Option<&str> {
        self.0.detail.as_deref()
    }
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $code:ident;)*) => {
        impl RpcError {
            $($(#[$doc])* pub fn $name(message: impl Into<String>) -> Self {
                Self::new(Code::$code, message)
            })*
        }
    };
}

constructors! {
    /// It exists already and differs, or its state forbids this.
    conflict => Conflict;
    /// No such thing, or none of yours.
    not_found => NotFound;
    /// A value of the request breaks a rule.
    validation => Validation;
    /// Cannot be done now; may work later.
    unavailable => Unavailable;
    /// Cannot be done here; asking again is useless.
    unsupported => Unsupported;
    /// The caller may not.
    denied => Denied;
    /// A configured amount is used up.
    capacity => Capacity;
    /// The time given for it is over.
    timeout => Timeout;
    /// The caller withdrew it, or its connection ended.
    cancelled => Cancelled;
    /// A fault of the server.
    internal => Internal;
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.code, self.0.message)
    }
}

impl fmt::Debug for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("RpcError");
        out.field("code", &self.0.code);
        if let Some(fault) = self.0.fault {
            out.field("fault", &fault);
        }
        out.field("message", &self.0.message);
        if let Some(detail) = &self.0.detail {
            out.field("detail", detail);
        }
        out.finish()
    }
}

impl std::error::Error for RpcError {}

/// Why a call gave no result, and which side says so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The peer answered with an error.
    #[error("{0}")]
    Refused(RpcError),
    /// The connection ended before the answer; whether the call ran is not known.
    #[error("unavailable: connection lost before the answer: {0}")]
    Lost(String),
    /// The connection was closed or closing before the call was sent: it did not run.
    #[error("unavailable: not sent: {0}")]
    NotSent(String),
    /// The time given for the call is over, and the peer has not said so itself.
    #[error("timeout: no answer within {0:?}")]
    Timeout(std::time::Duration),
    /// The request is longer than a message may be: it was not sent.
    #[error("too_large: request of {size} bytes exceeds the limit message_bytes of {limit}")]
    TooLarge {
        /// Bytes of the encoded request.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// The peer's answer, or our own request, does not have the shape of the action's.
    #[error("internal: {0}")]
    Shape(String),
}

impl CallError {
    /// The word for it.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code(),
            Self::Lost(_) | Self::NotSent(_) => Code::Unavailable,
            Self::Timeout(_) => Code::Timeout,
            Self::TooLarge { .. } => Code::TooLarge,
            Self::Shape(_) => Code::Internal,
        }
    }
}

impl From<RpcError> for CallError {
    fn from(error: RpcError) -> Self {
        Self::Refused(error)
    }
}

/// What a handler that forwards a call answers when the further call fails.
impl From<CallError> for RpcError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(error) => error,
            other => {
                let text = other.to_string();
                let message = text
                    .split_once(": ")
                    .map_or(text.as_str(), |(_, rest)| rest);
                Self::new(other.code(), message)
            }
        }
    }
}
