//! The items in memory, found by id, name and tag.

use std::collections::{BTreeMap, BTreeSet};

use box_protocol::catalog::{CatalogItem, CatalogKind, ItemState};
use box_protocol::{BoxId, ItemId, Labels, Name};

use crate::error::{Error, Result};

/// Approximate size limit of one page, below the limit of a message.
const PAGE_BYTES: usize = 8 << 20;

/// The caller that looks at the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Viewer<'a> {
    /// The name of the caller.
    pub owner: &'a str,
    /// Whether the caller sees the items of all owners. It names them by id or `NAME@OWNER`.
    pub sees_all: bool,
}

impl Viewer<'_> {
    fn sees(self, item: &CatalogItem) -> bool {
        self.sees_all || item.owner == self.owner
    }
}

/// Selects items of a list. An item must match all members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// The kind.
    pub kind: CatalogKind,
    /// Only items with this name.
    pub name: Option<Name>,
    /// Only items with this tag.
    pub tag: Option<Name>,
    /// Only items in one of these states; any if empty.
    pub state: Vec<ItemState>,
    /// Only items that have all these labels.
    pub labels: Labels,
    /// Only items made from this box.
    pub source_box: Option<BoxId>,
    /// Only items after this id.
    pub after: Option<ItemId>,
    /// Maximum number of items.
    pub limit: Option<usize>,
}

impl Filter {
    fn selects(&self, item: &CatalogItem) -> bool {
        self.name.as_ref().is_none_or(|name| item.name == *name)
            && self.tag.as_ref().is_none_or(|tag| item.tags.contains(tag))
            && (self.state.is_empty() || self.state.contains(&item.state))
            && self
                .labels
                .iter()
                .all(|(label, value)| item.labels.get(label) == Some(value))
            && self
                .source_box
                .as_ref()
                .is_none_or(|source| item.source_box() == Some(source))
    }
}

/// A part of a list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Page {
    /// The items, sorted by id.
    pub items: Vec<CatalogItem>,
    /// The last id of the page, if more items follow.
    pub next: Option<ItemId>,
    /// Number of items on all pages.
    pub total: usize,
}

/// All items, by kind and id.
#[derive(Debug, Default)]
pub(crate) struct Index {
    items: BTreeMap<(CatalogKind, ItemId), CatalogItem>,
    /// Ids by owner and by name or tag.
    names: BTreeMap<(CatalogKind, String, Name), ItemId>,
    damaged: BTreeSet<(CatalogKind, ItemId)>,
}

impl Index {
    /// Adds or replaces an item.
    ///
    /// A tag that another item has moves to this one.
    pub(crate) fn insert(&mut self, item: CatalogItem) {
        let (kind, id) = (item.kind(), item.id.clone());
        self.remove(kind, &id);
        let owner = &item.owner;
        for name in [&item.name].into_iter().chain(&item.tags) {
            let key = (kind, owner.clone(), name.clone());
            if let Some(other) = self.names.insert(key, id.clone())
                && let Some(other) = self.items.get_mut(&(kind, other))
            {
                other.tags.retain(|tag| tag != name);
            }
        }
        self.items.insert((kind, id), item);
    }

    /// Removes an item, damaged or not.
    pub(crate) fn remove(&mut self, kind: CatalogKind, id: &ItemId) {
        let key = (kind, id.clone());
        self.damaged.remove(&key);
        if let Some(item) = self.items.remove(&key) {
            for name in [item.name].into_iter().chain(item.tags) {
                self.names.remove(&(kind, item.owner.clone(), name));
            }
        }
    }

    pub(crate) fn add_damaged(&mut self, kind: CatalogKind, id: ItemId) {
        self.damaged.insert((kind, id));
    }

    pub(crate) fn damaged(&self, kind: CatalogKind) -> impl Iterator<Item = &ItemId> {
        let of_kind = self.damaged.iter().filter(move |(of, _)| *of == kind);
        of_kind.map(|(_, id)| id)
    }

    pub(crate) fn ids(&self, kind: CatalogKind) -> BTreeSet<ItemId> {
        let whole = self.all(kind).map(|item| item.id.clone());
        whole.chain(self.damaged(kind).cloned()).collect()
    }

    pub(crate) fn all(&self, kind: CatalogKind) -> impl Iterator<Item = &CatalogItem> {
        let of_kind = self.items.iter().filter(move |((of, _), _)| *of == kind);
        of_kind.map(|(_, item)| item)
    }

    pub(crate) fn count(&self, kind: CatalogKind, owner: &str) -> usize {
        self.all(kind).filter(|item| item.owner == owner).count()
    }

