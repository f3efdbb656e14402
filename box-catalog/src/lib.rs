//! The store of the catalog: items on disk, exact after a crash at any point.
//!
//! It knows items and their owners, and nothing of boxes. Every method blocks for the time of its
//! disk access.
//!
//! # Layout
//! ```text
//! lock            locked by the process that uses the store
//! KIND/ID.json    the record of one item
//! KIND/ID.new     a record that is being written; the next opening removes it
//! ```
//!
//! # Guarantees
//! * A method that changes an item returns after the change is on disk: it writes a new file, syncs
//!   it, renames it and syncs the directory. A crash leaves the old record or the new one.
//! * Opening ends items in the state `building`, because the process that made them has ended: a
//!   snapshot is `failed` from then on, so that its maker learns of it, and any other item is gone.
//! * A new item replaces a failed one with its name.
//! * A damaged record is an error of that item alone, and no method removes or replaces it unasked.
//!
//! # Reading order
//! 1. This file: [`Catalog`] and its changes.
//! 2. `index.rs`: the items in memory, found by id, name and tag.
//! 3. `record.rs`: one file of the store. `error.rs`: [`Error`].

mod error;
mod index;
mod record;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState, check_tags};
use box_protocol::{ItemId, ItemRef, Labels, Name, UnixMs, check_labels};

pub use error::{Error, Result};
use index::Index;
pub use index::{Filter, Page, Viewer};
use record::{Folder, Loaded};

/// Limits of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of items of one kind that one owner may have.
    pub items_per_owner: usize,
    /// Maximum size of one volume, in MiB.
    pub max_volume_mb: Option<u64>,
    /// Maximum size of all volumes of one owner together, in MiB.
    pub max_volumes_mb_per_owner: Option<u64>,
    /// Maximum size of all snapshots and checkpoints of one owner together, in MiB.
    pub max_snapshots_mb_per_owner: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            items_per_owner: 1000,
            max_volume_mb: None,
            max_volumes_mb_per_owner: None,
            max_snapshots_mb_per_owner: None,
        }
    }
}

/// The properties of a new item.
#[derive(Debug, Clone, PartialEq)]
pub struct NewItem {
    /// The caller that it belongs to.
    pub owner: String,
    /// Its name.
    pub name: Name,
    /// Its tags, which move here from other items of the owner.
    ///
    /// An item that is not ready gets only those that no ready item has. The caller adds the others
    /// with the change that makes it ready.
    pub tags: Vec<Name>,
    /// Its labels.
    pub labels: Labels,
    /// Its state.
    pub state: ItemState,
    /// The bytes that it occupies, if they are known.
    pub size_bytes: Option<u64>,
    /// The properties of its kind.
    pub content: ItemContent,
}

/// An open store. Only one process can have it open.
#[derive(Debug)]
pub struct Catalog {
    folder: Folder,
    limits: Limits,
    index: RwLock<Index>,
    /// Held during a change.
    writer: Mutex<Writer>,
    interrupted: Vec<(CatalogKind, ItemId)>,
    _lock: File,
}

#[derive(Debug)]
struct Writer {
    /// Number of the last record written. It decides between two records with the same tag.
    revision: u64,
}

