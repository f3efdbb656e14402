//! Errors that calls receive once their box has ended.
//!
//! # End of a box
//! 1. A delete, an expiry, an idle timeout, the end of the main command or a shutdown ends a box.
//!    Only a forced delete, an expiry and a shutdown do not wait for the running exec.
//! 2. The actor closes the access with the reason, so that calls in progress return that error.
//! 3. The backend stops the box, which kills all its processes and removes its record
//!    (`native/mod.rs`).
//! 4. The runtime records an event and the reason (`ended_boxes.rs`). Later calls get "not found"
//!    with this reason.
//! 5. The actor returns the calls that it has not begun to the registry, which starts a new box for
//!    them. The reply of a delete comes last.

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{BoxError, BoxId};

use super::queue::EndReason;

impl EndReason {
    /// Returns the error of a call in a box that ends for this reason.
    pub(super) fn error(&self, box_id: &BoxId) -> BoxError {
        ended_as(self.into(), box_id)
    }
}

impl From<&EndReason> for Ended {
    fn from(reason: &EndReason) -> Self {
        match reason {
            EndReason::Deleted(_) => Self::Deleted,
            EndReason::Expired => Self::Expired,
            EndReason::Idle => Self::Idle,
            EndReason::MainEnded => Self::Main,
            EndReason::Shutdown => Self::Shutdown,
        }
    }
}

/// Returns the error of a call in a box that has ended like this.
pub(super) fn ended_as(why: Ended, box_id: &BoxId) -> BoxError {
    let what = match why {
        Ended::Deleted => "was deleted",
        Ended::Expired => "expired: it reached its expires_at",
        Ended::Idle => "expired: no call used it for its idle time",
        Ended::Main => "ended: its main command has ended",
        Ended::Shutdown => "was ended: the runtime is shutting down",
        _ => "has ended",
    };
    let message = format!("box {box_id} {what}");
    let error = match why {
        Ended::Shutdown => BoxError::unavailable(message),
        _ => BoxError::conflict(message),
    };
    with_end(error.with_detail(&Detail::about(Subject::Box)), why)
}

/// Returns the error of a call in a broken box when the backend knows no reason.
pub(super) fn broken(reason: String) -> BoxError {
    let error = BoxError::unavailable(reason);
    with_end(
        error.with_detail(&Detail::about(Subject::Box)),
        Ended::Failed,
    )
}
