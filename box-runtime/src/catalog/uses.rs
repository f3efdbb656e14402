//! How many boxes and items use each item. The counts are in memory only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::catalog::{CatalogItem, CatalogKind};
use box_protocol::error::Detail;
use box_protocol::{BoxError, ItemId};

/// Counts of uses, shared by clones.
#[derive(Debug, Clone, Default)]
pub(crate) struct Uses(Arc<Mutex<HashMap<ItemId, Usage>>>);

/// Use of one item.
#[derive(Debug, Default)]
struct Usage {
    users: u64,
    /// Whether the runtime is deleting the item, so that no box can begin to use it.
    deleting: bool,
}

/// A deletion in progress. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Deleting {
    uses: Uses,
    id: ItemId,
}

impl Uses {
    /// Returns the number of users of an item.
    pub(crate) fn count(&self, id: &ItemId) -> u64 {
        self.lock().get(id).map_or(0, |usage| usage.users)
    }

    /// Reserves an item for deletion; an error if it is in use.
    pub(crate) fn begin_delete(
        &self,
        kind: CatalogKind,
        item: &CatalogItem,
    ) -> Result<Deleting, BoxError> {
        let mut all = self.lock();
        let usage = all.entry(item.id.clone()).or_default();
        if usage.users > 0 {
            return Err(in_use(kind, item, usage.users));
        }
        if usage.deleting {
            let name = &item.name;
            return Err(BoxError::conflict(format!(
                "{kind} {name}: another call is deleting it"
            )));
        }
        usage.deleting = true;
        Ok(Deleting {
            uses: self.clone(),
            id: item.id.clone(),
        })
    }

    /// Only assignments run under this lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<ItemId, Usage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Deleting {
    fn drop(&mut self) {
        self.uses.lock().remove(&self.id);
    }
}

fn in_use(kind: CatalogKind, item: &CatalogItem, users: u64) -> BoxError {
    let name = &item.name;
    let (boxes, them) = if users == 1 {
        ("box", "it")
    } else {
        ("boxes", "them")
    };
    let message = format!("{kind} {name}: used by {users} {boxes}; delete {them} first");
    BoxError::conflict(message).with_detail(&Detail {
        used_by: Some(users),
        ..Detail::about(kind.into())
    })
}