    /// Returns the item with this id; an error if its record is damaged.
    pub(crate) fn get(&self, kind: CatalogKind, id: &ItemId) -> Result<Option<&CatalogItem>> {
        let key = (kind, id.clone());
        if self.damaged.contains(&key) {
            let id = id.clone();
            return Err(Error::Damaged { kind, id });
        }
        Ok(self.items.get(&key))
    }

    pub(crate) fn find(
        &self,
        viewer: Viewer<'_>,
        kind: CatalogKind,
        item: &str,
    ) -> Result<Option<&CatalogItem>> {
        if let Ok(id) = ItemId::new(item)
            && let Some(found) = self.get(kind, &id)?.filter(|found| viewer.sees(found))
        {
            return Ok(Some(found));
        }
        let named = self.named(kind, viewer.owner, item);
        let of_owner = |(name, owner): (&str, &str)| self.named(kind, owner, name);
        let foreign = item.rsplit_once('@').filter(|_| viewer.sees_all);
        Ok(named.or_else(|| foreign.and_then(of_owner)))
    }

    fn named(&self, kind: CatalogKind, owner: &str, name: &str) -> Option<&CatalogItem> {
        let name = Name::new(name).ok()?;
        let id = self.names.get(&(kind, owner.to_owned(), name))?;
        self.items.get(&(kind, id.clone()))
    }

    /// Returns whether no other item has the name of this one.
    pub(crate) fn is_free(&self, item: &CatalogItem) -> bool {
        self.check_name(item, &item.name, "name").is_ok()
    }

    /// Checks that the name is free and that no tag is the name of another item.
    pub(crate) fn check_names(&self, item: &CatalogItem) -> Result<()> {
        self.check_name(item, &item.name, "name")?;
        for tag in &item.tags {
            let other = self.named(item.kind(), &item.owner, tag.as_str());
            if other.is_some_and(|other| other.id != item.id && other.name == *tag) {
                return Err(taken(item, "tags", tag));
            }
        }
        Ok(())
    }

    /// Returns the failed item of the owner that has the name of this one.
    pub(crate) fn failed_with_name_of(&self, item: &CatalogItem) -> Option<CatalogItem> {
        let other = self.named(item.kind(), &item.owner, item.name.as_str())?;
        let is_failed = other.state == ItemState::Failed && other.name == item.name;
        is_failed.then(|| other.clone())
    }

    /// Returns whether another item of the owner has this tag and is ready.
    pub(crate) fn is_tag_of_ready(&self, item: &CatalogItem, tag: &Name) -> bool {
        let other = self.named(item.kind(), &item.owner, tag.as_str());
        other.is_some_and(|other| other.id != item.id && other.state == ItemState::Ready)
    }

    fn check_name(&self, item: &CatalogItem, name: &Name, field: &'static str) -> Result<()> {
        let other = self.named(item.kind(), &item.owner, name.as_str());
        if other.is_some_and(|other| other.id != item.id) {
            return Err(taken(item, field, name));
        }
        Ok(())
    }

    /// Returns the other items of the owner that have tags of this one.
    pub(crate) fn others_with_tags(&self, item: &CatalogItem) -> Vec<CatalogItem> {
        let mut others: BTreeMap<&ItemId, &CatalogItem> = BTreeMap::new();
        for tag in &item.tags {
            let other = self.named(item.kind(), &item.owner, tag.as_str());
            if let Some(other) = other.filter(|other| other.id != item.id) {
                others.insert(&other.id, other);
            }
        }
        others.into_values().cloned().collect()
    }

    pub(crate) fn list(&self, viewer: Viewer<'_>, filter: &Filter) -> Page {
        let matching = self.all(filter.kind).filter(|item| viewer.sees(item));
        let matching: Vec<_> = matching.filter(|item| filter.selects(item)).collect();
        let total = matching.len();
        let is_later = |item: &&CatalogItem| match &filter.after {
            Some(after) => item.id > *after,
            None => true,
        };
        let mut rest = matching.into_iter().filter(is_later).peekable();
        let (mut items, mut room) = (Vec::new(), PAGE_BYTES);
        let limit = filter.limit.unwrap_or(usize::MAX).max(1);
        while let Some(item) = rest.peek() {
            let bytes = item.estimated_bytes();
            if items.len() == limit || (bytes > room && !items.is_empty()) {
                break;
            }
            room = room.saturating_sub(bytes);
            items.extend(rest.next().cloned());
        }
        let more = rest.next().is_some();
        let next = items.last().filter(|_| more);
        Page {
            next: next.map(|item| item.id.clone()),
            items,
            total,
        }
    }
}

fn taken(item: &CatalogItem, field: &'static str, name: &Name) -> Error {
    Error::NameTaken {
        kind: item.kind(),
        field,
        name: name.to_string(),
    }
}
