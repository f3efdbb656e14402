//! What can go wrong while a box is made, and how it crosses from the box's first process to the caller.

use std::io;

/// Why a box could not be made or handled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A step failed; `step` names it in words that hold no path of the host.
    #[error("{step}: {source}")]
    Step {
        /// What was being done.
        step: String,
        /// What the kernel answered.
        source: io::Error,
    },
    /// The plan asks for something that cannot be.
    #[error("invalid plan: {0}")]
    Invalid(String),
    /// This machine, or this user on it, does not have what was asked for.
    #[error("not available here: {0}")]
    Unavailable(String),
    /// The fork server ended or never answered.
    #[error("the fork server is gone")]
    ServerGone,
    /// The other side sent something that is no answer.
    #[error("not an answer of the fork server: {0}")]
    Protocol(String),
}

/// The result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system's error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Step { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Names the step that an I/O error happened in.
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
