//! Uploads in pieces. A piece may come again; an upload that nobody goes on with is removed after a while.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::actions::{FileStatInfo, FileTreeResult, UploadPiece};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, UploadId};
use rustix::fs::Stat;
use tokio::sync::Notify;

use super::draft::{Draft, write_at};
use super::error::About;
use super::ground::Ground;

/// Uploads at once.
const UPLOADS: usize = 32;

/// How long one may stand still.
pub(super) const ABANDONED: Duration = Duration::from_mins(10);

/// How long a piece waits for those before it.
const OVERTAKEN: Duration = Duration::from_millis(250);

/// Ended ones whose last piece may come again.
const REMEMBERED: usize = 64;

/// The uploads of a box.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    table: Mutex<Table>,
    /// One of them has more than before.
    grown: Notify,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<UploadId, Open>,
    ended: VecDeque<(UploadId, String, Outcome)>,
}

#[derive(Debug, Clone)]
struct Open {
    upload: Arc<Mutex<Upload>>,
    /// As many bytes as the upload has, to be read while somebody writes.
    bytes: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Upload {
    path: String,
    /// None before the first piece is there, and once the last is.
    draft: Option<Draft>,
    bytes: u64,
    used: Instant,
}

/// What came of an upload.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    Written(FileStatInfo),
    Unpacked(FileTreeResult),
}

/// What a piece was.
pub(super) enum Piece {
    /// There are more to come; this is what is there.
    More(Stat),
    /// The last: all is there.
    Last(Draft),
    /// The last once more.
    Again(Outcome),
}

impl Uploads {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once what comes before a piece is there. Pieces may be sent without waiting for the answers of those before,
    /// and then one can overtake another; a piece that nothing leads up to has to wait for a moment only.
    pub(super) async fn lead_up_to(&self, piece: &UploadPiece) {
        let over = tokio::time::sleep(OVERTAKEN);
        let mut over = std::pin::pin!(over);
        loop {
            let mut grown = std::pin::pin!(self.grown.notified());
            grown.as_mut().enable();
            let there = {
                let table = self.table();
                let open = table.open.get(&piece.id);
                let ended = table.ended.iter().any(|(id, ..)| *id == piece.id);
                open.map_or(if ended { u64::MAX } else { 0 }, |open| {
                    open.bytes.load(Ordering::Acquire)
                })
            };
            if piece.offset <= there {
                return;
            }
            tokio::select! {
                () = grown => {}
                () = &mut over => return,
            }
        }
    }

    /// Takes a piece. `begin` makes the draft for the first.
    pub(super) fn take(
        &self,
        ground: &Ground,
        path: &str,
        piece: &UploadPiece,
        data: &[u8],
        begin: impl FnOnce() -> Result<Draft, BoxError>,
    ) -> Result<Piece, BoxError> {
        if piece.abort {
            let given_up = self.table().open.remove(&piece.id);
            // Here its file is removed, with nothing locked.
            drop(given_up);
            return Err(BoxError::cancelled("upload: given up"));
        }
        let end = piece.offset.saturating_add(data.len() as u64);
        // What has no name yet takes room as well, all of it together.
        ground.room(end.saturating_add(self.others(&piece.id)))?;
        let open = match self.find(path, piece)? {
            Ok(open) => open,
            Err(outcome) => return Ok(Piece::Again(outcome)),
        };
        let mut upload = open.upload.lock().unwrap_or_else(PoisonError::into_inner);
        if upload.path != path {
            return Err(BoxError::validation("upload: begun for another path"));
        }
        if piece.offset > upload.bytes {
            return Err(BoxError::conflict(format!(
                "upload: there are {} bytes, and the piece begins after them",
                upload.bytes
            ))
            .with_detail(&Detail {
                field: Some("upload.offset".to_owned()),
                existing: Some(upload.bytes.to_string()),
                asked: Some(piece.offset.to_string()),
                ..Detail::default()
            }));
        }
        if upload.draft.is_none() {
            if upload.bytes > 0 {
                return Err(BoxError::conflict("upload: its last piece is there"));
            }
            match begin() {
                Ok(draft) => upload.draft = Some(draft),
                Err(error) => {
                    self.table().open.remove(&piece.id);
                    return Err(error);
                }
            }
        }
        let Some(draft) = &upload.draft else {
            return Err(BoxError::internal("upload: no draft"));
        };
        let written = write_at(&draft.file, data, piece.offset).about(path);
        let stat = match written.and_then(|()| rustix::fs::fstat(&draft.file).about(path)) {
            Ok(stat) => stat,
            Err(error) => {
                // Nobody can go on with it, and the room it takes is missed.
                upload.draft = None;
                self.table().open.remove(&piece.id);
                return Err(error);
            }
        };
        upload.bytes = upload.bytes.max(end);
        upload.used = Instant::now();
        open.bytes.store(upload.bytes, Ordering::Release);
        self.grown.notify_waiters();
        if !piece.done {
            return Ok(Piece::More(stat));
        }
        let draft = upload.draft.take();
        drop(upload);
        self.table().open.remove(&piece.id);
        let draft = draft.ok_or_else(|| BoxError::internal("upload: no draft"))?;
        // What an earlier try sent beyond the end does not belong to it.
        rustix::fs::ftruncate(&draft.file, end).about(path)?;
        Ok(Piece::Last(draft))
    }