impl Catalog {
    /// Opens a store, creates it if it is missing, and ends unfinished items.
    pub fn open(path: &Path, limits: Limits) -> Result<Self> {
        let folder = Folder::new(PathBuf::from(path));
        let lock = folder.lock()?;
        let (mut index, mut revision, mut interrupted) = (Index::default(), 0, Vec::new());
        let mut found = Vec::new();
        for kind in CatalogKind::ALL {
            for loaded in folder.load(kind)? {
                match loaded {
                    Loaded::Item(item, of) => found.push((of, *item)),
                    Loaded::Damaged(id) => index.add_damaged(kind, id),
                }
            }
        }
        // The newest record wins a tag that a crash left on two items.
        found.sort_by_key(|(of, _)| *of);
        let mut tagged = Vec::new();
        for (of, item) in found {
            revision = revision.max(of);
            let (kind, id) = (item.kind(), item.id.clone());
            // A crash left the failed item that this one replaces.
            if let Some(replaced) = index.failed_with_name_of(&item) {
                folder.remove(kind, &replaced.id)?;
                index.remove(kind, &replaced.id);
            }
            if item.state == ItemState::Building {
                interrupted.push((kind, id.clone()));
                match failed(item) {
                    Some(item) => {
                        // On a full disk the item is failed in memory, and the next opening repeats this.
                        let _ = folder.store(&item, of);
                        index.insert(item);
                    }
                    None => folder.remove(kind, &id)?,
                }
            } else if index.is_free(&item) {
                if !item.tags.is_empty() {
                    tagged.push((of, kind, id, item.tags.len()));
                }
                index.insert(item);
            } else {
                index.add_damaged(kind, id);
            }
        }
        // The records of the others lose it, also if the newest record is deleted later.
        for (of, kind, id, tags) in tagged {
            if let Ok(Some(item)) = index.get(kind, &id)
                && item.tags.len() != tags
            {
                folder.store(item, of)?;
            }
        }
        Ok(Self {
            folder,
            limits,
            index: RwLock::new(index),
            writer: Mutex::new(Writer { revision }),
            interrupted,
            _lock: lock,
        })
    }

    /// Returns the unfinished items that the opening ended.
    pub fn interrupted(&self) -> &[(CatalogKind, ItemId)] {
        &self.interrupted
    }

    /// Returns the ids of items of a kind whose records are damaged.
    pub fn damaged(&self, kind: CatalogKind) -> Vec<ItemId> {
        self.read().damaged(kind).cloned().collect()
    }

    /// Returns the ids of all items of a kind, also of damaged ones.
    pub fn ids(&self, kind: CatalogKind) -> BTreeSet<ItemId> {
        self.read().ids(kind)
    }

    /// Returns all items of a kind.
    pub fn all(&self, kind: CatalogKind) -> Vec<CatalogItem> {
        self.read().all(kind).cloned().collect()
    }

    /// Returns the item with this id.
    pub fn get(&self, kind: CatalogKind, id: &ItemId) -> Result<CatalogItem> {
        let index = self.read();
        let found = index.get(kind, id)?;
        found
            .cloned()
            .ok_or_else(|| Error::not_found(kind, id.as_str()))
    }

    /// Finds an item that a viewer refers to by id, name or tag.
    pub fn find(
        &self,
        viewer: Viewer<'_>,
        kind: CatalogKind,
        item: &ItemRef,
    ) -> Result<CatalogItem> {
        let index = self.read();
        let found = index.find(viewer, kind, item.as_str())?;
        found
            .cloned()
            .ok_or_else(|| Error::not_found(kind, item.as_str()))
    }

    /// Lists the items that a viewer can see, sorted by id.
    pub fn list(&self, viewer: Viewer<'_>, filter: &Filter) -> Page {
        self.read().list(viewer, filter)
    }

    /// Adds an item. It replaces a failed one with its name.
    pub fn insert(&self, new: NewItem) -> Result<CatalogItem> {
        check_labels(&new.labels)?;
        check_tags(&new.tags)?;
        let now = UnixMs::now();
        let mut item = CatalogItem {
            id: ItemId::fresh(),
            name: new.name,
            tags: distinct(new.tags),
            owner: new.owner,
            labels: new.labels,
            state: new.state,
            reason: None,
            created_at: now,
            updated_at: now,
            size_bytes: new.size_bytes,
            used_by: 0,
            content: new.content,
        };
        let mut writer = self.writer();
        let kind = item.kind();
        let replaced = self.read().failed_with_name_of(&item);
        self.change_index(|index| {
            // The item that it replaces does not count.
            if let Some(replaced) = &replaced {
                index.remove(kind, &replaced.id);
            }
            let checked = self.check_new(index, &mut item);
            if let Some(replaced) = &replaced {
                index.insert(replaced.clone());
            }
            checked
        })?;
        self.write(
            &mut writer,
            item,
            replaced.as_ref().map(|replaced| &replaced.id),
        )
    }

