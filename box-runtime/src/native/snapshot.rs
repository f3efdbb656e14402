//! Copies the private files of a box, or merged layers, to a directory.
//!
//! # Steps
//! 1. The backend creates the directory and freezes the box.
//! 2. A process of the fork server copies the files (`box_sys::snapshot`). It has the rights over
//!    them, and the runtime has not.
//! 3. The backend checks that the box was frozen until the end of the copy, and thaws it.
//! 4. The kernel writes merged layers to the disk before the backend returns. The copy of a box's
//!    files may follow later.
//!
//! If the caller stops waiting, the box thaws at once. A thread ends the copy and removes the
//! directory.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use box_protocol::BoxError;
use box_protocol::error::{Detail, Subject};
use box_sys::{PendingSnapshot, SnapshotLimits, SnapshotSize};
use uuid::Uuid;

use super::changes::frozen;
use super::error::{box_gone, sandbox_error};
use super::freeze::Frozen;
use super::live_box::LiveBox;
use super::{NativeBackend, plan, readable};
use crate::backend::{Layer, LayerFiles, LayerKind, Snapshot, SnapshotRequest};

/// A directory that is removed unless the copy is complete.
struct Unfinished {
    path: PathBuf,
    copy: Option<PendingSnapshot>,
    is_complete: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let (path, copy) = (std::mem::take(&mut self.path), self.copy.take());
        // The copy ends soon, but not at once.
        let removing = move || {
            if let Some(copy) = copy {
                copy.cancel();
            }
            box_sys::walk::remove_all(&path).unwrap_or_else(|error| log_left(&error));
        };
        let started = std::thread::Builder::new().spawn(removing);
        started.map_or_else(|error| log_left(&error), drop);
    }
}

fn log_left(error: &io::Error) {
    tracing::warn!(kind = %error.kind(), "cannot remove an unfinished snapshot");
}

/// A copy that is complete, except that a crash of the machine could damage it.
pub(super) struct Copied {
    pub(super) size: SnapshotSize,
    /// Keeps the box frozen.
    pub(super) frozen: Option<Frozen>,
    begun: Instant,
    directory: File,
    unfinished: Unfinished,
}

impl Copied {
    /// Writes the copy to the disk. The directory stays from now on.
    pub(super) async fn keep(mut self) -> Result<(), BoxError> {
        let directory = self.directory;
        let written = tokio::task::spawn_blocking(move || rustix::fs::syncfs(&directory)).await;
        written
            .map_err(|_| BoxError::internal("snapshot task failed"))?
            .map_err(|error| failed(&error.into()))?;
        self.unfinished.is_complete = true;
        Ok(())
    }
}

impl NativeBackend {
    /// Copies the private files of a box; see [`Backend::snapshot`](crate::Backend::snapshot).
    pub(super) async fn copy_private_files(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<Snapshot, BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        let mut copied = self.copy(&live_box, request.into, &request).await?;
        let (size, paused) = (copied.size, copied.begun.elapsed());
        drop(copied.frozen.take());
        copied.unfinished.is_complete = true;
        Ok(Snapshot::new(size.bytes, size.entries, paused))
    }

    /// Copies the private files of a box, which stays frozen.
    pub(super) async fn copy(
        &self,
        live_box: &Arc<LiveBox>,
        into: &Path,
        request: &SnapshotRequest<'_>,
    ) -> Result<Copied, BoxError> {
        let server = self.0.server.running().await?;
        let _permit = self.0.snapshots.acquire().await;
        let (directory, mut unfinished) = self.begin(into)?;
        let frozen = frozen(live_box, request.is_stopped).await?;
        let begun = Instant::now();
        let copy = server
            .start_snapshot(&live_box.sandbox, directory.as_fd(), limits(request))
            .map_err(|error| sandbox_error(&error))?;
        let size = unfinished.wait(copy, request.time_limit).await?;
        check_unchanged(live_box, frozen.is_some())?;
        Ok(Copied {
            size,
            frozen,
            begun,
            directory,
            unfinished,
        })
    }

