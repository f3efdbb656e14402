//! Imports and exports: archives in pieces.
//!
//! An import runs on a thread that reads the pieces as they arrive, so that the server stores an
//! archive once. An upload without a piece for ten minutes is cancelled, and earlier if another needs
//! its place.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use box_image::{ExportOptions, Image, ImportOptions, Reference};
use box_protocol::actions::{FileChunk, ImageExportResult, ImageImportParams, UploadPiece};
use box_protocol::error::{Detail, Subject};
use box_protocol::{Blob, BoxError, Code, Invalid, MAX_CHUNK_BYTES, UploadId};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::archiver::archiver;
use super::{Images, Inner, failed, lock};

/// Maximum number of uploads at the same time. Beyond: `capacity`.
const UPLOADS: usize = 8;

/// Time without a piece after which an upload is cancelled.
const IDLE: Duration = Duration::from_mins(10);

/// Time without a piece after which an upload leaves its place to another.
///
/// The client of such an upload has probably died.
const ABANDONED: Duration = Duration::from_secs(30);

/// Pieces that wait for the thread of an import.
const WAITING_PIECES: usize = 2;

/// The uploads in progress, and those that ended recently.
#[derive(Default)]
pub(super) struct Uploads(Mutex<HashMap<UploadId, Arc<Upload>>>);

struct Upload {
    state: tokio::sync::Mutex<UploadState>,
    touched: Mutex<Instant>,
    outcome: watch::Receiver<Option<Result<Image, BoxError>>>,
}

struct UploadState {
    received: u64,
    /// `None` after the last piece.
    pieces: Option<mpsc::Sender<Piece>>,
}

enum Piece {
    Data(Blob),
    End,
}

impl Inner {
    /// Takes a piece of an archive; returns the image after the last one.
    pub(super) async fn import_piece(
        self: &Arc<Self>,
        params: ImageImportParams,
    ) -> Result<Option<Image>, BoxError> {
        let ImageImportParams {
            name,
            select,
            data,
            upload: piece,
        } = params;
        if piece.abort {
            lock(&self.uploads.0).remove(&piece.id);
            return Err(BoxError::cancelled("upload: the client has cancelled it"));
        }
        let upload = match self.upload(&piece) {
            Some(upload) => upload,
            None if piece.offset == 0 => {
                let name: Reference = name.parse().map_err(failed)?;
                let options = ImportOptions {
                    name: Some(name),
                    select,
                    ..ImportOptions::default()
                };
                self.begin(piece.id.clone(), options)?
            }
            None => {
                let message = "upload: unknown or expired; begin again at offset 0";
                return Err(BoxError::not_found(message)
                    .with_detail(&Detail::of_field("upload").of(Subject::Image)));
            }
        };
        upload.take(data, &piece).await
    }

    fn upload(&self, piece: &UploadPiece) -> Option<Arc<Upload>> {
        lock(&self.uploads.0).get(&piece.id).cloned()
    }

    /// Starts the thread of an import.
    fn begin(
        self: &Arc<Self>,
        id: UploadId,
        options: ImportOptions,
    ) -> Result<Arc<Upload>, BoxError> {
        let (pieces, waiting) = mpsc::channel(WAITING_PIECES);
        let (report, outcome) = watch::channel(None);
        let upload = Arc::new(Upload {
            state: tokio::sync::Mutex::new(UploadState {
                received: 0,
                pieces: Some(pieces),
            }),
            touched: Mutex::new(Instant::now()),
            outcome,
        });
        {
            let mut uploads = lock(&self.uploads.0);
            if !make_room(&mut uploads) {
                let what = "the number of imports at the same time";
                return Err(BoxError::limit(
                    Code::Capacity,
                    what,
                    "image_uploads",
                    UPLOADS,
                ));
            }
            uploads.insert(id.clone(), Arc::clone(&upload));
        }
        let inner = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let stream = Pieces {
                waiting,
                current: Blob::default(),
                ended: false,
            };
            let imported = inner.store().and_then(|store| {
                let imported = store.import_stream(stream, &options);
                imported.map_err(failed)
            });
            let _ = report.send(Some(imported));
        });
        tokio::spawn(expire(Arc::clone(self), id, Arc::downgrade(&upload)));
        Ok(upload)
    }
}

/// Ends uploads if there are too many: those that are complete, else the idlest.
///
/// Returns whether another can begin.
fn make_room(uploads: &mut HashMap<UploadId, Arc<Upload>>) -> bool {
    if uploads.len() >= UPLOADS {
        uploads.retain(|_, upload| upload.outcome.borrow().is_none());
    }
    if uploads.len() < UPLOADS {
        return true;
    }
    let idle = uploads.iter();
    let idle = idle.filter_map(|(id, upload)| Some((upload.idle_since()?, id.clone())));
    let idlest = idle.min_by_key(|(since, _)| *since);
    let abandoned = idlest.filter(|(since, _)| since.elapsed() >= ABANDONED);
    abandoned.is_some_and(|(_, id)| uploads.remove(&id).is_some())
}

