//! A file that is written as its bytes come, and appears at the end.

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

/// A file that is written as its bytes come. It appears, whole, with [`finish`](Self::finish) or
/// `shutdown`; dropped before, it leaves what was there as it was. See [`discard`](Self::discard).
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

    /// Gives the file this mode, also if it was there with another.
    pub fn mode(mut self, mode: u32) -> Self {
        self.params.mode = Some(mode);
        self
    }

    /// Writes the rest, and has the file appear.
    pub async fn finish(mut self) -> Result<FileStatInfo, ClientError> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    /// Gives up what was written, so that it takes no room in the box. One that is only dropped is given up by the box
    /// after ten minutes.
    pub async fn discard(mut self) {
        // A piece on its way is waited for: it would begin the upload anew.
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
        let cut = || ClientError::from(box_protocol::BoxError::conflict("it was not written"));
        Poll::Ready(self.written.clone().ok_or_else(cut))
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

    /// Waits for the pieces that are full. What is not yet one stays here.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_sent(cx).map_err(io::Error::from)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_finish(cx).map_ok(drop).map_err(io::Error::from)
    }
}
