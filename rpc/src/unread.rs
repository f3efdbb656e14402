//! Responses that peers have not read: bytes held per connection and in total.
//!
//! `unread_bytes` limits one connection. This module limits all of them together: beyond, it closes the connection
//! that holds most.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::engine::Engine;

/// Maximum bytes of unread responses of all connections of the process.
pub const ALL_UNREAD_BYTES: usize = 256 * 1024 * 1024;

/// Bytes from which a connection is tracked as a candidate for closing.
/// Once the total exceeds half of its limit, every growing connection is tracked. The untracked ones then hold less
/// than half.
const TRACKED_FROM: usize = 1024 * 1024;

static TOTAL: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);
static TRACKED: Mutex<Option<HashMap<u64, Weak<Engine>>>> = Mutex::new(None);

/// Returns the bytes of unread responses that the process holds.
pub fn unread_bytes() -> usize {
    TOTAL.load(Ordering::Relaxed)
}

/// Returns the maximum the process has held since the last call.
pub fn take_unread_peak() -> usize {
    PEAK.swap(unread_bytes(), Ordering::Relaxed)
}

fn tracked() -> MutexGuard<'static, Option<HashMap<u64, Weak<Engine>>>> {
    TRACKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unread bytes of one connection.
#[derive(Debug)]
pub(crate) struct UnreadCounter {
    bytes: AtomicUsize,
    number: u64,
    /// Whether it is tracked as a candidate for closing.
    is_tracked: AtomicBool,
}

impl Default for UnreadCounter {
    fn default() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            is_tracked: AtomicBool::new(false),
        }
    }
}

impl UnreadCounter {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = TOTAL.fetch_add(bytes, Ordering::Relaxed);
        PEAK.fetch_max(before + bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        TOTAL.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "removed more bytes than held");
        self.untrack_if_empty();
    }

    /// Resets the bytes to zero.
    pub(crate) fn clear(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        TOTAL.fetch_sub(bytes, Ordering::Relaxed);
        self.untrack_if_empty();
    }

    /// Stops tracking a connection that holds nothing.
    fn untrack_if_empty(&self) {
        if self.bytes() > 0 || !self.is_tracked.load(Ordering::Relaxed) {
            return;
        }
        let mut all = tracked();
        // It may have grown meanwhile.
        if self.bytes() == 0
            && let Some(all) = &mut *all
        {
            all.remove(&self.number);
            self.is_tracked.store(false, Ordering::Relaxed);
        }
    }

    /// Tracks the connection if needed; returns the one to close above the limit.
    pub(crate) fn connection_over_limit(
        &self,
        engine: &Arc<Engine>,
        max: usize,
    ) -> Option<Arc<Engine>> {
        if self.bytes() < TRACKED_FROM && unread_bytes() <= max / 2 {
            return None;
        }
        let connections: Vec<_> = {
            let mut tracked = tracked();
            let tracked = tracked.get_or_insert_default();
            tracked.insert(self.number, Arc::downgrade(engine));
            self.is_tracked.store(true, Ordering::Relaxed);
            if unread_bytes() <= max {
                return None;
            }
            tracked.values().filter_map(Weak::upgrade).collect()
        };
        let connections = connections.into_iter();
        connections.max_by_key(|engine| engine.outbox.unread())
    }
}

impl Drop for UnreadCounter {
    fn drop(&mut self) {
        self.clear();
        if let Some(tracked) = &mut *tracked() {
            tracked.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Router;
    use crate::outbox::Kind;

    fn connection() -> Arc<Engine> {
        Arc::new(Engine::new(Router::empty(), crate::Options::client()))
    }

    /// Adds bytes and returns the connection to close.
    async fn grow(engine: &Arc<Engine>, bytes: usize, max: usize) -> Option<Arc<Engine>> {
        let text = "x".repeat(bytes);
        engine.outbox.push(text, Kind::Response).await.unwrap();
        engine
            .outbox
            .unread_counter()
            .connection_over_limit(engine, max)
    }

    #[tokio::test]
    async fn many_small_connections_together_exceed_the_limit() {
        let max = 4 * TRACKED_FROM + TRACKED_FROM / 4;
        let mut all = Vec::new();
        for _ in 0..6 {
            let one = connection();
            assert!(grow(&one, TRACKED_FROM / 2, max).await.is_none());
            all.push(one);
        }
        let largest = connection();
        assert!(grow(&largest, TRACKED_FROM - 1, max).await.is_none());
        // Whichever connection grows, the one that holds most is closed.
        for bytes in [TRACKED_FROM / 2, 1] {
            let one = connection();
            let closed = grow(&one, bytes, max).await.unwrap();
            assert!(Arc::ptr_eq(&closed, &largest));
            all.push(one);
        }
        largest.outbox.clear();
        assert!(grow(&connection(), 1, max).await.is_none());
    }
}