    /// Merges layers; see [`Backend::merge_layers`](crate::Backend::merge_layers).
    pub(super) async fn merge(
        &self,
        layers: &[Layer],
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        let server = self.0.server.running().await?;
        let _permit = self.0.snapshots.acquire().await;
        let (directory, mut unfinished) = self.begin(request.into)?;
        let layers = plan::layers(layers);
        let begun = Instant::now();
        let merge = server
            .start_merge(&layers, directory.as_fd(), limits(&request))
            .map_err(|error| copy_error(&error))?;
        let size = unfinished.wait(merge, request.time_limit).await?;
        let merged = Copied {
            size,
            frozen: None,
            begun,
            directory,
            unfinished,
        };
        merged.keep().await?;
        Ok(LayerFiles {
            kind: LayerKind::Directory,
            bytes: size.bytes,
            entries: size.entries,
        })
    }

    /// Creates the directory of a copy, which is removed unless the copy is complete.
    fn begin(&self, into: &Path) -> Result<(File, Unfinished), BoxError> {
        let directory = create(into, self.0.config.run_as).map_err(|error| failed(&error))?;
        let unfinished = Unfinished {
            path: into.to_owned(),
            copy: None,
            is_complete: false,
        };
        Ok((directory, unfinished))
    }
}

impl Unfinished {
    /// Waits for a copy.
    async fn wait(
        &mut self,
        copy: PendingSnapshot,
        limit: Duration,
    ) -> Result<SnapshotSize, BoxError> {
        let copy = self.copy.insert(copy);
        let waited = tokio::time::timeout(limit, readable(copy.as_fd())).await;
        let waited = waited.map_err(|_| too_slow(limit))?;
        waited.map_err(|error| failed(&error))?;
        let copied = self.copy.take();
        let copied = copied.ok_or_else(|| failed(&io::ErrorKind::NotFound.into()))?;
        copied.finish().map_err(|error| copy_error(&error))
    }
}

fn limits(request: &SnapshotRequest<'_>) -> SnapshotLimits {
    SnapshotLimits {
        bytes: request.max_bytes,
        entries: request.max_entries,
    }
}

/// Creates the directory of a snapshot.
fn create(path: &Path, owner: Option<(u32, u32)>) -> io::Result<File> {
    DirBuilder::new().mode(0o700).create(path)?;
    if let Some((user, group)) = owner {
        std::os::unix::fs::chown(path, Some(user), Some(group))?;
    }
    File::open(path)
}

/// Fails if the processes of a box may have run since it was frozen.
fn check_unchanged(live_box: &LiveBox, was_frozen: bool) -> Result<(), BoxError> {
    let has_ended = !matches!(live_box.sandbox.wait(Some(Duration::ZERO)), Ok(false));
    if has_ended || (was_frozen && !live_box.sandbox.is_frozen()) {
        return Err(BoxError::conflict("the box ended during the snapshot")
            .with_detail(&Detail::about(Subject::Box)));
    }
    Ok(())
}

fn too_slow(limit: Duration) -> BoxError {
    let seconds = limit.as_secs_f64();
    BoxError::timeout(format!(
        "snapshot: the copy took more than {seconds:.1} s and was cancelled; stop the box first, or \
         remove files"
    ))
}

/// Converts the error of a copy.
fn copy_error(error: &box_sys::Error) -> BoxError {
    match error {
        box_sys::Error::Step { source, .. } => failed(source),
        // A limit, or files that a snapshot cannot contain.
        box_sys::Error::Invalid(why) => BoxError::capacity(why.clone()),
        error => sandbox_error(error),
    }
}

/// Converts a failure of the file system.
pub(super) fn failed(error: &io::Error) -> BoxError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            BoxError::capacity("snapshot: the server's disk has no room for it")
                .with_detail(&Detail::about(Subject::Disk))
        }
        kind => BoxError::unavailable(format!("snapshot not made: {kind}")),
    }
}
