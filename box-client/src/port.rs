//! Byte streams to ports inside a box.

use std::fmt;
use std::io;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use box_protocol::actions::{PortChunk, PortOpen, PortOpenParams, PortSend, PortSendParams};
use box_protocol::{BoxId, ConnId, MAX_CHUNK_BYTES};
use box_rpc::{CallError, Chunks, Peer};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::ClientError;
use crate::unread;

/// A connection to a port inside a box.
///
/// `shutdown` closes the write side only; dropping the stream closes both. The stream ends with the
/// connection to the server.
pub struct PortStream {
    peer: Peer,
    box_id: BoxId,
    conn_id: ConnId,
    chunks: Chunks<PortOpen>,
    unread: Bytes,
    sending: Option<BoxFuture<'static, Result<(), CallError>>>,
    closed: bool,
}

impl fmt::Debug for PortStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortStream")
            .field("box_id", &self.box_id)
            .field("conn_id", &self.conn_id)
            .finish_non_exhaustive()
    }
}

impl PortStream {
    pub(crate) async fn open(
        peer: Peer,
        box_id: BoxId,
        port: NonZeroU16,
    ) -> Result<Self, ClientError> {
        let params = PortOpenParams {
            box_id: box_id.clone(),
            port,
        };
        let mut chunks = peer.stream::<PortOpen>(&params).await?;
        let conn_id = match chunks.next().await {
            Some(Ok(PortChunk::ConnId(id))) => id,
            Some(Ok(PortChunk::Data(_))) => return Err(missing_id()),
            Some(Err(error)) => return Err(error.into()),
            None => {
                chunks.finish().await?;
                return Err(missing_id());
            }
        };
        Ok(Self {
            peer,
            box_id,
            conn_id,
            chunks,
            unread: Bytes::new(),
            sending: None,
            closed: false,
        })
    }

    fn send(&mut self, data: Option<Bytes>, close: bool) {
        let peer = self.peer.clone();
        let params = PortSendParams {
            box_id: self.box_id.clone(),
            conn_id: self.conn_id.clone(),
            data: data.map(Into::into),
            close,
        };
        self.sending = Some(Box::pin(async move {
            peer.call::<PortSend>(&params).await.map(drop)
        }));
    }

    /// Waits until the agent has written the sent bytes.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(sending) = &mut self.sending {
            let sent = ready!(sending.as_mut().poll(cx));
            self.sending = None;
            sent.map_err(|error| io::Error::from(ClientError::from(error)))?;
        }
        Poll::Ready(Ok(()))
    }
}

fn missing_id() -> ClientError {
    CallError::Shape("expected the connection id as the first chunk".to_owned()).into()
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let bytes = |chunk| match chunk {
            PortChunk::Data(data) => data.0,
            PortChunk::ConnId(_) => Bytes::new(),
        };
        let Self { chunks, unread, .. } = &mut *self;
        unread::poll_read(chunks, unread, bytes, cx, into)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_sent(cx))?;
        if self.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = data.len().min(MAX_CHUNK_BYTES);
        if count > 0 {
            self.send(Some(Bytes::copy_from_slice(&data[..count])), false);
            // The first poll sends the request.
            if let Poll::Ready(Err(error)) = self.poll_sent(cx) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_sent(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_sent(cx))?;
        if !self.closed {
            self.closed = true;
            self.send(None, true);
        }
        self.poll_sent(cx)
    }
}
