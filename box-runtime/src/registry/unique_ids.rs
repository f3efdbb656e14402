//! The unique ids of boxes, by which a registry with many boxes finds one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Key;
use crate::box_actor::entry::{BoxEntry, new_unique_id};

/// The keys of all boxes by their unique ids.
///
/// The status of a box has its unique id too. It changes only under this lock.
#[derive(Debug, Default)]
pub(crate) struct UniqueIds(Mutex<HashMap<String, Key>>);

impl UniqueIds {
    pub(super) fn find(&self, id: &str) -> Option<Key> {
        self.keys().get(id).cloned()
    }

    pub(super) fn insert(&self, entry: &BoxEntry) {
        let mut keys = self.keys();
        let id = entry.status().unique_id.clone();
        keys.insert(id, entry.key());
    }

    pub(super) fn remove(&self, entry: &BoxEntry) {
        let mut keys = self.keys();
        let id = entry.status().unique_id.clone();
        keys.remove(&id);
    }

    /// Gives a box another unique id, because its earlier self is dead.
    pub(crate) fn renew(&self, entry: &BoxEntry) {
        let mut keys = self.keys();
        let mut status = entry.status();
        let id = new_unique_id();
        // The registry may have removed the box already.
        if let Some(key) = keys.remove(&status.unique_id) {
            keys.insert(id.clone(), key);
        }
        status.unique_id = id;
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
