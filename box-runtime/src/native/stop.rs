//! Stops a box and keeps its private files as a layer.
//!
//! # Steps
//! 1. The backend freezes the box. It copies files in memory to the state directory of the box, and
//!    flushes a disk. A failure up to here leaves the box as it was.
//! 2. The backend stores the decision ([`StopRecord`]) in the state directory. From now on the stop
//!    completes, also in a later process.
//! 3. The backend kills the box, waits for its processes and drops its handles. The kernel unmounts
//!    its disk.
//! 4. The backend moves the copy or the disk to the path of the layer.
//!
//! The state directory keeps the records until the runtime calls `stop`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use box_sys::Cgroups;
use box_sys::walk::{self, Size};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::error::{box_gone, disk_error, os_error, sandbox_error};
use super::freeze::Frozen;
use super::live_box::LiveBox;
use super::snapshot::failed;
use super::state::{StateDir, StopRecord};
use super::{Inner, NativeBackend, adopt, disk, wait_for_end};
use crate::backend::{LayerFiles, LayerKind, Reach, SnapshotRequest};

/// Begin of the name of copied files in the state directory of their box.
const COPY: &str = "files-";

/// Time limit for the end of a disk's mounts, after the end of the box.
const UNMOUNT_TIMEOUT: Duration = Duration::from_mins(1);

/// Inodes of an empty disk: those that ext4 reserves, and the directories of an overlay.
const EMPTY_DISK_INODES: u64 = 13;

/// Locks that make the calls that stop a box take turns, also after its end.
#[derive(Debug, Default)]
pub(super) struct StopTurns(Mutex<HashMap<Uuid, Weak<tokio::sync::Mutex<()>>>>);

impl StopTurns {
    fn of(&self, id: Uuid) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(&id).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.insert(id, Arc::downgrade(&turn));
        turn
    }
}

/// A box whose stop is decided.
struct Decided {
    live_box: Arc<LiveBox>,
    /// Keeps the box frozen until it is killed.
    frozen: Option<Frozen>,
    record: StopRecord,
    /// Keeps other calls from stopping the box.
    turn: OwnedMutexGuard<()>,
}

impl NativeBackend {
    /// Ends a box; see [`Backend::stop_into_layer`](crate::Backend::stop_into_layer).
    pub(super) async fn stop_keeping_files(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        let turn = self.0.stop_turns.of(id).lock_owned().await;
        // An earlier call may have ended the box.
        let Some(live_box) = self.live_box(id) else {
            return self.repeat_stop(id, request.into, turn).await;
        };
        let directory = live_box
            .state()
            .as_ref()
            .map(|state| state.path().to_owned());
        let disk = disk_of(&live_box, directory.as_deref()).map_err(|error| failed(&error))?;
        check_target(disk.as_deref(), request.into)?;
        let (from, files, frozen) = if let Some(disk) = disk {
            let (files, frozen) = self.flush(&live_box, &disk, &request).await?;
            (disk, files, frozen)
        } else {
            let copy = staging(directory.as_deref(), request.into);
            let copy = copy.map_err(|error| failed(&error))?;
            let copied = self.copy(&live_box, &copy, &request).await;
            let mut copied = copied.map_err(|error| stop_error(error, request.time_limit))?;
            let files = LayerFiles {
                kind: LayerKind::Directory,
                bytes: copied.size.bytes,
                entries: copied.size.entries,
            };
            let frozen = copied.frozen.take();
            copied.keep().await?;
            (copy, files, frozen)
        };
        let record = StopRecord {
            from,
            into: request.into.to_owned(),
            files,
        };
        let decided = Decided {
            live_box,
            frozen,
            record,
            turn,
        };
        // A separate task completes the stop even if the caller stops waiting.
        let stopping = tokio::spawn(complete(Arc::downgrade(&self.0), id, decided));
        let stopped = stopping.await;
        stopped.unwrap_or_else(|_| Err(BoxError::internal("stop task failed")))
    }

    /// Returns the result of an earlier call, and moves the files if that call did not.
    async fn repeat_stop(
        &self,
        id: Uuid,
        into: &Path,
        turn: OwnedMutexGuard<()>,
    ) -> Result<LayerFiles, BoxError> {
        let state = self.state_of(id).ok_or_else(box_gone)?;
        let record = state.stop_record().map_err(os_error)?;
        let record = record.filter(|record| record.into == into);
        let record = record.ok_or_else(box_gone)?;
        move_files(record, Some(turn)).await
    }

