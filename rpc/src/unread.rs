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
const NOTABLE: usize = 1024 * 1024;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);
static NOTED: Mutex<Option<HashMap<u64, Weak<Engine>>>> = Mutex::new(None);

/// Returns the bytes of unread responses that the process holds.
pub fn unread_bytes() -> usize {
    HELD.load(Ordering::Relaxed)
}

/// Returns the maximum the process has held since the last call.
pub fn take_unread_peak() -> usize {
    PEAK.swap(unread_bytes(), Ordering::Relaxed)
}

fn noted() -> MutexGuard<'static, Option<HashMap<u64, Weak<Engine>>>> {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unread bytes of one connection.
#[derive(Debug)]
pub(crate) struct Unread {
    bytes: AtomicUsize,
    number: u64,
    /// Whether it is tracked as a candidate for closing.
    noted: AtomicBool,
}

impl Default for Unread {
    fn default() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            noted: AtomicBool::new(false),
        }
    }
}

impl Unread {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = HELD.fetch_add(bytes, Ordering::Relaxed);
        PEAK.fetch_max(before + bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        HELD.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "more was removed than was held");
        self.shrank();
    }

    /// Resets the bytes to zero.
    pub(crate) fn clear(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        HELD.fetch_sub(bytes, Ordering::Relaxed);
        self.shrank();
    }

    /// Stops tracking a connection that holds nothing.
    fn shrank(&self) {
        if self.bytes() > 0 || !self.noted.load(Ordering::Relaxed) {
            return;
        }
        let mut all = noted();
        // It may have grown meanwhile.
        if self.bytes() == 0
            && let Some(all) = &mut *all
        {
            all.remove(&self.number);
            self.noted.store(false, Ordering::Relaxed);
        }
    }

    /// Tracks the connection if needed; returns the one to close above the limit.
    pub(crate) fn has_grown(&self, engine: &Arc<Engine>, most: usize) -> Option<Arc<Engine>> {
        if self.bytes() < NOTABLE && unread_bytes() <= most / 2 {
            return None;
        }
        let living: Vec<_> = {
            let mut noted = noted();
            let noted = noted.get_or_insert_default();
            noted.insert(self.number, Arc::downgrade(engine));
            self.noted.store(true, Ordering::Relaxed);
            if unread_bytes() <= most {
                return None;
            }
            noted.values().filter_map(Weak::upgrade).collect()
        };
        let most = living.into_iter();
        most.max_by_key(|engine| engine.outbox.unread())
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.clear();
        if let Some(noted) = &mut *noted() {
            noted.remove(&self.number);
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
    async fn grown(engine: &Arc<Engine>, bytes: usize, most: usize) -> Option<Arc<Engine>> {
        let text = "x".repeat(bytes);
        engine.outbox.push(text, Kind::Response).await.unwrap();
        engine.outbox.counted().has_grown(engine, most)
    }

    #[tokio::test]
    async fn many_that_hold_little_are_too_much() {
        let most = 4 * NOTABLE + NOTABLE / 4;
        let mut all = Vec::new();
        for _ in 0..6 {
            let one = connection();
            assert!(grown(&one, NOTABLE / 2, most).await.is_none());
            all.push(one);
        }
        let heavy = connection();
        assert!(grown(&heavy, NOTABLE - 1, most).await.is_none());
        // Whichever connection grows, the one that holds most is closed.
        for bytes in [NOTABLE / 2, 1] {
            let one = connection();
            let closed = grown(&one, bytes, most).await.unwrap();
            assert!(Arc::ptr_eq(&closed, &heavy));
            all.push(one);
        }
        heavy.outbox.clear();
        assert!(grown(&connection(), 1, most).await.is_none());
    }
}
