//! The request to work on the changes of a box.

use std::path::PathBuf;
use std::time::Duration;

use box_protocol::{BoxSpec, UnixMs};

use super::{ImageRoot, Layer};

/// What the files of a box are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiffBase<'a> {
    /// The image of the box: all its private files.
    Image,
    /// The host directory of a workspace with the mode `overlay`.
    Workspace,
    /// An earlier state of the box: its snapshots, the topmost first.
    Snapshot(&'a [Layer]),
}

/// The request to list, apply or discard the changes of a box.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ChangesRequest<'a> {
    /// The spec of the box.
    pub spec: &'a BoxSpec,
    /// What to compare with.
    pub base: DiffBase<'a>,
    /// The image of the box, if the runtime has resolved it.
    pub image: Option<&'a ImageRoot>,
    /// The snapshots of the box, the topmost first.
    pub layers: &'a [Layer],
    /// The mount points of the box, besides the workspace.
    pub mount_points: &'a [PathBuf],
    /// Only these paths, with everything below them; all if empty.
    ///
    /// Relative to the workspace, or to the root.
    pub paths: &'a [PathBuf],
    /// Whether the box has no process except its agent, and gets none before the call returns.
    pub is_stopped: bool,
    /// When the box was created.
    pub created_at: UnixMs,
    /// The directory of the workspace at the start of the box; see [`Facts`](super::Facts).
    pub directory: Option<(u64, u64)>,
    /// First and last moments of earlier applies, in nanoseconds since 1970.
    ///
    /// A change on the host within one of them is no conflict.
    pub applies: &'a [(i64, i64)],
    /// The maximum time of the call.
    pub time_limit: Duration,
}

impl<'a> ChangesRequest<'a> {
    /// A request for all changes of a box without an image.
    pub fn new(spec: &'a BoxSpec, base: DiffBase<'a>, time_limit: Duration) -> Self {
        Self {
            spec,
            base,
            image: None,
            layers: &[],
            mount_points: &[],
            paths: &[],
            is_stopped: false,
            created_at: UnixMs::now(),
            directory: None,
            applies: &[],
            time_limit,
        }
    }
}

/// A part of the changes of a box.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangeList {
    /// The changes, with paths as in the request.
    pub changes: Vec<box_protocol::actions::DiffEntry>,
    /// Where the next part begins, unless this is the last one.
    pub next: Option<String>,
}

impl ChangeList {
    /// A part of the changes.
    pub fn new(changes: Vec<box_protocol::actions::DiffEntry>, next: Option<String>) -> Self {
        Self { changes, next }
    }
}
