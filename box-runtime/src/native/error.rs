//! Conversion of kernel errors. No message contains a path of the host.

use std::io;

use box_protocol::BoxError;
use box_protocol::error::Detail;
use box_sys::Error;

/// Converts a failure to create or handle a box.
pub(super) fn in_words(error: &Error) -> BoxError {
    match error {
        Error::Step { step, source } => {
            BoxError::unavailable(format!("the box was not made: {step}: {}", source.kind()))
        }
        Error::Invalid(why) => BoxError::validation(why.clone()),
        Error::Unavailable(what) => {
            BoxError::unavailable(format!("this machine does not give a box {what}"))
                .with_detail(&Detail::lasting())
        }
        Error::ServerGone => BoxError::unavailable("the fork server is gone"),
        Error::Protocol(_) => BoxError::internal("the fork server makes no sense"),
    }
}

/// Converts a lack of system resources for a box.
pub(super) fn failed(error: impl Into<io::Error>) -> BoxError {
    BoxError::unavailable(format!("the box was not made: {}", error.into().kind()))
}
