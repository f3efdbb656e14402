//! Chunks of bytes as an `AsyncRead`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use box_rpc::{Action, Chunks};
use bytes::{Buf as _, Bytes};
use futures::Stream as _;
use tokio::io::ReadBuf;

use crate::error::ClientError;

/// Fills a buffer from `unread`, and `unread` from the next chunk with bytes.
///
/// `bytes` returns the bytes of a chunk, empty for a chunk without any.
pub(crate) fn poll_read<A: Action>(
    chunks: &mut Chunks<A>,
    unread: &mut Bytes,
    bytes: impl Fn(A::Chunk) -> Bytes,
    cx: &mut Context<'_>,
    into: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    while unread.is_empty() {
        match ready!(Pin::new(&mut *chunks).poll_next(cx)) {
            Some(Ok(chunk)) => *unread = bytes(chunk),
            Some(Err(error)) => return Poll::Ready(Err(ClientError::from(error).into())),
            None => return Poll::Ready(Ok(())),
        }
    }
    let count = unread.len().min(into.remaining());
    into.put_slice(&unread[..count]);
    unread.advance(count);
    Poll::Ready(Ok(()))
}
