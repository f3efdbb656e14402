//! Streaming reads of a file or archive.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use box_protocol::actions::{FileChunk, FileRead};
use box_rpc::{Action, Chunks};
use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

use crate::unread;

/// Reads the bytes of a file or archive.
///
/// A slow reader does not block the box.
#[derive(Debug)]
pub struct FileReader<A: Action = FileRead> {
    chunks: Chunks<A>,
    unread: Bytes,
}

impl<A: Action<Chunk = FileChunk>> FileReader<A> {
    pub(crate) fn new(chunks: Chunks<A>) -> Self {
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
        let Self { chunks, unread } = &mut *self;
        unread::poll_read(chunks, unread, |chunk| chunk.data.0, cx, into)
    }
}
