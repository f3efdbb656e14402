//! Requested items and requested changes of items, with their rules.

use serde::{Deserialize, Serialize};

use super::CatalogKind;
use crate::ids::Name;
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

/// The requested properties of an item, by kind.
///
/// `image.pull` and `box.snapshot` create the other kinds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ItemDraft {
    /// A directory that outlives boxes.
    Volume(VolumeDraft),
    /// A partial spec.
    Template(Box<TemplateDraft>),
}

impl ItemDraft {
    /// Returns the kind.
    pub fn kind(&self) -> CatalogKind {
        match self {
            Self::Volume(_) => CatalogKind::Volume,
            Self::Template(_) => CatalogKind::Template,
        }
    }

    /// Checks the rules of the kind.
    pub fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Volume(volume) => check_size(volume.size_mb),
            Self::Template(template) => template.spec.check_template(),
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
    /// The fields of a spec that a request leaves unset. `box_id`, `name` and `cmd` are not among
    /// them.
    pub spec: SpecDraft,
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
}

impl ItemChange {
    /// Returns the kind.
    pub fn kind(&self) -> CatalogKind {
        match self {
            Self::Volume(_) => CatalogKind::Volume,
            Self::Template(_) => CatalogKind::Template,
        }
    }

    /// Checks the rules of the kind.
    pub fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Volume(volume) => volume.size_mb.map_or(Ok(()), check_size),
            Self::Template(template) => template.spec.check_template(),
        }
    }
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
    let rule = format!("must be within {MIN_VOLUME_MB} and {MAX_VOLUME_MB}, not {size_mb}");
    Err(Invalid::new("size_mb", rule))
}

/// Checks the number of tags.
pub fn check_tags(tags: &[Name]) -> Result<(), Invalid> {
    few("tags", tags.len(), MAX_TAGS)
}
