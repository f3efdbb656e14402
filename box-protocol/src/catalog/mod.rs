//! The catalog: items that outlive boxes, and from which boxes are created.
//!
//! An item has an id, a name that its owner can change, and tags that move between items. It belongs
//! to the caller that created it and does not exist for other callers. Its [`ItemContent`] depends on
//! its [`CatalogKind`].

mod draft;

use serde::{Deserialize, Serialize};

use crate::actions::is_default;
use crate::ids::{BoxId, ItemId, LayerId, Name};
use crate::model::{Labels, SpecDraft};
use crate::time::UnixMs;

pub use draft::{
    DEFAULT_VOLUME_MB, ItemChange, ItemDraft, MAX_POOL_SIZE, MAX_TAGS, MAX_VOLUME_MB,
    MIN_VOLUME_MB, PoolChange, PoolDraft, SnapshotDraft, TemplateDraft, VolumeChange, VolumeDraft,
    check_tags,
};

/// The kind of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CatalogKind {
    /// A root file system.
    Image,
    /// A directory that outlives boxes.
    Volume,
    /// A partial spec.
    Template,
    /// The files of a box at one moment.
    Snapshot,
    /// Boxes that the server starts in advance.
    Pool,
}

impl CatalogKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Image,
        Self::Volume,
        Self::Template,
        Self::Snapshot,
        Self::Pool,
    ];

    /// Returns the name on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Volume => "volume",
            Self::Template => "template",
            Self::Snapshot => "snapshot",
            Self::Pool => "pool",
        }
    }
}

impl std::fmt::Display for CatalogKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemState {
    /// The server is creating the item. If it ends meanwhile, the next server marks a snapshot with
    /// `keep_failed` as failed, and removes any other item.
    Building,
    /// Boxes can use the item.
    Ready,
    /// The item cannot be used; its `reason` says why. A new item with the name replaces it.
    Failed,
}

/// An item of the catalog.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CatalogItem {
    /// The id, which never changes.
    pub id: ItemId,
    /// The name, unique among the owner's items of this kind.
    pub name: Name,
    /// Other names of the item, which can move to another item.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Name>,
    /// The caller that the item belongs to.
    pub owner: String,
    /// The labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// The state.
    pub state: ItemState,
    /// Why the item failed; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the item was created.
    pub created_at: UnixMs,
    /// When the item last changed.
    pub updated_at: UnixMs,
    /// Bytes that the item occupies on disk; absent if the server did not measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Number of boxes and items that use the item.
    #[serde(default, skip_serializing_if = "is_default")]
    pub used_by: u64,
    /// The properties of its kind.
    pub content: ItemContent,
}

impl CatalogItem {
    /// Returns the kind of the item.
    pub fn kind(&self) -> CatalogKind {
        self.content.kind()
    }

    /// Returns the box that the item was made from.
    pub fn source_box(&self) -> Option<&BoxId> {
        match &self.content {
            ItemContent::Snapshot(snapshot) => snapshot.source_box.as_ref(),
            ItemContent::Image(_)
            | ItemContent::Volume(_)
            | ItemContent::Template(_)
            | ItemContent::Pool(_) => None,
        }
    }

    /// Estimates the size of the item in a list, in bytes.
    pub fn estimated_bytes(&self) -> usize {
        serde_json::to_string(self).map_or(usize::MAX, |text| text.len())
    }
}

/// The properties of an item, by kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemContent {
    /// A root file system. `image.*` makes and removes it.
    Image(ImageContent),
    /// A directory that outlives boxes.
    Volume(VolumeContent),
    /// A partial spec.
    Template(Box<TemplateContent>),
    /// The files of a box at one moment.
    Snapshot(SnapshotContent),
    /// Boxes that the server starts in advance.
    Pool(PoolContent),
}

impl ItemContent {
    /// Returns the kind.
    pub fn kind(&self) -> CatalogKind {
        match self {
            Self::Image(_) => CatalogKind::Image,
            Self::Volume(_) => CatalogKind::Volume,
            Self::Template(_) => CatalogKind::Template,
            Self::Snapshot(_) => CatalogKind::Snapshot,
            Self::Pool(_) => CatalogKind::Pool,
        }
    }
}

/// The properties of an image. All callers of a server share its images.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ImageContent {
    /// Digest of the manifest.
    pub digest: String,
    /// The full names: `REGISTRY/REPOSITORY:TAG`.
    pub names: Vec<String>,
    /// The platform, for example `linux/amd64`; absent if the image names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
}

/// The properties of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VolumeContent {
    /// Maximum size, in MiB.
    pub size_mb: u64,
    /// Whether several boxes may write to it at once.
    #[serde(default)]
    pub shared: bool,
    /// Whether the kernel enforces the size. Otherwise the runtime measures the volume and ends a
    /// box that exceeds it.
    #[serde(default)]
    pub enforced: bool,
}

/// The properties of a template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TemplateContent {
    /// The fields of a spec that a request leaves unset.
    pub spec: SpecDraft,
}

/// The properties of a snapshot. It holds files, never limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct SnapshotContent {
    /// The box that it was taken of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_box: Option<BoxId>,
    /// The image below it, by its digest; the system directories of the machine if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Number of files, directories and links in all its layers.
    pub entries: u64,
    /// Whether the item stays, with the reason, if the snapshot fails.
    #[serde(skip_serializing_if = "is_default")]
    pub keep_failed: bool,
    /// How long the processes of the box were paused, in milliseconds.
    #[serde(skip_serializing_if = "is_default")]
    pub paused_ms: u64,
    /// Its layers, the topmost first. Snapshots and boxes share them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
}

/// The properties of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PoolContent {
    /// The id of the template of its boxes.
    pub template: ItemId,
    /// Number of boxes to keep ready.
    pub size: u32,
    /// Age at which a waiting box is replaced, in seconds.
    pub max_age_sec: u64,
    /// Number of boxes that are ready.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ready: u64,
}

#[cfg(test)]
mod tests;