/// Forgets an upload that has no piece for a while.
async fn expire(inner: Arc<Inner>, id: UploadId, upload: std::sync::Weak<Upload>) {
    loop {
        let Some(idle_at) = upload.upgrade().map(|upload| *lock(&upload.touched) + IDLE) else {
            return;
        };
        if idle_at <= Instant::now() {
            break;
        }
        tokio::time::sleep_until(idle_at).await;
    }
    lock(&inner.uploads.0).remove(&id);
}

impl Upload {
    /// When the last piece arrived, if the import waits for the next one.
    fn idle_since(&self) -> Option<Instant> {
        // A call keeps the state while it waits.
        let state = self.state.try_lock().ok()?;
        state.pieces.is_some().then(|| *lock(&self.touched))
    }

    async fn take(&self, data: Blob, piece: &UploadPiece) -> Result<Option<Image>, BoxError> {
        let mut state = self.state.lock().await;
        *lock(&self.touched) = Instant::now();
        let (offset, end) = (piece.offset, piece.offset.checked_add(data.len() as u64));
        let Some(end) = end else {
            return Err(Invalid::new("upload", "the offset is too large").into());
        };
        if offset > state.received {
            let message = format!(
                "upload: the piece begins at {offset}, but the server has {} bytes; send the pieces in order",
                state.received
            );
            return Err(BoxError::conflict(message)
                .with_detail(&Detail::of_field("upload").of(Subject::Image)));
        }
        if let Some(pieces) = &state.pieces {
            // A client may repeat a piece.
            let known = usize::try_from(state.received - offset).unwrap_or(usize::MAX);
            if known < data.len() {
                let new = Blob(data.0.slice(known..));
                if pieces.send(Piece::Data(new)).await.is_err() {
                    return self.outcome().await.map(Some);
                }
                state.received = end;
            }
            if piece.done
                && let Some(pieces) = &state.pieces
            {
                // A call that is cancelled here can be repeated.
                let _ = pieces.send(Piece::End).await;
                state.pieces = None;
            }
        }
        if state.pieces.is_some() {
            // The import may have taken long.
            *lock(&self.touched) = Instant::now();
            return Ok(None);
        }
        drop(state);
        self.outcome().await.map(Some)
    }

    /// Waits for the end of the import.
    async fn outcome(&self) -> Result<Image, BoxError> {
        let mut outcome = self.outcome.clone();
        let ended = outcome.wait_for(Option::is_some).await;
        let ended = ended.ok().and_then(|ended| ended.clone());
        ended.unwrap_or_else(|| Err(BoxError::internal("image: the import failed")))
    }
}

/// The pieces of an archive as a stream.
struct Pieces {
    waiting: mpsc::Receiver<Piece>,
    current: Blob,
    ended: bool,
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.waiting.blocking_recv() {
                Some(Piece::Data(data)) => self.current = data,
                Some(Piece::End) => self.ended = true,
                None => return Err(box_image::Error::Cancelled.into()),
            }
        }
        let length = into.len().min(self.current.len());
        into[..length].copy_from_slice(&self.current.0.split_to(length));
        Ok(length)
    }
}

impl Inner {
    /// Sends an archive of an image.
    pub(super) async fn export(
        self: &Arc<Self>,
        image: String,
        chunks: mpsc::Sender<FileChunk>,
    ) -> Result<ImageExportResult, BoxError> {
        let exporting = self.with_store(move |_, store| {
            let names = store.get(&image).map_err(failed)?.names;
            let name = image.parse::<Reference>().ok();
            let options = ExportOptions {
                name: name.filter(|name| names.contains(&name.to_string())),
                changes: None,
                archiver: archiver(),
            };
            let mut to = ChunkWriter::new(chunks);
            let digest = store.export(&image, &mut to, &options).map_err(failed)?;
            to.flush().map_err(|_| left())?;
            Ok(ImageExportResult {
                digest: digest.to_string(),
                bytes: to.offset,
            })
        });
        exporting.await
    }
}

impl Images {
    /// Sends an archive of the changes of a box, with its image if it has one. Returns the digest
    /// of the manifest, and the size.
    pub(crate) async fn export_changes(
        &self,
        image: Option<String>,
        changes: Option<PathBuf>,
        chunks: mpsc::Sender<FileChunk>,
    ) -> Result<(Option<String>, u64), BoxError> {
        let mut to = ChunkWriter::new(chunks);
        let Some(image) = image else {
            let writing = tokio::task::spawn_blocking(move || {
                if let Some(changes) = changes {
                    let archiver = archiver();
                    box_image::write_changes(&changes, archiver.as_deref(), &mut to)
                        .map_err(failed)?;
                }
                to.flush().map_err(|_| left())?;
                Ok((None, to.offset))
            });
            let written = writing.await;
            return written.unwrap_or_else(|_| Err(BoxError::internal("snapshot task failed")));
        };
        let exporting = self.inner()?.with_store(move |_, store| {
            let options = ExportOptions {
                name: None,
                changes,
                archiver: archiver(),
            };
            let digest = store.export(&image, &mut to, &options).map_err(failed)?;
            to.flush().map_err(|_| left())?;
            Ok((Some(digest.to_string()), to.offset))
        });
        exporting.await
    }
}

