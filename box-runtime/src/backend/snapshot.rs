//! The request to copy or keep the private files of a box, and the result of a copy.

use std::path::Path;
use std::time::Duration;

/// The request to make a layer from the private files of a box.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SnapshotRequest<'a> {
    /// The path of the layer, which does not exist.
    ///
    /// Its parent is a private directory of the runtime.
    pub into: &'a Path,
    /// Whether the box has no process except its agent, and gets none before the call returns.
    ///
    /// Such a box can be copied on a machine that cannot freeze boxes.
    pub is_stopped: bool,
    /// The maximum bytes of all files, without holes.
    pub max_bytes: u64,
    /// The maximum number of files, directories and links.
    pub max_entries: u64,
    /// The maximum time of the copy, during which no process of the box runs.
    pub time_limit: Duration,
}

impl<'a> SnapshotRequest<'a> {
    /// A request for a copy of a running box, without limits of its size.
    pub fn new(into: &'a Path, time_limit: Duration) -> Self {
        Self {
            into,
            is_stopped: false,
            max_bytes: u64::MAX,
            max_entries: u64::MAX,
            time_limit,
        }
    }

    /// Returns this request for a box without processes except its agent.
    pub fn of_stopped(mut self, is_stopped: bool) -> Self {
        self.is_stopped = is_stopped;
        self
    }

    /// Returns this request with a maximum of bytes and of entries.
    pub fn with_limits(mut self, max_bytes: u64, max_entries: u64) -> Self {
        (self.max_bytes, self.max_entries) = (max_bytes, max_entries);
        self
    }
}

/// A copy of the private files of a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The bytes of all files, without holes.
    pub bytes: u64,
    /// The number of files, directories and links.
    pub entries: u64,
    /// The time during which no process of the box ran.
    pub paused: Duration,
}

impl Snapshot {
    /// A copy of this size.
    pub fn new(bytes: u64, entries: u64, paused: Duration) -> Self {
        Self {
            bytes,
            entries,
            paused,
        }
    }
}