    /// Checks a new item against the limits and the other items.
    fn check_new(&self, index: &Index, item: &mut CatalogItem) -> Result<()> {
        let (kind, max) = (item.kind(), self.limits.items_per_owner);
        if index.count(kind, &item.owner) >= max {
            return Err(Error::TooMany { kind, max });
        }
        index.check_names(item)?;
        self.check_volume(index, item)?;
        self.check_snapshot(index, item)?;
        if item.state != ItemState::Ready {
            let mut tags = std::mem::take(&mut item.tags);
            tags.retain(|tag| !index.is_tag_of_ready(item, tag));
            item.tags = tags;
        }
        Ok(())
    }

    /// Changes an item. Nothing changes if `change` fails.
    ///
    /// `change` must not touch the id, the owner and the kind. Tags that it adds leave other items.
    pub fn update(
        &self,
        kind: CatalogKind,
        id: &ItemId,
        change: impl FnOnce(&mut CatalogItem) -> Result<()>,
    ) -> Result<CatalogItem> {
        let mut writer = self.writer();
        let item = self.changed(kind, id, change)?;
        self.write(&mut writer, item, None)
    }

    /// Returns an item as a change would make it, without the change.
    pub fn preview(
        &self,
        kind: CatalogKind,
        id: &ItemId,
        change: impl FnOnce(&mut CatalogItem) -> Result<()>,
    ) -> Result<CatalogItem> {
        let _writer = self.writer();
        self.changed(kind, id, change)
    }

    fn changed(
        &self,
        kind: CatalogKind,
        id: &ItemId,
        change: impl FnOnce(&mut CatalogItem) -> Result<()>,
    ) -> Result<CatalogItem> {
        let before = self.get(kind, id)?;
        let mut item = before.clone();
        change(&mut item)?;
        item.id = before.id;
        item.owner = before.owner;
        item.tags = distinct(std::mem::take(&mut item.tags));
        item.updated_at = UnixMs::now().max(before.updated_at);
        check_labels(&item.labels)?;
        check_tags(&item.tags)?;
        if item.kind() != kind {
            let rule = format!("must stay {kind}");
            return Err(box_protocol::Invalid::new("content", rule).into());
        }
        let index = self.read();
        index.check_names(&item)?;
        if is_larger(&before.content, &item.content) {
            self.check_volume(&index, &item)?;
        }
        if item.size_bytes > before.size_bytes {
            self.check_snapshot(&index, &item)?;
        }
        Ok(item)
    }

    /// Checks the size of a volume, and that of all volumes of its owner.
    fn check_volume(&self, index: &Index, item: &CatalogItem) -> Result<()> {
        let ItemContent::Volume(volume) = &item.content else {
            return Ok(());
        };
        let limits = self.limits;
        let mine = index.all(CatalogKind::Volume).filter(|other| {
            let is_other = other.id != item.id;
            is_other && other.owner == item.owner
        });
        let others: u64 = mine.map(|other| size_mb(&other.content)).sum();
        let all = others.saturating_add(volume.size_mb);
        for (limit, asked, max) in [
            ("max_volume_mb", volume.size_mb, limits.max_volume_mb),
            (
                "max_volumes_mb_per_owner",
                all,
                limits.max_volumes_mb_per_owner,
            ),
        ] {
            if let Some(max) = max.filter(|max| asked > *max) {
                return Err(Error::TooLarge { limit, asked, max });
            }
        }
        Ok(())
    }

    /// Checks the size of all snapshots of an owner together with other bytes, those of checkpoints.
    pub fn check_snapshots(&self, owner: &str, bytes: u64) -> Result<()> {
        self.check_snapshots_but(&self.read(), owner, None, bytes)
    }

