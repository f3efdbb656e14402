//! Responses that peers have not read: how many bytes of them the process holds, and who holds most.
//!
//! One connection is bounded by its `unread_bytes`. All of them together are bounded here: beyond, the connection that holds
//! most is closed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::engine::Engine;

/// Bytes of responses that all connections of the process may hold unread.
pub const ALL_UNREAD_BYTES: usize = 256 * 1024 * 1024;

/// From so many on, a connection can be the one that holds most. Once all together hold half of what they may, each of them can
/// that grows: those that are not noted then hold less than half.
const NOTABLE: usize = 1024 * 1024;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);
static NOTED: Mutex<Option<HashMap<u64, Weak<Engine>>>> = Mutex::new(None);

/// Bytes of responses that the process holds because their peers have not read them yet.
pub fn unread_bytes() -> usize {
    HELD.load(Ordering::Relaxed)
}

/// The most that the process has held at once since this was last asked.
pub fn take_unread_peak() -> usize {
    PEAK.swap(unread_bytes(), Ordering::Relaxed)
}

fn noted() -> MutexGuard<'static, Option<HashMap<u64, Weak<Engine>>>> {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one connection holds.
#[derive(Debug)]
pub(crate) struct Unread {
    bytes: AtomicUsize,
    number: u64,
    /// Whether it is among those that can be the one that holds most.
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

    /// Holds nothing any more.
    pub(crate) fn clear(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        HELD.fetch_sub(bytes, Ordering::Relaxed);
        self.shrank();
    }

    /// One that holds nothing is not the one that holds most.
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

    /// Notes whose this is once that matters, and returns who is to be closed, if all together hold too much.
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

    /// Holds so many bytes more, and returns which connection is to be closed.
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
        // Whichever grows, the one that holds most is closed.
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
