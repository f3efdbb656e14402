//! Errors of images.

use std::io;

use box_rpc::Code;
use rustix::io::Errno;

/// Why an operation on an image failed.
///
/// No message contains a path of the host or a secret. Names inside an image may appear.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the caller, or the content of an image, breaks a rule.
    #[error("{0}")]
    Invalid(String),
    /// The content differs from its digest or its stated size.
    #[error("{0}")]
    Corrupt(String),
    /// Box does not support this kind of image or content.
    #[error("{0}")]
    Unsupported(String),
    /// The store or the registry has no such image.
    #[error("{0}")]
    NotFound(String),
    /// The registry or the host's permissions refuse access.
    #[error("{0}")]
    Denied(String),
    /// The registry cannot be reached or does not answer properly.
    #[error("{0}")]
    Unavailable(String),
    /// Content exceeds a limit.
    #[error("{what}: {limit} exceeds its limit of {max}; raise the limit or use a smaller image")]
    TooLarge {
        /// The object that is too large.
        what: String,
        /// The name of the limit.
        limit: &'static str,
        /// The value of the limit.
        max: u64,
    },
    /// The image is in use.
    #[error("image: {image} is used by {}; delete its boxes first", users(*uses))]
    InUse {
        /// The name or the digest of the image.
        image: String,
        /// How many leases and boxes use it.
        uses: usize,
    },
    /// A name denotes more than one image.
    #[error("{0}")]
    Ambiguous(String),
    /// The disk of the store is full.
    #[error("{0}: no space left on the store's disk; remove images or enlarge the disk")]
    Full(String),
    /// The caller withdrew the operation.
    #[error("image: the operation was cancelled")]
    Cancelled,
    /// The store cannot be read or written.
    #[error("{0}")]
    Storage(String),
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns the stable code of the error.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::Corrupt(_) => Code::Validation,
            Self::Unsupported(_) => Code::Unsupported,
            Self::NotFound(_) => Code::NotFound,
            Self::Denied(_) => Code::Denied,
            Self::Unavailable(_) => Code::Unavailable,
            Self::TooLarge { .. } => Code::TooLarge,
            Self::InUse { .. } | Self::Ambiguous(_) => Code::Conflict,
            Self::Full(_) => Code::Capacity,
            Self::Cancelled => Code::Cancelled,
            Self::Storage(_) => Code::Internal,
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    pub(crate) fn corrupt(message: impl Into<String>) -> Self {
        Self::Corrupt(message.into())
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported(message.into())
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::NotFound(message.into())
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::Unavailable(message.into())
    }

    pub(crate) fn too_large(what: impl Into<String>, limit: &'static str, max: u64) -> Self {
        let what = what.into();
        Self::TooLarge { what, limit, max }
    }

    /// The error of an operation whose thread has ended.
    pub(crate) fn lost() -> Self {
        Self::Storage("image: the operation failed".to_owned())
    }

    /// Converts an error of the kernel at a step of the store.
    pub(crate) fn io(step: &str, error: &io::Error) -> Self {
        // An error of ours that has passed through `io::Read`.
        if let Some(inner) = error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<Self>())
        {
            return inner.clone();
        }
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full(step.to_owned())
            }
            io::ErrorKind::PermissionDenied => Self::Denied(format!(
                "{step}: permission denied; check the store's owner"
            )),
            // The text of the kernel; that of the standard library may quote a path.
            _ => match error.raw_os_error() {
                Some(number) => {
                    let error = Errno::from_raw_os_error(number);
                    Self::Storage(format!("{step}: {error}"))
                }
                None => Self::Storage(format!("{step}: {}", error.kind())),
            },
        }
    }
}

/// Errors of ours pass through `io::Read`, and `Error::io` finds them again.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}

/// Adds the failed step to an error of the kernel.
pub(crate) trait At<T> {
    fn at(self, step: &str) -> Result<T>;

    /// As [`at`](Self::at), while an entry of an image is unpacked.
    fn at_path(self, path: &[u8]) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, step: &str) -> Result<T> {
        self.map_err(|error| Error::io(step, &error.into()))
    }

    fn at_path(self, path: &[u8]) -> Result<T> {
        self.map_err(|error| Error::io(&format!("unpack `/{}`", shown_bytes(path)), &error.into()))
    }
}

/// Returns the number of users of an image in words.
fn users(uses: usize) -> String {
    match uses {
        1 => "1 box or export".to_owned(),
        uses => format!("{uses} boxes or exports"),
    }
}

/// Shortens and cleans a text that a registry or an image chose.
pub(crate) fn shown(text: &str) -> String {
    const MAX: usize = 120;
    let mut clean: String = text
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(MAX + 1)
        .collect();
    if clean.chars().count() > MAX {
        clean.pop();
        clean.push('…');
    }
    clean
}

/// As [`shown`], for bytes.
pub(crate) fn shown_bytes(bytes: &[u8]) -> String {
    shown(&String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]))
}