    /// Writes the files of a disk, and freezes the box if this machine can.
    async fn flush(
        &self,
        live_box: &Arc<LiveBox>,
        disk: &Path,
        request: &SnapshotRequest<'_>,
    ) -> Result<(LayerFiles, Option<Frozen>), BoxError> {
        let frozen = match live_box.hold().await {
            // The moment of the end is as good: nothing is copied before it.
            Err(error) if error.code() == Code::Unsupported => None,
            frozen => Some(frozen?),
        };
        let files = live_box.sandbox.private_files();
        let files = files.map(|files| files.try_clone_to_owned()).transpose();
        let (files, disk) = (files.map_err(os_error)?, disk.to_owned());
        let flushing = move || {
            let in_file = std::fs::symlink_metadata(&disk)?.is_file();
            let files = match files {
                Some(files) => walk::open_in(files, c".")?,
                None => return Err(io::ErrorKind::Unsupported.into()),
            };
            if !in_file {
                let mut size = Size::default();
                // Only the number of bytes is unknown if a guest hides a directory from its owner.
                let _ = size.add(&files, &[], |_| true);
                return Ok(size);
            }
            rustix::fs::syncfs(&files)?;
            let used = rustix::fs::fstatvfs(&files)?;
            let inodes = used.f_files.saturating_sub(used.f_ffree);
            Ok(Size {
                bytes: (used.f_blocks - used.f_bfree).saturating_mul(used.f_frsize),
                entries: inodes.saturating_sub(EMPTY_DISK_INODES),
            })
        };
        let flushing = tokio::task::spawn_blocking(flushing);
        let flushed = tokio::time::timeout(request.time_limit, flushing).await;
        let flushed = flushed.map_err(|_| too_slow(request.time_limit))?;
        let flushed = flushed.map_err(|_| BoxError::internal("stop task failed"))?;
        let size = flushed.map_err(|error| failed(&error))?;
        if size.bytes > request.max_bytes || size.entries > request.max_entries {
            return Err(BoxError::capacity(format!(
                "stop: the box has {} bytes in {} files; the limit is {} bytes in {} files; remove some",
                size.bytes, size.entries, request.max_bytes, request.max_entries
            )));
        }
        let files = LayerFiles {
            kind: LayerKind::Disk,
            bytes: size.bytes,
            entries: size.entries,
        };
        Ok((files, frozen))
    }
}

/// Stores the decision, ends the box and moves its files.
async fn complete(of: Weak<Inner>, id: Uuid, decided: Decided) -> Result<LayerFiles, BoxError> {
    let (live_box, record) = (Arc::clone(&decided.live_box), decided.record.clone());
    let deciding = move || {
        if record.files.kind == LayerKind::Disk {
            let kept = live_box.sandbox.keep_disk();
            kept.map_err(|error| sandbox_error(&error))?;
        }
        if let Some(state) = &*live_box.state() {
            state.store_stop(&record).map_err(|error| failed(&error))?;
        }
        let killed = live_box.sandbox.kill();
        killed.map_err(|error| {
            if let Some(state) = &*live_box.state() {
                state.forget_stop();
            }
            sandbox_error(&error)
        })
    };
    let stored = tokio::task::spawn_blocking(deciding).await;
    let stored = stored.unwrap_or_else(|_| Err(BoxError::internal("stop task failed")));
    if let Err(error) = stored {
        if decided.record.files.kind == LayerKind::Directory {
            let copy = decided.record.from;
            let _ = tokio::task::spawn_blocking(move || walk::remove_all(&copy)).await;
        }
        return Err(error);
    }
    let Decided {
        live_box,
        frozen,
        record,
        turn,
    } = decided;
    wait_for_end(&live_box).await;
    drop(frozen);
    let ended = of.upgrade().and_then(|inner| {
        let mut boxes = inner.boxes.lock().unwrap_or_else(PoisonError::into_inner);
        boxes.remove(&id)
    });
    live_box.release_quotas();
    // This drops the last reference to the mounts. Unmounting is slow.
    let _ = tokio::task::spawn_blocking(|| drop((ended, live_box))).await;
    move_files(record, Some(turn)).await
}

/// Completes the stop of a box that an earlier process began.
pub(super) async fn complete_after_crash(
    id: Uuid,
    state: StateDir,
    cgroups: Arc<Cgroups>,
) -> Result<Reach, BoxError> {
    adopt::end_processes(&state, cgroups)
        .await
        .map_err(os_error)?;
    let record = state.stop_record().map_err(os_error)?;
    let record = record.ok_or_else(box_gone)?;
    let into = record.into.clone();
    if !is_left(&record.from) && !is_left(&into) {
        tracing::error!(%id, "the files of a stopped box are gone");
        let _ = tokio::task::spawn_blocking(move || state.remove()).await;
        return Ok(Reach::Dead("it was stopped, and its files are gone"));
    }
    let files = move_files(record, None).await?;
    Ok(Reach::Stopped { into, files })
}