    /// Checks the size of all snapshots of an owner.
    ///
    /// A snapshot that is being made has no size yet. It is refused if nothing fits any more.
    fn check_snapshot(&self, index: &Index, item: &CatalogItem) -> Result<()> {
        if item.kind() != CatalogKind::Snapshot {
            return Ok(());
        }
        let bytes = item.size_bytes.unwrap_or(1);
        self.check_snapshots_but(index, &item.owner, Some(&item.id), bytes)
    }

    fn check_snapshots_but(
        &self,
        index: &Index,
        owner: &str,
        but: Option<&ItemId>,
        bytes: u64,
    ) -> Result<()> {
        let Some(max) = self.limits.max_snapshots_mb_per_owner else {
            return Ok(());
        };
        let all = index.all(CatalogKind::Snapshot);
        let mine = all.filter(|other| but != Some(&other.id) && other.owner == owner);
        let others = mine.filter_map(|other| other.size_bytes);
        let bytes = others.fold(bytes, u64::saturating_add);
        let asked = bytes.div_ceil(1 << 20);
        if asked > max {
            return Err(Error::SnapshotsTooLarge { asked, max });
        }
        Ok(())
    }

    /// Removes an item, also one whose record is damaged.
    pub fn remove(&self, kind: CatalogKind, id: &ItemId) -> Result<()> {
        let _writer = self.writer();
        let known = self.read().ids(kind).contains(id);
        if !known {
            return Err(Error::not_found(kind, id.as_str()));
        }
        self.folder.remove(kind, id)?;
        self.change_index(|index| index.remove(kind, id));
        Ok(())
    }

    /// Writes an item, which replaces another, and takes its tags from other items.
    fn write(
        &self,
        writer: &mut Writer,
        item: CatalogItem,
        replaced: Option<&ItemId>,
    ) -> Result<CatalogItem> {
        writer.revision += 1;
        self.folder.store(&item, writer.revision)?;
        let mut losers = self.read().others_with_tags(&item);
        losers.retain(|loser| Some(&loser.id) != replaced);
        // A crash from here on leaves both items, or a tag on two records. The newer record wins.
        self.change_index(|index| {
            if let Some(replaced) = replaced {
                index.remove(item.kind(), replaced);
            }
            index.insert(item.clone());
        });
        // A failure does not fail the call, whose item is stored: the next opening repeats it.
        if let Some(replaced) = replaced {
            let _ = self.folder.remove(item.kind(), replaced);
        }
        for mut loser in losers {
            loser.tags.retain(|tag| !item.tags.contains(tag));
            // Lower than that of the item that has the tag now. A failure does not fail the call,
            // whose item is stored: the next opening repairs the record.
            let _ = self.folder.store(&loser, writer.revision - 1);
            self.change_index(|index| index.insert(loser));
        }
        Ok(item)
    }

    fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_index<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        change(&mut self.index.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the items of a kind, also while another process uses the store.
///
/// Damaged records are skipped, and a store that does not exist has no items.
pub fn stored(path: &Path, kind: CatalogKind) -> Result<Vec<CatalogItem>> {
    record::stored(path, kind)
}

/// Returns an unfinished snapshot as a failed one; `None` for items that do not stay.
fn failed(mut item: CatalogItem) -> Option<CatalogItem> {
    let ItemContent::Snapshot(content) = &mut item.content else {
        return None;
    };
    if !content.keep_failed {
        return None;
    }
    // It uses no image any more.
    content.image = None;
    item.state = ItemState::Failed;
    item.reason = Some("the server ended while it made the snapshot; make it again".to_owned());
    Some(item)
}

fn size_mb(content: &ItemContent) -> u64 {
    match content {
        ItemContent::Volume(volume) => volume.size_mb,
        _ => 0,
    }
}

fn is_larger(before: &ItemContent, after: &ItemContent) -> bool {
    size_mb(after) > size_mb(before)
}

/// Removes repeated tags.
fn distinct(tags: Vec<Name>) -> Vec<Name> {
    let mut kept: Vec<Name> = Vec::with_capacity(tags.len());
    for tag in tags {
        if !kept.contains(&tag) {
            kept.push(tag);
        }
    }
    kept
}

#[cfg(test)]
mod tests;
