//! `box.diff`, `box.apply` and `box.discard`: what a box has changed.

use serde::{Deserialize, Serialize};

use super::{FileKind, actions, is_default};
use crate::ids::{BoxId, Name};

/// Maximum number of changes in one result of `box.diff`.
pub const MAX_CHANGES: u32 = 1000;

/// Maximum number of paths in one `box.apply` or `box.discard`.
pub const MAX_CHANGE_PATHS: usize = 256;

/// The `since` of `box.diff` for all private files since the box began.
pub const SINCE_IMAGE: &str = "image";

/// The `since` of `box.diff` for the workspace since the host's version of it.
pub const SINCE_WORKSPACE: &str = "workspace";

actions! {
    /// Lists what a box has changed, in the order of the paths. An entry is listed if its type, its
    /// mode, its content or its link target differs. A box that runs meanwhile may change files
    /// during the call. Errors: `not_found`, `unsupported`, `timeout`, `unavailable`.
    BoxDiff = "box.diff": BoxDiffParams => BoxDiffResult;

    /// Writes the changes of a workspace with the mode `overlay` to the host directory. The box is
    /// paused meanwhile. Each file has its old or its new content at any moment, so the call can be
    /// repeated after a failure. Errors: `not_found`, `conflict` (files that changed on the host as
    /// well, unless `force`), `unsupported` (the workspace has another mode, or this machine cannot
    /// pause a running box), `denied`, `capacity`, `unavailable`.
    BoxApply = "box.apply": BoxApplyParams => BoxApplyResult;

    /// Restores the files of a workspace with the mode `overlay` from the host directory, which
    /// stays as it is. Errors: `not_found`, `conflict`, `unsupported`, `capacity`, `unavailable`.
    BoxDiscard = "box.discard": BoxDiscardParams => BoxDiscardResult;
}

/// Parameters of `box.diff`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxDiffParams {
    /// The box.
    pub box_id: BoxId,
    /// What to compare with: `workspace` for the host directory of a workspace with the mode
    /// `overlay`, `image` for the beginning of the box, or the name of a checkpoint. If absent,
    /// `workspace` for a box with such a workspace and `image` for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Name>,
    /// Only this path and everything below it; all if absent. An absolute path in the box, or one
    /// relative to the workspace if `since` is `workspace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Start after this position; the `next` of the previous result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Maximum number of changes in the result, 1 to 1000; as many as fit into one message if
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

impl BoxDiffParams {
    /// All changes of a box.
    pub fn of(box_id: BoxId) -> Self {
        Self {
            box_id,
            since: None,
            path: None,
            after: None,
            limit: None,
        }
    }
}

/// Result of `box.diff`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxDiffResult {
    /// The changes. The result can have fewer than `limit` although more follow.
    pub changes: Vec<DiffEntry>,
    /// What the files were compared with: `workspace`, `image` or the name of a checkpoint.
    pub since: String,
    /// The `after` of the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A file that a box has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiffEntry {
    /// The absolute path in the box, or the path below the workspace if `since` is `workspace`.
    /// Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// How it changed.
    pub change: DiffKind,
    /// The type; the earlier one of a deleted file.
    pub kind: FileKind,
    /// Size of a file in bytes; 0 for others.
    pub size: u64,
}

/// How a file differs from its earlier version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum DiffKind {
    /// It is new.
    Added,
    /// Its type, mode, content or link target is different.
    Changed,
    /// It is gone, with everything below it.
    Deleted,
}

/// Parameters of `box.apply`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxApplyParams {
    /// The box.
    pub box_id: BoxId,
    /// Only these paths of the workspace, with everything below them; all if empty. At most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Whether to replace files that changed on the host as well; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub force: bool,
    /// Whether to write nothing and only report; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dry_run: bool,
}

impl BoxApplyParams {
    /// All changes of a box, unless files changed on the host as well.
    pub fn of(box_id: BoxId) -> Self {
        Self {
            box_id,
            paths: Vec::new(),
            force: false,
            dry_run: false,
        }
    }
}

/// Result of `box.apply`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxApplyResult {
    /// Number of files, directories and links that are new on the host.
    pub added: u64,
    /// Number of those that are different now.
    pub changed: u64,
    /// Number of those that are gone, without those below a deleted directory.
    pub deleted: u64,
    /// Changes that are never applied, as sockets; at most 64 are listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedChange>,
    /// Only with `dry_run`: files that changed on the host as well; at most 64 are listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
}

/// A change that is never applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SkippedChange {
    /// The path below the workspace.
    pub path: String,
    /// The reason, as text for people.
    pub why: String,
}

/// Parameters of `box.discard`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxDiscardParams {
    /// The box.
    pub box_id: BoxId,
    /// Only these paths of the workspace, with everything below them; all if empty. At most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
}

/// Result of `box.discard`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxDiscardResult {
    /// Number of changes that are undone.
    pub discarded: u64,
}
