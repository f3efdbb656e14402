//! Why something asked of a box gave no result.

use std::io::ErrorKind;

use box_protocol::actions::ReadWhy;
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, Invalid};
use box_rpc::{CallError, ConnectionError};
use box_transports::link::Down;
use box_transports::websocket::UpgradeRefused;

/// Why something asked of a box gave no result. Every one has one of the contract's twelve words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The other end said no, or this end did before anything was sent.
    #[error("{0}")]
    Refused(BoxError),
    /// The call has no answer: it was lost, not sent, too large, or took too long.
    #[error("{0}")]
    Failed(CallError),
    /// There is no connection to the server.
    #[error("{}: {}", self.code(), .0)]
    Unconnected(Unconnected),
    /// The connection was lost too often in succession. [`reconnect`](crate::CommandHandle::reconnect)
    /// tries again.
    #[error("unavailable: lost the connection {losses} times in succession, giving up: {last}")]
    Disconnected {
        /// How often.
        losses: u32,
        /// The last time.
        last: Box<Self>,
    },
    /// The command was killed by this handle, and the connection was lost before its end was seen.
    #[error("unavailable: the command was killed, and the connection lost before its end was seen")]
    Killed,
    /// Reading ended before the command did, so that its exit is not known.
    #[error("{}: the stream ended without an exit{}", self.code(), ended_by(*.0))]
    NoExit(Option<ReadWhy>),
}

/// Why there is no connection to a server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unconnected {
    /// There is nothing of that name: no socket, no program.
    #[error("there is nothing of that name")]
    NotThere,
    /// Nobody listens.
    #[error("nobody listens there")]
    NobodyListens,
    /// What is there refused to speak over a websocket, with this status of HTTP.
    #[error("refused with HTTP status {0}")]
    Status(u16),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl From<&Down> for ClientError {
    fn from(why: &Down) -> Self {
        let error = match why {
            Down::Hello(error) => return error.clone().into(),
            Down::Connection(ConnectionError::Io(error)) => error,
            other => return Self::Unconnected(Unconnected::Other(other.to_string())),
        };
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        Self::Unconnected(match (inner, error.kind()) {
            (Some(UpgradeRefused(status)), _) => Unconnected::Status(*status),
            (None, ErrorKind::NotFound) => Unconnected::NotThere,
            (None, ErrorKind::ConnectionRefused) => Unconnected::NobodyListens,
            (None, kind) => Unconnected::Other(kind.to_string()),
        })
    }
}

fn ended_by(why: Option<ReadWhy>) -> &'static str {
    match why {
        None | Some(ReadWhy::Exit) => "",
        Some(ReadWhy::Time) => ": the time to read it is over",
        Some(ReadWhy::Silence) => ": it has been silent for too long",
        Some(ReadWhy::Bytes) => ": enough was read",
        Some(ReadWhy::Taken) => ": another reader took over",
    }
}

impl ClientError {
    /// The word for it.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code(),
            Self::Failed(error) => error.code(),
            Self::Unconnected(Unconnected::Status(401 | 403)) => Code::Denied,
            Self::Unconnected(_) | Self::Disconnected { .. } | Self::Killed => Code::Unavailable,
            Self::NoExit(Some(ReadWhy::Time | ReadWhy::Silence)) => Code::Timeout,
            Self::NoExit(Some(ReadWhy::Taken)) => Code::Conflict,
            Self::NoExit(_) => Code::Internal,
        }
    }

    /// There is no such thing, or none of yours.
    pub fn is_not_found(&self) -> bool {
        self.code() == Code::NotFound
    }

    /// It exists already and differs, or its state forbids this.
    pub fn is_conflict(&self) -> bool {
        self.code() == Code::Conflict
    }

    /// It cannot be done now, and may work later.
    pub fn is_unavailable(&self) -> bool {
        self.code() == Code::Unavailable
    }

    /// What the other end said, if it said anything.
    pub fn refusal(&self) -> Option<&BoxError> {
        match self {
            Self::Refused(error) => Some(error),
            _ => None,
        }
    }

    /// What programs may read beside the word.
    pub fn detail(&self) -> Detail {
        let refusal = self.refusal();
        refusal.and_then(BoxError::detail).unwrap_or_default()
    }
}

impl From<CallError> for ClientError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(error) => Self::Refused(error),
            other => Self::Failed(other),
        }
    }
}

impl From<BoxError> for ClientError {
    fn from(error: BoxError) -> Self {
        Self::Refused(error)
    }
}

/// A value that breaks a rule of the contract is refused before anything is sent.
impl From<Invalid> for ClientError {
    fn from(invalid: Invalid) -> Self {
        Self::Refused(invalid.into())
    }
}

/// What readers and writers of bytes say.
impl From<ClientError> for std::io::Error {
    fn from(error: ClientError) -> Self {
        let kind = match error.code() {
            Code::NotFound => ErrorKind::NotFound,
            Code::Denied => ErrorKind::PermissionDenied,
            Code::Validation => ErrorKind::InvalidInput,
            Code::Timeout => ErrorKind::TimedOut,
            Code::Capacity => ErrorKind::StorageFull,
            Code::Unavailable | Code::Cancelled => ErrorKind::ConnectionAborted,
            Code::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
