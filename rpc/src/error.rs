//! Errors: the closed set of codes, the wire error and the error of a caller.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Code of an error. Every error of Box has one of twelve, on every wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The object exists and differs, or its state forbids this.
    Conflict,
    /// The object does not exist, or belongs to another caller.
    NotFound,
    /// A value of the request breaks a rule.
    Validation,
    /// Temporarily impossible; may work later.
    Unavailable,
    /// Not supported here; a retry is useless.
    Unsupported,
    /// The caller lacks permission.
    Denied,
    /// A configured amount is used up.
    Capacity,
    /// The deadline has passed.
    Timeout,
    /// The caller cancelled it, or its connection ended.
    Cancelled,
    /// A message or body exceeds its limit.
    TooLarge,
    /// Too many concurrent calls on this connection.
    Overloaded,
    /// A fault of the server.
    Internal,
}

impl Code {
    /// All codes.
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

    /// Returns the code as written on the wire.
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

    /// Parses a code.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.as_str() == word)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Fault in the form of a call rather than in its request.
/// JSON-RPC has a number for each, and [`RpcError::code`] returns a code for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The message is not JSON.
    Parse,
    /// The message is JSON, but no message of the codec.
    InvalidMessage,
    /// The action does not exist.
    UnknownAction,
    /// The parameters do not match those of the action.
    InvalidParams,
}

/// Maximum length in bytes of a text about a fault.
const FAULT_BYTES: usize = 400;

/// Details of an error about a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitDetail {
    /// Name of the limit.
    pub limit: String,
    /// Value of the limit.
    pub max: usize,
}

/// The wire error: a code, a human-readable text and optional details.
///
/// It is one pointer wide, so that results stay small.
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
    /// Creates an error with this code and text.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            fault: None,
            message: message.into(),
            detail: None,
        }))
    }

    /// Creates an error for a fault in the form of a call.
    pub fn fault(fault: Fault, message: impl Into<String>) -> Self {
        let code = match fault {
            Fault::UnknownAction => Code::Unsupported,
            Fault::Parse | Fault::InvalidMessage | Fault::InvalidParams => Code::Validation,
        };
        let mut message = message.into();
        // The text may quote the peer's message, which may have the maximum length.
        if message.len() > FAULT_BYTES {
            message.truncate(message.floor_char_boundary(FAULT_BYTES));
            message.push('…');
        }
        let mut error = Self::new(code, message);
        error.0.fault = Some(fault);
        error
    }

    /// Creates an error with the name and value of a limit, in text and details.
    pub fn limit(code: Code, what: &str, name: &str, max: usize) -> Self {
        Self::new(code, format!("{what} exceeds the limit {name} of {max}")).with_detail(
            &LimitDetail {
                limit: name.to_owned(),
                max,
            },
        )
    }

    /// Adds details as JSON. Omits details that cannot be written.
    pub fn with_detail(mut self, detail: &impl Serialize) -> Self {
        self.0.detail = serde_json::to_string(detail).ok();
        self
    }

    pub(crate) fn with_raw_detail(mut self, detail: Option<String>) -> Self {
        self.0.detail = detail;
        self
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Returns the fault, if the form of the call was wrong.
    pub fn protocol_fault(&self) -> Option<Fault> {
        self.0.fault
    }

    /// Returns the human-readable text.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the details, if present and of this type.
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
    /// The object exists and differs, or its state forbids this.
    conflict => Conflict;
    /// The object does not exist, or belongs to another caller.
    not_found => NotFound;
    /// A value of the request breaks a rule.
    validation => Validation;
    /// Temporarily impossible; may work later.
    unavailable => Unavailable;
    /// Not supported here; a retry is useless.
    unsupported => Unsupported;
    /// The caller lacks permission.
    denied => Denied;
    /// A configured amount is used up.
    capacity => Capacity;
    /// The deadline has passed.
    timeout => Timeout;
    /// The caller cancelled it, or its connection ended.
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

/// Why a call gave no result, and which side reports it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The peer answered with an error.
    #[error("{0}")]
    Refused(RpcError),
    /// The connection ended before the response; the call may have run.
    #[error("unavailable: connection lost before the response: {0}")]
    Lost(String),
    /// The connection was closed or closing before the call was sent: it did not run.
    #[error("unavailable: not sent: {0}")]
    NotSent(String),
    /// The deadline has passed, and the peer has not answered.
    #[error("timeout: no response within {0:?}")]
    Timeout(std::time::Duration),
    /// The request exceeds the maximum message length and was not sent.
    #[error("too_large: request of {size} bytes exceeds the limit message_bytes of {limit}")]
    TooLarge {
        /// Bytes of the encoded request.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// The peer's response, or the request, does not match the types of the action.
    #[error("internal: {0}")]
    Shape(String),
}

impl CallError {
    /// Returns the code of the error.
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

/// Error with which a forwarding handler answers when the forwarded call fails.
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
