//! Requested items and requested changes of items, with their rules.

use serde::{Deserialize, Serialize};

use super::CatalogKind;
use crate::ids::{ItemRef, Name};
use crate::invalid::Invalid;
use crate::model::{SpecDraft, few};

/// Maximum number of tags of an item.
pub const MAX_TAGS: usize = 64;

/// Size of a volume if the request sets none, in MiB.
pub const DEFAULT_VOLUME_MB: u64 = 1024;

/// Smallest size of a volume, in MiB.
pub const MIN_VOLUME_MB: u64 = 16;

/// Largest size of a volume, in MiB.
pub const MAX_VOLUME_MB: u64 = 8 << 20;

/// Largest number of boxes that a pool keeps ready.
pub const MAX_POOL_SIZE: u32 = 100;

/// The requested properties of an item, by kind.
///
/// `image.pull` makes images, and `box.snapshot` makes snapshots of boxes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemDraft {
    /// A directory that outlives boxes.
    Volume(VolumeDraft),
    /// A partial spec.
    Template(Box<TemplateDraft>),
    /// Boxes that the server starts in advance.
    Pool(Box<PoolDraft>),
    /// A snapshot of an image, without files of its own.
    Snapshot(SnapshotDraft),
}

impl ItemDraft {
    /// Returns the kind.
    pub fn kind(&self) -> CatalogKind {
        match self {
            Self::Volume(_) => CatalogKind::Volume,
            Self::Template(_) => CatalogKind::Template,
            Self::Pool(_) => CatalogKind::Pool,
            Self::Snapshot(_) => CatalogKind::Snapshot,
        }
    }

    /// Checks the rules of the kind.
    pub fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Volume(volume) => check_size(volume.size_mb),
            Self::Template(template) => template.spec.check_template(),
            Self::Pool(pool) => check_pool(Some(pool.size), Some(pool.max_age_sec)),
            Self::Snapshot(snapshot) if snapshot.image.trim().is_empty() => {
                Err(Invalid::new("image", "must not be empty"))
            }
            Self::Snapshot(_) => Ok(()),
        }
    }
}

/// The requested properties of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct VolumeDraft {
    /// Maximum size, in MiB: 16 to 8388608; 1024 if absent.
    pub size_mb: u64,
    /// Whether several boxes may write to it at once; `false` if absent.
    pub shared: bool,
}

impl Default for VolumeDraft {
    fn default() -> Self {
        Self {
            size_mb: DEFAULT_VOLUME_MB,
            shared: false,
        }
    }
}

/// The requested properties of a template.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TemplateDraft {
    /// The fields of a spec that a request leaves unset. `box_id`, `name`, `cmd`,
    /// `template` and `pool` are not among them.
    pub spec: SpecDraft,
}

/// The requested properties of a snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotDraft {
    /// The image, which the server pulls if it does not have it; `host` for the system directories
    /// of the machine. If the pull fails, the item stays, with the state `failed` and the reason.
    pub image: String,
}

/// The requested properties of a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PoolDraft {
    /// The template of its boxes, by id, name or tag.
    pub template: ItemRef,
    /// Number of boxes to keep ready: 1 to 64.
    pub size: u32,
    /// Age at which a waiting box is replaced, in seconds, at least 1; 3600 if absent.
    #[serde(default = "max_age")]
    pub max_age_sec: u64,
    /// The spec of its boxes, as the policy layer has decided it. The service sets it, whatever a
    /// caller sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Box<SpecDraft>>,
}

impl PoolDraft {
    /// A pool of this many boxes of a template.
    pub fn new(template: ItemRef, size: u32) -> Self {
        Self {
            template,
            size,
            max_age_sec: max_age(),
            spec: None,
        }
    }
}

fn max_age() -> u64 {
    3600
}

/// Changes of an item, by kind. Absent members stay unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemChange {
    /// Changes of a volume.
    Volume(VolumeChange),
    /// The new spec of a template, which replaces the old one.
    Template(Box<TemplateDraft>),
    /// Changes of a pool.
    Pool(Box<PoolChange>),
}

impl ItemChange {
    /// Returns the kind.
    pub fn kind(&self) -> CatalogKind {
        match self {
            Self::Volume(_) => CatalogKind::Volume,
            Self::Template(_) => CatalogKind::Template,
            Self::Pool(_) => CatalogKind::Pool,
        }
    }

    /// Checks the rules of the kind.
    pub fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Volume(volume) => volume.size_mb.map_or(Ok(()), check_size),
            Self::Template(template) => template.spec.check_template(),
            Self::Pool(pool) => check_pool(pool.size, pool.max_age_sec),
        }
    }
}

/// Changes of a pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PoolChange {
    /// The new template of its boxes, by id, name or tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<ItemRef>,
    /// The new number of boxes to keep ready: 1 to 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u32>,
    /// The new age at which a waiting box is replaced, in seconds, at least 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_age_sec: Option<u64>,
    /// The spec of its boxes, as the policy layer has decided it. The service sets it, whatever a
    /// caller sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<Box<SpecDraft>>,
    /// Why the policy layer refuses the boxes of the pool. The service sets it, whatever a caller
    /// sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Changes of a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct VolumeChange {
    /// The new maximum size, in MiB. No box may use the volume meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_mb: Option<u64>,
    /// Whether several boxes may write to it at once. Boxes that use it keep it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
}

fn check_size(size_mb: u64) -> Result<(), Invalid> {
    if (MIN_VOLUME_MB..=MAX_VOLUME_MB).contains(&size_mb) {
        return Ok(());
    }
    let rule = format!("must be between {MIN_VOLUME_MB} and {MAX_VOLUME_MB}, not {size_mb}");
    Err(Invalid::new("size_mb", rule))
}

fn check_pool(size: Option<u32>, max_age_sec: Option<u64>) -> Result<(), Invalid> {
    if let Some(size) = size.filter(|size| !(1..=MAX_POOL_SIZE).contains(size)) {
        let rule = format!("must be between 1 and {MAX_POOL_SIZE}, not {size}");
        return Err(Invalid::new("size", rule));
    }
    if max_age_sec == Some(0) {
        return Err(Invalid::new("max_age_sec", "must be greater than 0"));
    }
    Ok(())
}

/// Checks the number of tags.
pub fn check_tags(tags: &[Name]) -> Result<(), Invalid> {
    few("tags", tags.len(), MAX_TAGS)
}
