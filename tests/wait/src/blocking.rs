//! Waiting in a thread.

use crate::{Limit, PAUSE};

/// Waits until `condition` holds, and fails the test after [`LONG`](crate::LONG).
///
/// # Panics
///
/// If the condition does not hold in time. The message contains `what`, the condition in words.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Limit::new();
    while !condition() {
        limit.check(what);
        std::thread::sleep(PAUSE);
    }
}
