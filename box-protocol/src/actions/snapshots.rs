//! `box.snapshot`, `box.fork`, `box.checkpoint`, `box.rollback`: files of a box at one moment.

use serde::{Deserialize, Serialize};

use super::{FileChunk, actions, is_default};
use crate::catalog::CatalogItem;
use crate::ids::{BoxId, ItemRef, Name};
use crate::invalid::Invalid;
use crate::model::{BoxInfo, Checkpoint, Labels};

/// Maximum number of boxes that one `box.fork` makes.
pub const MAX_FORKS: u32 = 100;

actions! {
    /// Makes a snapshot of the private files of a box. A running box is paused meanwhile; the files
    /// of a stopped box are not copied. Mounts, volumes, `/dev/shm` and processes are not part of
    /// it. Errors: `not_found`, `conflict` (the name is taken, or the box ended meanwhile),
    /// `capacity`, `timeout`, `unsupported`.
    BoxSnapshot = "box.snapshot": BoxSnapshotParams => CatalogItem;

    /// Creates boxes with the spec and the files of a box. It makes all of them or none. Errors:
    /// those of `box.snapshot` and of `box.create`.
    BoxFork = "box.fork": BoxForkParams => BoxForkResult;

    /// Keeps the private files of a box under a name, until the box is deleted. Errors: those of
    /// `box.snapshot`.
    BoxCheckpoint = "box.checkpoint": BoxCheckpointParams => Checkpoint;

    /// Replaces the private files of a box by those of a checkpoint. All processes of the box end.
    /// A box that was not stopped starts again, also one that has failed. Errors: `not_found`,
    /// `conflict`, and those of `box.create`.
    BoxRollback = "box.rollback": BoxRollbackParams => BoxInfo;

    /// Sends a snapshot as a tar archive: with an image, an OCI layout of the image and the files of
    /// the snapshot; otherwise the files, with the marks of an OCI layer for removed ones. Errors:
    /// `not_found`, `capacity`, `unsupported`.
    SnapshotExport = "snapshot.export": SnapshotExportParams => SnapshotExportResult | FileChunk;
}

/// Parameters of `box.snapshot`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxSnapshotParams {
    /// The box.
    pub box_id: BoxId,
    /// The name, unique among the caller's snapshots.
    pub name: Name,
    /// Tags, which move here from other snapshots of the caller; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Name>,
    /// Labels to filter by: at most 64, with at most 16 KiB in total.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Whether a snapshot that cannot be made stays, with the state `failed` and the reason; `false`
    /// if absent. The call gets the error in either case. If the server ends meanwhile, the next
    /// server sets the reason. The next snapshot with the name replaces it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keep_failed: bool,
}

impl BoxSnapshotParams {
    /// A snapshot without tags and labels.
    pub fn new(box_id: BoxId, name: Name) -> Self {
        Self {
            box_id,
            name,
            tags: Vec::new(),
            labels: Labels::new(),
            keep_failed: false,
        }
    }
}

/// Parameters of `box.fork`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxForkParams {
    /// The box.
    pub box_id: BoxId,
    /// Number of boxes to create: 1 to 100; 1 if absent.
    #[serde(default = "one")]
    pub count: u32,
    /// The new ids are `PREFIX-1`, `PREFIX-2` and so on; the server chooses a prefix if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<BoxId>,
    /// Labels to add to those of the box.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

fn one() -> u32 {
    1
}

impl BoxForkParams {
    /// One box with a generated id.
    pub fn new(box_id: BoxId) -> Self {
        Self {
            box_id,
            count: 1,
            prefix: None,
            labels: Labels::new(),
        }
    }

    /// Checks the number of boxes.
    pub fn check(&self) -> Result<(), Invalid> {
        if (1..=MAX_FORKS).contains(&self.count) {
            return Ok(());
        }
        let rule = format!("must be between 1 and {MAX_FORKS}, not {}", self.count);
        Err(Invalid::new("count", rule))
    }
}

/// Result of `box.fork`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxForkResult {
    /// The new boxes, in the order of their numbers.
    pub items: Vec<BoxInfo>,
    /// How long the processes of the box were paused, in milliseconds.
    #[serde(default)]
    pub paused_ms: u64,
}

/// Parameters of `box.checkpoint`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxCheckpointParams {
    /// The box.
    pub box_id: BoxId,
    /// The name, unique in the box; `checkpoint-N` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
}

/// Parameters of `box.rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxRollbackParams {
    /// The box.
    pub box_id: BoxId,
    /// The checkpoint; the newest if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
}

/// Parameters of `snapshot.export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotExportParams {
    /// The snapshot, by id, name or tag.
    pub snapshot: ItemRef,
}

/// Result of `snapshot.export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SnapshotExportResult {
    /// Digest of the manifest in the archive; absent without an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Size of the archive, in bytes.
    pub bytes: u64,
}
