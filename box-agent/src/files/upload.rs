//! Uploads in pieces.
//!
//! A client may repeat a piece. Abandoned uploads are removed after a while.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::actions::{FileStatInfo, FileTreeResult, UploadPiece};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, UploadId};
use rustix::fs::Stat;
use tokio::sync::Notify;

use super::error::PathContext;
use super::guest_root::GuestRoot;
use super::temp_file::{TempFile, write_at};

/// Maximum number of concurrent uploads.
const UPLOADS_MAX: usize = 32;

/// How long an upload may be idle.
pub(super) const IDLE_LIMIT: Duration = Duration::from_mins(10);

/// How long a piece waits for the pieces before it.
const REORDER_WAIT: Duration = Duration::from_millis(250);

/// Maximum number of remembered finished uploads.
///
/// A client can repeat the last piece of these.
const FINISHED_MAX: usize = 64;

/// The uploads of a box.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    table: Mutex<UploadTable>,
    /// Notified when an upload has grown.
    growth: Notify,
}

#[derive(Debug, Default)]
struct UploadTable {
    open: HashMap<UploadId, OpenUpload>,
    ended: VecDeque<(UploadId, String, Outcome)>,
}

#[derive(Debug, Clone)]
struct OpenUpload {
    upload: Arc<Mutex<Upload>>,
    /// The size of the upload, readable while a piece is being written.
    bytes: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Upload {
    path: String,
    /// `None` before the first piece and after the last.
    temp_file: Option<TempFile>,
    bytes: u64,
    used: Instant,
}

/// The result of an upload.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    Written(FileStatInfo),
    Unpacked(FileTreeResult),
}

/// What a piece completed.
pub(super) enum PieceResult {
    /// More pieces follow. The status is that of the partial file.
    Partial(Stat),
    /// The last piece: the file is complete.
    Complete(TempFile),
    /// A repeated last piece.
    Repeated(Outcome),
}

impl Uploads {
    fn table(&self) -> MutexGuard<'_, UploadTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the pieces before this one have arrived.
    ///
    /// A client may send pieces without waiting for replies, so one can overtake another. A piece without predecessors
    /// waits only for a short time.
    pub(super) async fn wait_for_earlier(&self, piece: &UploadPiece) {
        let timeout = tokio::time::sleep(REORDER_WAIT);
        let mut timeout = std::pin::pin!(timeout);
        loop {
            let mut growth = std::pin::pin!(self.growth.notified());
            growth.as_mut().enable();
            let received = {
                let table = self.table();
                let open = table.open.get(&piece.id);
                let ended = table.ended.iter().any(|(id, ..)| *id == piece.id);
                open.map_or(if ended { u64::MAX } else { 0 }, |open| {
                    open.bytes.load(Ordering::Acquire)
                })
            };
            if piece.offset <= received {
                return;
            }
            tokio::select! {
                () = growth => {}
                () = &mut timeout => return,
            }
        }
    }

    /// Adds a piece. `create` makes the temporary file for the first one.
    pub(super) fn add_piece(
        &self,
        guest_root: &GuestRoot,
        path: &str,
        piece: &UploadPiece,
        data: &[u8],
        create: impl FnOnce() -> Result<TempFile, BoxError>,
    ) -> Result<PieceResult, BoxError> {
        if piece.abort {
            let aborted = self.table().open.remove(&piece.id);
            // Removes the file while no lock is held.
            drop(aborted);
            return Err(BoxError::cancelled("upload: aborted"));
        }
        let end = piece.offset.saturating_add(data.len() as u64);
        // Unnamed files of all uploads count against the limit together.
        guest_root.check_size(end.saturating_add(self.bytes_of_others(&piece.id)))?;
        let open = match self.find(path, piece)? {
            Ok(open) => open,
            Err(outcome) => return Ok(PieceResult::Repeated(outcome)),
        };
        let mut upload = open.upload.lock().unwrap_or_else(PoisonError::into_inner);
        if upload.path != path {
            return Err(BoxError::validation(
                "upload: the id belongs to another path; choose another id",
            ));
        }
        if piece.offset > upload.bytes {
            return Err(BoxError::conflict(format!(
                "upload: offset {} is beyond the {} bytes received; continue there",
                piece.offset, upload.bytes
            ))
            .with_detail(&Detail {
                field: Some("upload.offset".to_owned()),
                existing: Some(upload.bytes.to_string()),
                asked: Some(piece.offset.to_string()),
                ..Detail::default()
            }));
        }
        if upload.temp_file.is_none() {
            if upload.bytes > 0 {
                return Err(BoxError::conflict(
                    "upload: the last piece was already received",
                ));
            }
            match create() {
                Ok(temp_file) => upload.temp_file = Some(temp_file),
                Err(error) => {
                    self.table().open.remove(&piece.id);
                    return Err(error);
                }
            }
        }
        let Some(temp_file) = &upload.temp_file else {
            return Err(BoxError::internal("upload: no temporary file"));
        };
        let written = write_at(&temp_file.file, data, piece.offset).with_path(path);
        let stat = match written.and_then(|()| rustix::fs::fstat(&temp_file.file).with_path(path)) {
            Ok(stat) => stat,
            Err(error) => {
                // The upload cannot continue, so its disk space is freed.
                upload.temp_file = None;
                self.table().open.remove(&piece.id);
                return Err(error);
            }
        };
        upload.bytes = upload.bytes.max(end);
        upload.used = Instant::now();
        open.bytes.store(upload.bytes, Ordering::Release);
        self.growth.notify_waiters();
        if !piece.done {
            return Ok(PieceResult::Partial(stat));
        }
        let temp_file = upload.temp_file.take();
        drop(upload);
        self.table().open.remove(&piece.id);
        let temp_file = temp_file.ok_or_else(|| BoxError::internal("upload: no temporary file"))?;
        // Bytes that an earlier attempt sent beyond the end are removed.
        rustix::fs::ftruncate(&temp_file.file, end).with_path(path)?;
        Ok(PieceResult::Complete(temp_file))
    }

