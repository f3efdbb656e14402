//! Waiting for a condition, for the tests of every crate.
//!
//! - [`LONG`]: how long a test waits.
//! - [`eventually`]: waits in a task of tokio.
//! - [`blocking::eventually`]: waits in a thread.

pub mod blocking;

use std::time::{Duration, Instant};

/// How long a test waits for a condition. It is long enough for a busy machine.
pub const LONG: Duration = Duration::from_mins(2);

/// The time between two checks.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `condition` holds, and fails the test after [`LONG`].
///
/// The limit is real time, also where a test has paused the clock of tokio.
///
/// # Panics
///
/// If the condition does not hold in time. The message contains `what`, the condition in words.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let limit = Limit::new();
    while !condition().await {
        limit.check(what);
        tokio::time::sleep(PAUSE).await;
    }
}

/// The time that is left for a condition.
struct Limit(Instant);

impl Limit {
    fn new() -> Self {
        Self(Instant::now())
    }

    #[track_caller]
    fn check(&self, what: &str) {
        assert!(self.0.elapsed() < LONG, "{what}: not within {LONG:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::{blocking, eventually};

    #[tokio::test(start_paused = true)]
    async fn a_task_waits_until_the_condition_holds() {
        let mut checks = 0;
        eventually("the third check", async || {
            checks += 1;
            checks == 3
        })
        .await;
        assert_eq!(checks, 3);
    }

    #[test]
    fn a_thread_waits_until_the_condition_holds() {
        let mut checks = 0;
        blocking::eventually("the third check", || {
            checks += 1;
            checks == 3
        });
        assert_eq!(checks, 3);
    }
}
