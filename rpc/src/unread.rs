//! Responses that peers have not read: how many bytes of them the process holds, and who holds most.
//!
//! One connection is bounded by its `unread_bytes`. All of them together are bounded here: beyond, the connection that holds
//! most is closed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::engine::Engine;

/// Bytes of responses that all connections of the process may hold unread.
pub const ALL_UNREAD_BYTES: usize = 256 * 1024 * 1024;

/// From so many on, a connection can be the one that holds most.
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
}

impl Default for Unread {
    fn default() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
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
        self.shrank(before, before - bytes);
    }

    /// Holds nothing any more.
    pub(crate) fn clear(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        HELD.fetch_sub(bytes, Ordering::Relaxed);
        self.shrank(bytes, 0);
    }

    fn shrank(&self, before: usize, after: usize) {
        if before >= NOTABLE
            && after < NOTABLE
            && let Some(noted) = &mut *noted()
        {
            noted.remove(&self.number);
        }
    }

    /// Notes whose this is once that matters, and returns who is to be closed, if all together hold too much.
    pub(crate) fn has_grown(&self, engine: &Arc<Engine>, most: usize) -> Option<Arc<Engine>> {
        if self.bytes() < NOTABLE {
            return None;
        }
        let living: Vec<_> = {
            let mut noted = noted();
            let noted = noted.get_or_insert_default();
            noted.insert(self.number, Arc::downgrade(engine));
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
