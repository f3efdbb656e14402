//! Snapshots: items that name layers, and the boxes that are created from them.

use std::collections::BTreeSet;

use box_catalog::Viewer;
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState, SnapshotContent};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, ItemId, ItemRef, LayerId};

use super::Items;
use super::uses::ItemUse;

impl Items {
    /// Finds the snapshot of a spec, and counts the box as its user.
    ///
    /// A restarted box uses the snapshot that it had, whatever its name is now.
    pub(crate) fn use_snapshot(
        &self,
        owner: &str,
        snapshot: &ItemRef,
        earlier: Option<&ItemId>,
    ) -> Result<(ItemId, SnapshotContent, ItemUse), BoxError> {
        let store = self.store()?;
        let viewer = Viewer {
            owner,
            sees_all: false,
        };
        let item = match earlier {
            Some(id) => store.get(CatalogKind::Snapshot, id)?,
            None => store.find(viewer, CatalogKind::Snapshot, snapshot)?,
        };
        let CatalogItem {
            id,
            name,
            state,
            reason,
            content: ItemContent::Snapshot(content),
            ..
        } = item
        else {
            return Err(BoxError::internal("not a snapshot"));
        };
        let refused = |problem: &str| {
            BoxError::conflict(format!("snapshot: {problem}"))
                .with_detail(&Detail::of_field("snapshot").of(Subject::Snapshot))
        };
        match state {
            ItemState::Ready => {}
            ItemState::Building => {
                return Err(refused(&format!("{name} is not ready; try again later")));
            }
            ItemState::Failed => {
                let reason = reason.unwrap_or_default();
                let problem = format!("{name} was not made: {reason}; delete it");
                return Err(refused(&problem));
            }
        }
        let used = self.uses.acquire(&id, None, true);
        let used =
            used.map_err(|_| refused(&format!("another call deletes {name}; try again later")))?;
        Ok((id, content, used))
    }

    /// Counts a box of an earlier process that was created from a snapshot.
    pub(crate) fn adopt_snapshot(&self, id: &ItemId) -> ItemUse {
        self.uses.adopt(id, None)
    }

    /// Checks the size of the snapshots of an owner together with that of its checkpoints.
    pub(crate) fn check_snapshots(
        &self,
        owner: &str,
        checkpoint_bytes: u64,
    ) -> Result<(), BoxError> {
        // Only a store has a limit.
        let Some(store) = &self.store else {
            return Ok(());
        };
        Ok(store.check_snapshots(owner, checkpoint_bytes)?)
    }

    /// Returns the layers that snapshots name.
    pub(crate) fn named_layers(&self) -> BTreeSet<LayerId> {
        let Some(store) = &self.store else {
            return BTreeSet::new();
        };
        let mut named = BTreeSet::new();
        for item in store.all(CatalogKind::Snapshot) {
            if let ItemContent::Snapshot(content) = item.content {
                named.extend(content.layers);
            }
        }
        named
    }

    /// Returns whether a snapshot names this layer.
    pub(crate) fn names_layer(&self, id: &LayerId) -> bool {
        self.named_layers().contains(id)
    }

    /// Returns whether the record of a snapshot is damaged, so that its layers are unknown.
    pub(crate) fn has_damaged_snapshots(&self) -> bool {
        let store = self.store.as_ref();
        store.is_some_and(|store| !store.damaged(CatalogKind::Snapshot).is_empty())
    }
}
