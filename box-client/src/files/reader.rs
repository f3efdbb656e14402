//! Streaming reads of a file or archive.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use box_protocol::actions::{FileChunk, FileRead};
use box_rpc::{Action, Chunks};
use bytes::{Buf as _, Bytes};
use futures::Stream as _;
use tokio::io::{AsyncRead, ReadBuf};

use crate::error::ClientError;

/// Reads the bytes of a file or archive.
///
/// A slow reader does not block the box.
#[derive(Debug)]
pub struct FileReader<A: Action = FileRead> {
    chunks: Chunks<A>,
    unread: Bytes,
}

impl<A: Action<Chunk = FileChunk>> FileReader<A> {
    pub(super) fn new(chunks: Chunks<A>) -> Self {
        Self {
            chunks,
            unread: Bytes::new(),
        }
    }
}

impl<A: Action<Chunk = FileChunk>> AsyncRead for FileReader<A> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.unread.is_empty() {
            match ready!(Pin::new(&mut this.chunks).poll_next(cx)) {
                Some(Ok(FileChunk { data, .. })) => this.unread = data.0,
                Some(Err(error)) => return Poll::Ready(Err(ClientError::from(error).into())),
                None => return Poll::Ready(Ok(())),
            }
        }
        let count = this.unread.len().min(into.remaining());
        into.put_slice(&this.unread[..count]);
        this.unread.advance(count);
        Poll::Ready(Ok(()))
    }
}
