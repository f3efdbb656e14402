//! Errors of the backend. No message contains a path of the host.

use std::io;

use box_protocol::BoxError;
use box_protocol::error::{Detail, Subject};
use box_sys::Error;

/// Converts a failure to create or handle a box.
pub(super) fn sandbox_error(error: &Error) -> BoxError {
    match error {
        Error::Step { source, .. } if is_full(source) => {
            BoxError::capacity("the server's disk has no room for the box")
                .with_detail(&Detail::about(Subject::Disk))
        }
        Error::Step { step, source } => {
            BoxError::unavailable(format!("box not created: {step}: {}", source.kind()))
        }
        Error::Invalid(why) => BoxError::validation(why.clone()),
        Error::Missing(path) => BoxError::not_found(format!("{path:?} does not exist")),
        Error::Unavailable(what) => {
            BoxError::unavailable(format!("this machine does not provide {what} to boxes"))
                .with_detail(&Detail::lasting())
        }
        Error::ServerGone => BoxError::unavailable("the fork server has exited"),
        Error::Protocol(_) => BoxError::internal("fork server sent an invalid message"),
    }
}

/// Converts a lack of system resources for a box.
pub(super) fn os_error(error: impl Into<io::Error>) -> BoxError {
    BoxError::unavailable(format!("box not created: {}", error.into().kind()))
}

/// Converts a failure with a disk to that of the file system.
pub(super) fn disk_error(error: Error) -> io::Error {
    match error {
        Error::Step { source, .. } => source,
        Error::Unavailable(_) => io::ErrorKind::Unsupported.into(),
        error => io::Error::other(error),
    }
}

/// Converts the error of a failed pause or resume.
pub(super) fn freeze_error(error: Error) -> BoxError {
    match error {
        Error::Unavailable(what) => {
            BoxError::unsupported(format!("this machine cannot pause a box ({what})"))
        }
        error => sandbox_error(&error),
    }
}

/// Converts the error of a failed write of a record.
pub(super) fn record_error(error: io::Error) -> BoxError {
    if is_full(&error) {
        return BoxError::capacity("the server's disk has no room for the record of the box")
            .with_detail(&Detail::about(Subject::Disk));
    }
    os_error(error)
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Returns the error of a call for a box that the backend does not have.
pub(super) fn box_gone() -> BoxError {
    BoxError::unavailable("the box is gone")
}
