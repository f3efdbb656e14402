//! Recent errors, for diagnosis.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::actions::RecentError;
use box_protocol::error::{Detail, Fault, Subject};
use box_protocol::{BoxError, Code, UnixMs};
use box_rpc::Caller;

use crate::audit::Origin;

/// Maximum number of stored errors.
pub const RECENT_ERRORS: usize = 50;

/// The last [`RECENT_ERRORS`] errors, oldest first.
#[derive(Debug, Default)]
pub(crate) struct ErrorRing(Mutex<VecDeque<(Caller, RecentError)>>);

impl ErrorRing {
    fn errors(&self) -> MutexGuard<'_, VecDeque<(Caller, RecentError)>> {
        // Nothing that can panic half way runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an error and drops the oldest above the limit.
    pub(crate) fn record(&self, error: &BoxError, origin: &Origin) {
        let error = RecentError {
            timestamp: UnixMs::now(),
            class: class_name(error).to_owned(),
            message: error.message().to_owned(),
            query_id: origin.query_id.clone(),
        };
        let mut errors = self.errors();
        if errors.len() == RECENT_ERRORS {
            errors.pop_front();
        }
        errors.push_back((origin.caller.clone(), error));
    }

    /// Returns a copy of the errors of this caller; [`Caller::Local`] sees all.
    pub(crate) fn visible_to(&self, caller: &Caller) -> Vec<RecentError> {
        let errors = self.errors();
        let seen = errors
            .iter()
            .filter(|(owner, _)| *caller == Caller::Local || owner == caller);
        seen.map(|(_, error)| error.clone()).collect()
    }
}

/// Returns the exception name that an agent's tools use for this error.
fn class_name(error: &BoxError) -> &'static str {
    if error.protocol_fault() == Some(Fault::UnknownAction) {
        return "ValueError";
    }
    let subject = error.detail::<Detail>().and_then(|detail| detail.subject);
    match (error.code(), subject) {
        (Code::Conflict, Some(Subject::Process | Subject::Command)) => {
            "BoxManagedProcessConflictError"
        }
        (Code::Conflict, _) => "BoxSessionConflictError",
        (Code::NotFound, Some(Subject::Process | Subject::Command)) => {
            "BoxManagedProcessNotFoundError"
        }
        (Code::NotFound, _) => "BoxSessionNotFoundError",
        (Code::Validation, _) => "BoxValidationError",
        (Code::Unavailable, Some(Subject::Readiness)) => "BoxReadinessError",
        (Code::Unavailable | Code::Unsupported, _) => "BoxBackendUnavailableError",
        (Code::Denied, Some(Subject::Grant)) => "BoxAdmissionError",
        (Code::Denied, _) => "PermissionError",
        (Code::Capacity, _) => "BoxCapacityExceededError",
        (Code::Timeout, _) => "TimeoutError",
        (Code::Cancelled, _) => "CancelledError",
        (Code::TooLarge | Code::Overloaded, _) => "ValueError",
        (Code::Internal, _) => "RuntimeError",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(caller: Caller, query_id: Option<u32>) -> Origin {
        Origin {
            query_id: query_id.map(|id| id.to_string()),
            caller,
        }
    }

    #[test]
    fn the_oldest_errors_are_dropped_first() {
        let ring = ErrorRing::default();
        for number in 0..60 {
            ring.record(
                &BoxError::unavailable("no backend"),
                &of(Caller::Local, Some(number)),
            );
        }
        let errors = ring.visible_to(&Caller::Local).into_iter();
        let ids: Vec<_> = errors.filter_map(|error| error.query_id).collect();
        let expected: Vec<_> = (10..60).map(|number| number.to_string()).collect();
        assert_eq!(ids, expected);
    }

    #[test]
    fn the_class_name_is_that_of_the_tool_interface() {
        let ring = ErrorRing::default();
        let error = BoxError::validation("cpus: must be greater than 0");
        ring.record(&error, &of(Caller::Local, None));
        let error = ring.visible_to(&Caller::Local).remove(0);
        assert_eq!(error.class, "BoxValidationError");
        assert_eq!(error.message, "cpus: must be greater than 0");
        assert_eq!(error.query_id, None);
        assert!(error.timestamp > UnixMs(0));
    }

    #[test]
    fn a_caller_sees_only_its_errors() {
        let ring = ErrorRing::default();
        for (number, caller) in (0..).zip(["alice", "bob", "alice"].map(Caller::token)) {
            ring.record(&BoxError::conflict("no"), &of(caller, Some(number)));
        }
        let seen = |caller: Caller| -> Vec<_> {
            let errors = ring.visible_to(&caller).into_iter();
            errors.filter_map(|error| error.query_id).collect()
        };
        assert_eq!(seen(Caller::token("alice")), ["0", "2"]);
        assert_eq!(seen(Caller::token("bob")), ["1"]);
        assert_eq!(seen(Caller::Local).len(), 3);
    }
}
