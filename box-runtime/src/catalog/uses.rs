//! How many boxes and items use each item. The counts are in memory only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::catalog::CatalogKind;
use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxId, ItemId};

/// Counts of uses, shared by clones.
#[derive(Debug, Clone, Default)]
pub(crate) struct Uses(Arc<Mutex<HashMap<ItemId, Usage>>>);

/// Use of one item.
#[derive(Debug, Default)]
struct Usage {
    users: u64,
    /// The boxes that can write to the item.
    writers: Vec<BoxId>,
    /// Whether the runtime deletes or resizes the item, so that no box can begin to use it.
    reserved: bool,
}

/// The use of an item by a box. Dropping it ends the use.
#[derive(Debug)]
pub(crate) struct ItemUse {
    uses: Uses,
    id: ItemId,
    writer: Option<BoxId>,
}

/// A deletion or a change of size in progress. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Reserved {
    uses: Uses,
    id: ItemId,
}

/// Why a box cannot use an item.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The runtime deletes or resizes it.
    Reserved,
    /// This box can write to it.
    Writer(BoxId),
}

impl Uses {
    /// Returns the number of users of an item.
    pub(crate) fn count(&self, id: &ItemId) -> u64 {
        self.lock().get(id).map_or(0, |usage| usage.users)
    }

    /// Reserves an item for a box. Unless it is `shared`, only one box can write to it.
    pub(crate) fn acquire(
        &self,
        id: &ItemId,
        writer: Option<BoxId>,
        shared: bool,
    ) -> Result<ItemUse, Refusal> {
        let mut all = self.lock();
        let usage = all.entry(id.clone()).or_default();
        if usage.reserved {
            return Err(Refusal::Reserved);
        }
        if let (Some(other), false, true) = (usage.writers.first(), shared, writer.is_some()) {
            return Err(Refusal::Writer(other.clone()));
        }
        Ok(self.count_use(usage, id, writer))
    }

    /// Counts a box that uses an item already.
    pub(crate) fn adopt(&self, id: &ItemId, writer: Option<BoxId>) -> ItemUse {
        let mut all = self.lock();
        let usage = all.entry(id.clone()).or_default();
        self.count_use(usage, id, writer)
    }

    fn count_use(&self, usage: &mut Usage, id: &ItemId, writer: Option<BoxId>) -> ItemUse {
        usage.users += 1;
        usage.writers.extend(writer.clone());
        ItemUse {
            uses: self.clone(),
            id: id.clone(),
            writer,
        }
    }

    /// Reserves an item for a deletion or a change of size; an error if it is in use.
    pub(crate) fn reserve(
        &self,
        kind: CatalogKind,
        id: &ItemId,
        name: &str,
    ) -> Result<Reserved, BoxError> {
        let mut all = self.lock();
        let usage = all.entry(id.clone()).or_default();
        if usage.users > 0 {
            return Err(in_use(kind, name, usage.users));
        }
        if usage.reserved {
            return Err(BoxError::conflict(format!(
                "{kind} {name}: another call deletes or resizes it; try again later"
            )));
        }
        usage.reserved = true;
        Ok(Reserved {
            uses: self.clone(),
            id: id.clone(),
        })
    }

    /// Only assignments run under this lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<ItemId, Usage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ItemUse {
    pub(crate) fn id(&self) -> &ItemId {
        &self.id
    }
}

impl Drop for ItemUse {
    fn drop(&mut self) {
        let mut all = self.uses.lock();
        let Some(usage) = all.get_mut(&self.id) else {
            return;
        };
        usage.users = usage.users.saturating_sub(1);
        if let Some(writer) = &self.writer
            && let Some(at) = usage.writers.iter().position(|other| other == writer)
        {
            usage.writers.remove(at);
        }
        if usage.users == 0 && !usage.reserved {
            all.remove(&self.id);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.uses.lock().remove(&self.id);
    }
}

fn in_use(kind: CatalogKind, name: &str, users: u64) -> BoxError {
    let user = match (kind, users) {
        (CatalogKind::Template, 1) => "pool",
        (CatalogKind::Template, _) => "pools",
        (_, 1) => "box",
        _ => "boxes",
    };
    let them = if users == 1 { "it" } else { "them" };
    let message = format!("{kind} {name}: used by {users} {user}; delete {them} first");
    BoxError::conflict(message).with_detail(&Detail {
        used_by: Some(users),
        ..Detail::about(kind.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_box_writes_unless_the_item_is_shared() {
        let (uses, id) = (Uses::default(), ItemId::fresh());
        let of = |name: &str| Some(BoxId::new(name).unwrap());
        let writer = uses.acquire(&id, of("a"), false).unwrap();
        let reader = uses.acquire(&id, None, false).unwrap();
        assert_eq!(
            uses.acquire(&id, of("b"), false).unwrap_err(),
            Refusal::Writer(BoxId::new("a").unwrap())
        );
        let shared = uses.acquire(&id, of("b"), true).unwrap();
        assert_eq!(uses.count(&id), 3);
        drop(writer);
        assert_eq!(
            uses.acquire(&id, of("c"), false).unwrap_err(),
            Refusal::Writer(BoxId::new("b").unwrap())
        );
        drop((reader, shared));
        assert_eq!(uses.count(&id), 0);
        drop(uses.acquire(&id, of("c"), false).unwrap());
        assert!(uses.lock().is_empty());
    }
}
