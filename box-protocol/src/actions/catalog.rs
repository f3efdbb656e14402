//! `catalog.*`: what boxes are made from and what outlives them.
//!
//! Errors: `not_found`, `conflict` (name taken, in use and by whom, a template with volumes in a pool),
//! `capacity`, `unsupported`. Allowed whether or not there are boxes.

use std::collections::BTreeMap;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::actions;
use crate::ids::{ItemId, Name, SessionId};
use crate::model::{Labels, SpecDraft};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Makes an item, or changes one. A snapshot is made from a box; a pool keeps its replicas filled.
    CatalogPut = "catalog.put": CatalogPutParams => CatalogItem;

    /// One item.
    CatalogGet = "catalog.get": CatalogGetParams => CatalogItem;

    /// The items of one kind.
    CatalogList = "catalog.list": CatalogListParams => CatalogListResult;

    /// Deletes an item; refused while a box uses it.
    CatalogDelete = "catalog.delete": CatalogGetParams => Empty;
}

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CatalogKind {
    /// A directory that outlives boxes.
    Volume,
    /// A spec to make boxes from.
    Template,
    /// Boxes made in advance.
    Pool,
    /// The files of a box at one moment.
    Snapshot,
}

/// What is known of an item, or asked of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogDraft {
    /// Its name.
    pub name: Name,
    /// Of a snapshot: which of that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Name>,
    /// Its marks.
    #[serde(default)]
    pub labels: Labels,
    /// What a gateway keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Of a snapshot: the box it is of; without one it is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_box: Option<SessionId>,
    /// Of a template: the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Box<SpecDraft>>,
    /// Of a pool: the template, by id or name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Name>,
    /// Of a pool: how many boxes wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Of a volume: how large it may grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// Whether the item must or must not be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PutIf {
    /// Make a new one.
    Absent,
    /// Change an old one.
    Present,
}

/// Parameters of `catalog.put`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogPutParams {
    /// What it is.
    pub kind: CatalogKind,
    /// What is asked of it.
    pub item: CatalogDraft,
    /// Whether it must be there; either is fine if absent.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub only_if: Option<PutIf>,
}

/// Where an item is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemState {
    /// Being made.
    Building,
    /// Usable.
    Ready,
    /// It could not be made.
    Failed,
}

/// An item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CatalogItem {
    /// The item.
    pub id: ItemId,
    /// What it is.
    pub kind: CatalogKind,
    /// Where it is in its life.
    pub state: ItemState,
    /// What was asked of it.
    pub item: CatalogDraft,
    /// When it was made.
    pub created_at: UnixMs,
    /// When it last changed.
    pub updated_at: UnixMs,
    /// Figures of its kind, as `used_bytes` or `waiting`.
    #[serde(default)]
    pub figures: BTreeMap<String, u64>,
}

/// Which item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemKey {
    /// By id.
    Id(ItemId),
    /// By name.
    Name(Name),
}

/// Parameters of `catalog.get` and `catalog.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogGetParams {
    /// What it is.
    pub kind: CatalogKind,
    /// Which one.
    pub item: ItemKey,
    /// Of a snapshot: which of that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Name>,
}

/// Parameters of `catalog.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CatalogListParams {
    /// What they are.
    pub kind: CatalogKind,
    /// With this in their name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_contains: Option<String>,
    /// At most so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// After so many.
    #[serde(default)]
    pub offset: u64,
}

/// Answer to `catalog.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CatalogListResult {
    /// The items, by name.
    pub items: Vec<CatalogItem>,
    /// How many there are in all.
    pub total: u64,
}
