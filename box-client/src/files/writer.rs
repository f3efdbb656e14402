//! Streaming writes of a file.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use box_protocol::UploadId;
use box_protocol::actions::{FileStatInfo, FileWrite, FileWriteParams, UploadPiece};
use futures::future::BoxFuture;
use tokio::io::AsyncWrite;

use super::{Files, PIECE_BYTES};
use crate::error::ClientError;

/// Writes a file in pieces.
///
/// The complete file appears with [`finish`](Self::finish) or `shutdown`. Dropping the writer before
/// leaves an existing file unchanged; see also [`discard`](Self::discard).
pub struct FileWriter {
    files: Files,
    params: FileWriteParams,
    id: UploadId,
    offset: u64,
    piece: Vec<u8>,
    sending: Option<BoxFuture<'static, Result<FileStatInfo, ClientError>>>,
    last_sent: bool,
    written: Option<FileStatInfo>,
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter")
            .field("path", &self.params.path)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl FileWriter {
    pub(super) fn new(files: Files, params: FileWriteParams) -> Self {
        Self {
            files,
            params,
            id: UploadId::fresh(),
            offset: 0,
            piece: Vec::new(),
            sending: None,
            last_sent: false,
            written: None,
        }
    }

    /// Sets the permission bits, also those of an existing file.
    pub fn mode(mut self, mode: u32) -> Self {
        self.params.mode = Some(mode);
        self
    }

    /// Writes the rest and makes the file appear.
    pub async fn finish(mut self) -> Result<FileStatInfo, ClientError> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    /// Cancels the upload and frees its space in the box.
    ///
    /// The agent discards the upload of a dropped writer after ten minutes.
    pub async fn discard(mut self) {
        // A piece in flight would start the upload again, therefore wait for it.
        let _ = std::future::poll_fn(|cx| self.poll_sent(cx)).await;
        if self.last_sent || self.offset == 0 {
            return;
        }
        let mut params = self.params.clone();
        params.upload = Some(UploadPiece {
            id: self.id.clone(),
            offset: 0,
            done: false,
            abort: true,
        });
        let _ = self.files.call::<FileWrite>(&params).await;
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<FileStatInfo, ClientError>> {
        ready!(self.poll_sent(cx))?;
        if !self.last_sent {
            self.last_sent = true;
            self.send(true);
            ready!(self.poll_sent(cx))?;
        }
        let incomplete =
            || ClientError::from(box_protocol::BoxError::conflict("the file was not written"));
        Poll::Ready(self.written.clone().ok_or_else(incomplete))
    }

    fn send(&mut self, done: bool) {
        let data = std::mem::take(&mut self.piece);
        let size = data.len() as u64;
        let mut params = self.params.clone();
        params.data = data.into();
        params.upload = Some(UploadPiece {
            id: self.id.clone(),
            offset: self.offset,
            done,
            abort: false,
        });
        self.offset += size;
        let files = self.files.clone();
        self.sending = Some(Box::pin(
            async move { files.call::<FileWrite>(&params).await },
        ));
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        if let Some(sending) = &mut self.sending {
            let sent = ready!(sending.as_mut().poll(cx));
            self.sending = None;
            let written = sent?;
            self.written = self.last_sent.then_some(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for FileWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.last_sent {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if self.piece.len() >= PIECE_BYTES {
            ready!(self.poll_sent(cx))?;
            self.send(false);
        }
        let count = data.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&data[..count]);
        Poll::Ready(Ok(count))
    }

    /// Waits for the sent pieces. An incomplete piece stays in the buffer.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_sent(cx).map_err(io::Error::from)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_finish(cx).map_ok(drop).map_err(io::Error::from)
    }
}
