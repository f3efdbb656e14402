//! Waiting for a condition.

use std::time::{Duration, Instant};

/// How long a test waits for a condition. It is long enough for a busy machine.
pub const LONG: Duration = Duration::from_mins(2);

/// Waits until `condition` holds, and fails the test after [`LONG`].
///
/// The limit is real time, also where a test has paused the clock of tokio.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < LONG, "{what}: not within {LONG:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
