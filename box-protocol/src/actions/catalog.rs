//! `catalog.*`: volumes, templates and other items that outlive boxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{actions, is_default};
use crate::catalog::{CatalogItem, CatalogKind, ItemChange, ItemDraft, ItemState};
use crate::ids::{BoxId, ItemId, ItemRef, Name};
use crate::model::Labels;

actions! {
    /// Creates an item and answers when boxes can use it. Errors: `conflict` (the name is taken),
    /// `capacity`, `unsupported`, `unavailable`.
    CatalogPut = "catalog.put": CatalogPutParams => CatalogItem;

    /// Returns an item. Errors: `not_found`, `unsupported`, `unavailable` (its record is damaged).
    CatalogGet = "catalog.get": CatalogGetParams => CatalogItem;

    /// Lists the caller's items of one kind, oldest first. Errors: `unsupported`.
    CatalogList = "catalog.list": CatalogListParams => CatalogListResult;

    /// Changes an item. The runtime applies all changes or none, and persists them before it
    /// answers. Errors: `not_found`, `conflict` (the name is taken, or the change does not fit),
    /// `unsupported`.
    CatalogUpdate = "catalog.update": CatalogUpdateParams => CatalogItem;

    /// Deletes an item with its data and answers when it is gone. Errors: `not_found`, `conflict`
    /// (in use; `used_by` in the details).
    CatalogDelete = "catalog.delete": CatalogDeleteParams => CatalogDeleteResult;
}

/// Parameters of `catalog.put`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogPutParams {
    /// The name, unique among the caller's items of this kind.
    pub name: Name,
    /// Tags, which move here from other items of the caller; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Name>,
    /// Labels to filter by: at most 64, with at most 16 KiB in total.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// The properties of its kind.
    pub content: ItemDraft,
}

impl CatalogPutParams {
    /// An item without tags and labels.
    pub fn new(name: Name, content: ItemDraft) -> Self {
        Self {
            name,
            tags: Vec::new(),
            labels: Labels::new(),
            content,
        }
    }
}

/// Parameters of `catalog.get`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogGetParams {
    /// The kind.
    pub kind: CatalogKind,
    /// The item, by id, name or tag.
    pub item: ItemRef,
}

/// Parameters of `catalog.list`. An item must match all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogListParams {
    /// The kind.
    pub kind: CatalogKind,
    /// Only items with this name; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Only the item with this tag; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Name>,
    /// Only items in one of these states; any if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state: Vec<ItemState>,
    /// Only items that have all these labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Only snapshots of this box; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_box: Option<BoxId>,
    /// Start after this id; the `next` of the previous result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<ItemId>,
    /// Maximum number of items in the result; as many as fit into one message if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

impl CatalogListParams {
    /// All items of a kind.
    pub fn of(kind: CatalogKind) -> Self {
        Self {
            kind,
            name: None,
            tag: None,
            state: Vec::new(),
            labels: Labels::new(),
            source_box: None,
            after: None,
            limit: None,
        }
    }
}

/// Result of `catalog.list`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CatalogListResult {
    /// The items, sorted by id, without the `size_bytes` of volumes.
    pub items: Vec<CatalogItem>,
    /// The value of `after` for the next page; absent on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<ItemId>,
    /// Number of items that match, on all pages.
    #[serde(default)]
    pub total: u64,
    /// Ids of items whose records are damaged, for callers that see all items.
    #[serde(default, skip_serializing_if = "is_default")]
    pub damaged: Vec<ItemId>,
}

/// Parameters of `catalog.update`. Absent members stay unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogUpdateParams {
    /// The kind.
    pub kind: CatalogKind,
    /// The item, by id, name or tag.
    pub item: ItemRef,
    /// The new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Tags to add, which move here from other items of the caller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Name>,
    /// Tags to remove.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub untag: Vec<Name>,
    /// Labels to set; `null` removes a label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Changes of the properties of its kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<ItemChange>,
}

impl CatalogUpdateParams {
    /// Parameters that change nothing yet.
    pub fn of(kind: CatalogKind, item: ItemRef) -> Self {
        Self {
            kind,
            item,
            name: None,
            tags: Vec::new(),
            untag: Vec::new(),
            labels: BTreeMap::new(),
            content: None,
        }
    }
}

/// Parameters of `catalog.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogDeleteParams {
    /// The kind.
    pub kind: CatalogKind,
    /// The item, by id, name or tag.
    pub item: ItemRef,
}

/// Result of `catalog.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CatalogDeleteResult {
    /// The id of the deleted item.
    pub deleted: ItemId,
}
