//! Errors of box creation and their way from a box's first process to the caller.

use std::io;

/// Why a box could not be created or handled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A step failed. `step` contains no path of the host.
    #[error("{step}: {source}")]
    Step {
        /// The step.
        step: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The plan is invalid.
    #[error("invalid plan: {0}")]
    Invalid(String),
    /// A selected path of a box does not exist.
    #[error("{0:?} does not exist")]
    Missing(String),
    /// This host or user lacks a primitive.
    #[error("not available on this host: {0}")]
    Unavailable(String),
    /// The fork server ended or never answered.
    #[error("the fork server has ended")]
    ServerGone,
    /// The peer sent an invalid message.
    #[error("invalid message of the fork server: {0}")]
    Protocol(String),
}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system's error number, if any.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Step { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Adds the failed step to an I/O error.
pub(crate) trait At<T> {
    /// Wraps an error with the name of its step.
    fn at(self, step: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, step: impl Into<String>) -> Result<T> {
        self.map_err(|error| Error::Step {
            step: step.into(),
            source: error.into(),
        })
    }
}