fn is_left(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// Moves the files of an ended box to the path of the layer. Repeating the call succeeds.
///
/// The thread holds `turn` to its end, because a second move at the same time would lose the files
/// between its steps.
async fn move_files(
    record: StopRecord,
    turn: Option<OwnedMutexGuard<()>>,
) -> Result<LayerFiles, BoxError> {
    let files = record.files;
    let moved = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let StopRecord { from, into, .. } = record;
        if is_left(&from) {
            settle(&from, files.kind)?;
        }
        if from == into {
            return Ok(());
        }
        let parent = into.parent().ok_or(io::ErrorKind::InvalidInput)?;
        // A later process may have removed a directory without a layer.
        std::fs::create_dir_all(parent)?;
        match std::fs::rename(&from, &into) {
            // An earlier call has moved them.
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_left(&into) => {}
            moved => moved?,
        }
        File::open(parent)?.sync_all()
    });
    let moved = moved.await;
    let moved = moved.map_err(|_| BoxError::internal("stop task failed"))?;
    moved.map_err(|error| failed(&error)).map(|()| files)
}

/// Waits until nothing writes to the files, and writes them to the disk of the machine.
fn settle(from: &Path, kind: LayerKind) -> io::Result<()> {
    match kind {
        // The copy is on the disk.
        LayerKind::Directory => Ok(()),
        LayerKind::Disk if std::fs::symlink_metadata(from)?.is_dir() => {
            Ok(rustix::fs::syncfs(File::open(from)?)?)
        }
        LayerKind::Disk => box_sys::settle_disk(from, UNMOUNT_TIMEOUT).map_err(disk_error),
    }
}

/// The disk of a box, if it has a path that the backend can move.
///
/// Other private files are copied: those in memory, and the disk of a box without a state directory.
fn disk_of(live_box: &LiveBox, state: Option<&Path>) -> io::Result<Option<PathBuf>> {
    if let Some(earlier) = live_box.earlier_disk.get() {
        return Ok(Some(earlier.clone()));
    }
    let Some(disk) = state.map(|state| state.join(disk::NAME)) else {
        return Ok(None);
    };
    Ok(disk.try_exists()?.then_some(disk))
}

/// Where private files are copied to before the decision.
///
/// The name is new, because a thread may still remove the copy of an earlier call.
fn staging(state: Option<&Path>, into: &Path) -> io::Result<PathBuf> {
    let parent = into.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let name = format!("{COPY}{}", Uuid::now_v7().simple());
    match state {
        Some(state) if is_same_device(state, parent)? => {
            remove_copies(state)?;
            Ok(state.join(name))
        }
        _ => Ok(parent.join(format!(".{name}"))),
    }
}

/// Removes copies that an earlier process has left.
fn remove_copies(state: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(state)? {
        let entry = entry?;
        if entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(COPY.as_bytes())
        {
            // A thread may be about to do that.
            let _ = walk::remove_all(&entry.path());
        }
    }
    Ok(())
}

fn is_same_device(one: &Path, other: &Path) -> io::Result<bool> {
    Ok(std::fs::metadata(one)?.dev() == std::fs::metadata(other)?.dev())
}

/// Fails if the layer cannot be at this path.
fn check_target(disk: Option<&Path>, into: &Path) -> Result<(), BoxError> {
    if disk == Some(into) {
        return Ok(());
    }
    if into.try_exists().map_err(|error| failed(&error))? {
        return Err(failed(&io::ErrorKind::AlreadyExists.into()));
    }
    let parent = into.parent().unwrap_or(into);
    let Some(disk) = disk else {
        return Ok(());
    };
    if is_same_device(disk, parent).map_err(|error| failed(&error))? {
        return Ok(());
    }
    let message = "stop: the layers and the disks of boxes are on different file systems";
    Err(BoxError::unavailable(message).with_detail(&Detail::about(Subject::Disk)))
}

/// Converts the error of a copy, which does not know that the box was to be stopped.
fn stop_error(error: BoxError, limit: Duration) -> BoxError {
    if error.code() == Code::Timeout {
        return too_slow(limit);
    }
    error
}

fn too_slow(limit: Duration) -> BoxError {
    let seconds = limit.as_secs_f64();
    BoxError::timeout(format!(
        "stop: writing the files took more than {seconds:.1} s, and the box keeps running; remove \
         files"
    ))
}
