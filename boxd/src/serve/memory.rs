//! Memory that goes back to the system. What the allocator keeps of a burst of responses is as much as the burst was.

use std::time::Duration;

/// How often it is looked whether there was a burst.
const EVERY: Duration = Duration::from_secs(2);

/// From so many bytes of unread responses on, it was one.
const BURST: usize = 8 << 20;

/// Gives memory back after each burst of responses, for as long as the server lives.
pub(super) async fn give_back() {
    let mut most = 0;
    loop {
        tokio::time::sleep(EVERY).await;
        most = most.max(box_rpc::take_unread_peak());
        if most < BURST || box_rpc::unread_bytes() > most / 4 {
            continue;
        }
        tracing::debug!(bytes = most, "memory of unread responses goes back");
        // Nothing waits for it, and it may take a while.
        let _ = tokio::task::spawn_blocking(|| {
            box_rpc::large::free();
            box_sys::release_memory();
        })
        .await;
        most = 0;
    }
}