    /// Bytes of all other uploads.
    fn bytes_of_others(&self, id: &UploadId) -> u64 {
        let table = self.table();
        let others = table.open.iter().filter(|(other, _)| *other != id);
        others
            .map(|(_, open)| open.bytes.load(Ordering::Acquire))
            .fold(0, u64::saturating_add)
    }

    /// The upload of a piece, or its result if it is finished.
    fn find(
        &self,
        path: &str,
        piece: &UploadPiece,
    ) -> Result<Result<OpenUpload, Outcome>, BoxError> {
        self.sweep();
        let mut table = self.table();
        if let Some(open) = table.open.get(&piece.id) {
            return Ok(Ok(open.clone()));
        }
        let ended = table
            .ended
            .iter()
            .find(|(id, of, _)| *id == piece.id && of == path);
        if let Some((_, _, outcome)) = ended.filter(|_| piece.done) {
            return Ok(Err(outcome.clone()));
        }
        if piece.offset != 0 {
            return Err(BoxError::conflict("upload: not started; start at offset 0"));
        }
        if table.open.len() >= UPLOADS_MAX {
            return Err(BoxError::limit(
                Code::Capacity,
                "the number of open uploads",
                "uploads",
                UPLOADS_MAX,
            ));
        }
        let upload = Upload {
            path: path.to_owned(),
            temp_file: None,
            bytes: 0,
            used: Instant::now(),
        };
        let open = OpenUpload {
            upload: Arc::new(Mutex::new(upload)),
            bytes: Arc::default(),
        };
        table.open.insert(piece.id.clone(), open.clone());
        Ok(Ok(open))
    }

    /// Remembers the result of an upload.
    pub(super) fn record_outcome(&self, piece: &UploadPiece, path: String, outcome: Outcome) {
        let mut table = self.table();
        table.ended.push_back((piece.id.clone(), path, outcome));
        if table.ended.len() > FINISHED_MAX {
            table.ended.pop_front();
        }
    }

    /// Removes abandoned uploads, and returns whether others remain.
    pub(super) fn sweep(&self) -> bool {
        self.sweep_older(IDLE_LIMIT)
    }

    fn sweep_older(&self, age: Duration) -> bool {
        let abandoned = |open: &OpenUpload| {
            // An upload in use is not abandoned.
            let upload = open.upload.try_lock();
            upload.is_ok_and(|upload| upload.used.elapsed() > age)
        };
        let mut table = self.table();
        let removed: Vec<_> = table.open.extract_if(|_, open| abandoned(open)).collect();
        let any = !table.open.is_empty();
        drop(table);
        // Removes the files while no lock is held.
        drop(removed);
        any
    }
}

#[cfg(test)]
mod tests {
    use box_sys::Guest;
    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[test]
    fn uploads_are_bounded_and_abandoned_ones_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let fd = rustix::fs::open(root.path(), OFlags::PATH, Mode::empty()).unwrap();
        let guest_root = GuestRoot::new(fd, Guest::default());
        let add = |number: usize, offset| {
            let id = UploadId::new(format!("u{number}")).unwrap();
            let (done, abort) = (false, false);
            let piece = UploadPiece {
                id,
                offset,
                done,
                abort,
            };
            let create = || TempFile::new(guest_root.location("/f")?, "/f");
            guest_root
                .uploads
                .add_piece(&guest_root, "/f", &piece, b"x", create)
        };
        for number in 0..UPLOADS_MAX {
            assert!(add(number, 0).is_ok());
        }
        assert_eq!(add(UPLOADS_MAX, 0).err().unwrap().code(), Code::Capacity);
        let open = || guest_root.uploads.table().open.len();
        assert_eq!(open(), UPLOADS_MAX);
        let names = std::fs::read_dir(root.path()).unwrap().count();
        assert_eq!(names, 0, "an incomplete file has no name");
        assert!(guest_root.uploads.sweep(), "none is abandoned yet");
        let aborted = UploadPiece {
            id: UploadId::new("u0").unwrap(),
            offset: 0,
            done: false,
            abort: true,
        };
        let create = || unreachable!("an abort creates nothing");
        let result = guest_root
            .uploads
            .add_piece(&guest_root, "/f", &aborted, b"", create);
        assert_eq!(result.err().unwrap().code(), Code::Cancelled);
        assert_eq!(open(), UPLOADS_MAX - 1);
        assert!(!guest_root.uploads.sweep_older(Duration::ZERO));
        assert_eq!(open(), 0);
        assert_eq!(add(0, 1).err().unwrap().code(), Code::Conflict);
        assert!(add(UPLOADS_MAX, 0).is_ok());
    }
}
