//! Errors of the client.

use std::io::ErrorKind;

use box_protocol::actions::ReadWhy;
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, Invalid};
use box_rpc::{CallError, ConnectionError};
use box_transports::reconnecting::Disconnected;
use box_transports::websocket::UpgradeRefused;

/// An error of a client call. Each maps to an error [`Code`] of the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server refused the call, or the client did before sending it.
    #[error("{0}")]
    Refused(BoxError),
    /// The call got no answer: it was lost, not sent, too large, or timed out.
    #[error("{0}")]
    Failed(CallError),
    /// The client is not connected to the server.
    #[error("{}: {}", self.code(), .0)]
    NotConnected(ConnectFailure),
    /// Too many consecutive losses of the connection.
    ///
    /// [`reconnect`](crate::CommandHandle::reconnect) tries again.
    #[error("unavailable: connection lost {losses} times in a row: {last}")]
    Disconnected {
        /// Number of consecutive losses.
        losses: u32,
        /// The last error.
        last: Box<Self>,
    },
    /// This handle killed the command, and the connection was lost before its exit status arrived.
    #[error("unavailable: command killed, but its exit status is unknown: connection lost")]
    Killed,
    /// Reading ended before the command exited, so its exit status is unknown.
    #[error("{}: no exit status{}", self.code(), ended_by(*.0))]
    NoExit(Option<ReadWhy>),
}

/// Why the client could not connect to a server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectFailure {
    /// The socket or the program does not exist.
    #[error("no such socket or program")]
    NotFound,
    /// The address has no listener.
    #[error("no listener at this address")]
    NoListener,
    /// The server refused the WebSocket upgrade with this HTTP status.
    #[error("refused with HTTP status {0}")]
    HttpStatus(u16),
    /// Another failure.
    #[error("{0}")]
    Other(String),
}

impl From<&Disconnected> for ClientError {
    fn from(why: &Disconnected) -> Self {
        let error = match why {
            Disconnected::Hello(error) => return error.clone().into(),
            Disconnected::Connection(ConnectionError::Io(error)) => error,
            other => return Self::NotConnected(ConnectFailure::Other(other.to_string())),
        };
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        Self::NotConnected(match (inner, error.kind()) {
            (Some(UpgradeRefused(status)), _) => ConnectFailure::HttpStatus(*status),
            (None, ErrorKind::NotFound) => ConnectFailure::NotFound,
            (None, ErrorKind::ConnectionRefused) => ConnectFailure::NoListener,
            (None, kind) => ConnectFailure::Other(kind.to_string()),
        })
    }
}

fn ended_by(why: Option<ReadWhy>) -> &'static str {
    match why {
        None | Some(ReadWhy::Exit) => "",
        Some(ReadWhy::Time) => ": time limit for reading reached",
        Some(ReadWhy::Silence) => ": silence limit reached",
        Some(ReadWhy::Bytes) => ": byte limit for reading reached",
        Some(ReadWhy::Taken) => ": another reader took over",
    }
}

impl ClientError {
    /// Returns the error code.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code(),
            Self::Failed(error) => error.code(),
            Self::NotConnected(ConnectFailure::HttpStatus(401 | 403)) => Code::Denied,
            Self::NotConnected(_) | Self::Disconnected { .. } | Self::Killed => Code::Unavailable,
            Self::NoExit(Some(ReadWhy::Time | ReadWhy::Silence)) => Code::Timeout,
            Self::NoExit(Some(ReadWhy::Taken)) => Code::Conflict,
            Self::NoExit(_) => Code::Internal,
        }
    }

    /// Whether the object does not exist or belongs to another caller.
    pub fn is_not_found(&self) -> bool {
        self.code() == Code::NotFound
    }

    /// Whether the object exists and differs, or its state forbids the call.
    pub fn is_conflict(&self) -> bool {
        self.code() == Code::Conflict
    }

    /// Whether the call may succeed later.
    pub fn is_unavailable(&self) -> bool {
        self.code() == Code::Unavailable
    }

    /// Returns the refusal; `None` if the call failed otherwise.
    pub fn refusal(&self) -> Option<&BoxError> {
        match self {
            Self::Refused(error) => Some(error),
            _ => None,
        }
    }

    /// Returns the machine-readable details; empty if the error has none.
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

/// The client refuses an invalid value before it sends the call.
impl From<Invalid> for ClientError {
    fn from(invalid: Invalid) -> Self {
        Self::Refused(invalid.into())
    }
}

/// Converts to the error of byte readers and writers.
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