    /// Bytes of all uploads but this.
    fn others(&self, id: &UploadId) -> u64 {
        let table = self.table();
        let others = table.open.iter().filter(|(other, _)| *other != id);
        others
            .map(|(_, open)| open.bytes.load(Ordering::Acquire))
            .fold(0, u64::saturating_add)
    }

    /// The upload of a piece, or what came of it.
    fn find(&self, path: &str, piece: &UploadPiece) -> Result<Result<Open, Outcome>, BoxError> {
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
            return Err(BoxError::conflict("upload: not begun; begin at offset 0"));
        }
        if table.open.len() >= UPLOADS {
            return Err(BoxError::limit(
                Code::Capacity,
                "uploads at once",
                "uploads",
                UPLOADS,
            ));
        }
        let upload = Upload {
            path: path.to_owned(),
            draft: None,
            bytes: 0,
            used: Instant::now(),
        };
        let open = Open {
            upload: Arc::new(Mutex::new(upload)),
            bytes: Arc::default(),
        };
        table.open.insert(piece.id.clone(), open.clone());
        Ok(Ok(open))
    }

    /// Remembers what came of an upload.
    pub(super) fn finished(&self, piece: &UploadPiece, path: String, outcome: Outcome) {
        let mut table = self.table();
        table.ended.push_back((piece.id.clone(), path, outcome));
        if table.ended.len() > REMEMBERED {
            table.ended.pop_front();
        }
    }

    /// Removes what nobody goes on with. Whether any upload is left.
    pub(super) fn sweep(&self) -> bool {
        self.sweep_older(ABANDONED)
    }

    fn sweep_older(&self, age: Duration) -> bool {
        let abandoned = |open: &Open| {
            // One that is in use is not abandoned.
            let upload = open.upload.try_lock();
            upload.is_ok_and(|upload| upload.used.elapsed() > age)
        };
        let mut table = self.table();
        let removed: Vec<_> = table.open.extract_if(|_, open| abandoned(open)).collect();
        let any = !table.open.is_empty();
        drop(table);
        // Here their files are removed, with nothing locked.
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
        let ground = Ground::new(fd, Guest::default());
        let take = |number: usize, offset| {
            let id = UploadId::new(format!("u{number}")).unwrap();
            let (done, abort) = (false, false);
            let piece = UploadPiece {
                id,
                offset,
                done,
                abort,
            };
            let begin = || Draft::new(ground.spot("/f")?, "/f");
            ground.uploads.take(&ground, "/f", &piece, b"x", begin)
        };
        for number in 0..UPLOADS {
            assert!(take(number, 0).is_ok());
        }
        assert_eq!(take(UPLOADS, 0).err().unwrap().code(), Code::Capacity);
        let open = || ground.uploads.table().open.len();
        assert_eq!(open(), UPLOADS);
        let names = std::fs::read_dir(root.path()).unwrap().count();
        assert_eq!(names, 0, "what is not whole has no name");
        assert!(ground.uploads.sweep(), "none is abandoned yet");
        let given_up = UploadPiece {
            id: UploadId::new("u0").unwrap(),
            offset: 0,
            done: false,
            abort: true,
        };
        let begin = || unreachable!("nothing is begun");
        let told = ground.uploads.take(&ground, "/f", &given_up, b"", begin);
        assert_eq!(told.err().unwrap().code(), Code::Cancelled);
        assert_eq!(open(), UPLOADS - 1);
        assert!(!ground.uploads.sweep_older(Duration::ZERO));
        assert_eq!(open(), 0);
        assert_eq!(take(0, 1).err().unwrap().code(), Code::Conflict);
        assert!(take(UPLOADS, 0).is_ok());
    }
}
