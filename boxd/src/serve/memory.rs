//! Return of unused memory to the system after a burst of responses.
//!
//! Otherwise the allocator would keep as much memory as the burst needed.

use std::time::Duration;

/// The interval between checks for a burst.
const INTERVAL: Duration = Duration::from_secs(2);

/// The bytes of unread responses that count as a burst.
const BURST: usize = 8 << 20;

/// Returns memory to the system after each burst, until the server exits.
pub(super) async fn release_after_bursts() {
    let mut peak = 0;
    loop {
        tokio::time::sleep(INTERVAL).await;
        peak = peak.max(box_rpc::take_unread_peak());
        if peak < BURST || box_rpc::unread_bytes() > peak / 4 {
            continue;
        }
        tracing::debug!(bytes = peak, "returning the memory of unread responses");
        // No task waits for the result, which may take a while.
        let _ = tokio::task::spawn_blocking(|| {
            box_rpc::buffer_pool::clear();
            box_sys::release_memory();
        })
        .await;
        peak = 0;
    }
}
