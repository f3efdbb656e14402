//! Copies the private files of a box to a directory.
//!
//! # Steps
//! 1. The backend creates the directory and freezes the box.
//! 2. A process of the fork server copies the files (`box_sys::snapshot`). It has the rights over
//!    them, and the runtime has not.
//! 3. The backend checks that the box was frozen until the end of the copy, and thaws it.
//! 4. The kernel writes the copy to the disk.
//!
//! If the caller stops waiting, the box thaws at once. A thread ends the copy and removes the
//! directory.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use box_sys::{PendingSnapshot, SnapshotLimits};
use uuid::Uuid;

use super::error::{box_gone, sandbox_error};
use super::live_box::LiveBox;
use super::{NativeBackend, readable};
use crate::backend::{Snapshot, SnapshotRequest};

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
        std::thread::spawn(move || {
            if let Some(copy) = copy {
                copy.cancel();
            }
            if let Err(error) = box_sys::walk::remove_all(&path) {
                tracing::warn!(kind = %error.kind(), "cannot remove an unfinished snapshot");
            }
        });
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
        let server = self.0.server.running().await?;
        let _permit = self.0.snapshots.acquire().await;
        let directory =
            create(request.into, self.0.config.run_as).map_err(|error| failed(&error))?;
        let mut unfinished = Unfinished {
            path: request.into.to_owned(),
            copy: None,
            is_complete: false,
        };
        let frozen = match live_box.hold().await {
            // The caller states that no process would run.
            Err(error) if request.is_stopped && error.code() == Code::Unsupported => None,
            frozen => Some(frozen?),
        };
        let begun = Instant::now();
        let limits = SnapshotLimits {
            bytes: request.max_bytes,
            entries: request.max_entries,
        };
        let copy = server
            .start_snapshot(&live_box.sandbox, directory.as_fd(), limits)
            .map_err(|error| sandbox_error(&error))?;
        let waiting = async {
            let copy = unfinished.copy.insert(copy);
            readable(copy.as_fd()).await
        };
        let waited = tokio::time::timeout(request.time_limit, waiting).await;
        let waited = waited.map_err(|_| too_slow(request.time_limit))?;
        waited.map_err(|error| failed(&error))?;
        let copied = unfinished
            .copy
            .take()
            .ok_or_else(|| failed(&io::ErrorKind::NotFound.into()))?;
        let size = copied.finish().map_err(|error| copy_error(&error))?;
        check_unchanged(&live_box, frozen.is_some())?;
        let paused = begun.elapsed();
        drop(frozen);
        // Without this, a crash of the machine could leave a snapshot with empty files.
        let written = tokio::task::spawn_blocking(move || rustix::fs::syncfs(&directory)).await;
        written
            .map_err(|_| BoxError::internal("snapshot task failed"))?
            .map_err(|error| failed(&error.into()))?;
        unfinished.is_complete = true;
        Ok(Snapshot::new(size.bytes, size.entries, paused))
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
fn failed(error: &io::Error) -> BoxError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            BoxError::capacity("snapshot: the server's disk has no room for it")
                .with_detail(&Detail::about(Subject::Disk))
        }
        kind => BoxError::unavailable(format!("snapshot not made: {kind}")),
    }
}
