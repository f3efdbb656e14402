//! Errors that calls receive once their box has ended.

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{BoxError, BoxId};

use super::queue::EndReason;

impl EndReason {
    /// Returns the error of a call in a box that ends for this reason.
    pub(super) fn reason(&self, box_id: &BoxId) -> BoxError {
        ended_as(self.into(), box_id)
    }
}

impl From<&EndReason> for Ended {
    fn from(over: &EndReason) -> Self {
        match over {
            EndReason::Deleted(_) => Self::Deleted,
            EndReason::Expired => Self::Expired,
            EndReason::Idle => Self::Idle,
            EndReason::Done => Self::Main,
            EndReason::Closed => Self::Shutdown,
        }
    }
}

/// Returns the error of a call in a box that has ended like this.
pub(super) fn ended_as(why: Ended, box_id: &BoxId) -> BoxError {
    let did = match why {
        Ended::Deleted => "was deleted",
        Ended::Expired => "expired: its time is over",
        Ended::Idle => "expired: no call used it for its idle time",
        Ended::Main => "ended: its main command has ended",
        Ended::Shutdown => "was ended: the runtime is shutting down",
        _ => "has ended",
    };
    let message = format!("box {box_id} {did}");
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