/// Sends what is written as chunks.
struct ChunkWriter {
    chunks: mpsc::Sender<FileChunk>,
    buffer: Vec<u8>,
    offset: u64,
}

impl ChunkWriter {
    fn new(chunks: mpsc::Sender<FileChunk>) -> Self {
        Self {
            chunks,
            buffer: Vec::with_capacity(MAX_CHUNK_BYTES),
            offset: 0,
        }
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.buffer.len() >= MAX_CHUNK_BYTES {
            self.flush()?;
        }
        let length = data.len().min(MAX_CHUNK_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&data[..length]);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let data = std::mem::replace(&mut self.buffer, Vec::with_capacity(MAX_CHUNK_BYTES));
        let (offset, length) = (self.offset, data.len() as u64);
        let data = Blob::from(data);
        let sent = self.chunks.blocking_send(FileChunk { offset, data });
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        self.offset += length;
        Ok(())
    }
}

fn left() -> BoxError {
    BoxError::cancelled("the client has disconnected")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(pieces: Option<mpsc::Sender<Piece>>) -> (Arc<Upload>, Report) {
        let (report, outcome) = watch::channel(None);
        let state = UploadState {
            received: 0,
            pieces,
        };
        let upload = Upload {
            state: tokio::sync::Mutex::new(state),
            touched: Mutex::new(Instant::now()),
            outcome,
        };
        (Arc::new(upload), report)
    }

    type Report = watch::Sender<Option<Result<Image, BoxError>>>;

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_upload_leaves_its_place_to_another() {
        let (pieces, mut waiting) = mpsc::channel(WAITING_PIECES);
        let mut uploads = HashMap::new();
        let mut reports = Vec::new();
        for number in 0..UPLOADS {
            // The import of the first has all pieces.
            let pieces = (number > 0).then(|| pieces.clone());
            let (upload, report) = upload(pieces);
            uploads.insert(UploadId::fresh(), upload);
            reports.push(report);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        drop(pieces);
        let idle = uploads
            .values()
            .filter(|upload| upload.idle_since().is_some());
        let busy = idle.min_by_key(|upload| upload.idle_since()).unwrap();
        let busy = Arc::clone(busy);
        let call = busy.state.lock().await;
        tokio::time::advance(ABANDONED.saturating_sub(Duration::from_secs(7))).await;
        assert!(
            !make_room(&mut uploads),
            "the others had a piece within 30 s"
        );
        assert_eq!(uploads.len(), UPLOADS);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(make_room(&mut uploads));
        assert_eq!(uploads.len(), UPLOADS - 1);
        drop(call);
        let kept = uploads.values().any(|upload| Arc::ptr_eq(upload, &busy));
        assert!(kept, "a call of it was waiting");
        // The import of an upload that was removed ends.
        drop(busy);
        uploads.clear();
        assert!(waiting.recv().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_piece_can_be_repeated_after_a_cancelled_call() {
        let (pieces, mut waiting) = mpsc::channel(WAITING_PIECES);
        let (report, outcome) = watch::channel(None);
        for _ in 0..WAITING_PIECES {
            assert!(pieces.try_send(Piece::Data(Blob::default())).is_ok());
        }
        let upload = Upload {
            state: tokio::sync::Mutex::new(UploadState {
                received: 0,
                pieces: Some(pieces),
            }),
            touched: Mutex::new(Instant::now()),
            outcome,
        };
        let last: UploadPiece =
            serde_json::from_value(serde_json::json!({"id": "u", "offset": 0, "done": true}))
                .unwrap();
        // The import reads nothing, so the call waits until its caller gives up.
        let call = upload.take(Blob::default(), &last);
        let cancelled = tokio::time::timeout(Duration::from_secs(1), call).await;
        assert!(cancelled.is_err());
        for _ in 0..WAITING_PIECES {
            assert!(matches!(waiting.recv().await, Some(Piece::Data(_))));
        }
        let _ = report.send(Some(Err(BoxError::internal("of the import"))));
        let repeated = upload.take(Blob::default(), &last).await.unwrap_err();
        assert_eq!(repeated.message(), "of the import");
        assert!(matches!(waiting.recv().await, Some(Piece::End)));
        assert!(waiting.recv().await.is_none(), "once");
    }
}
