//! A byte stream to a port of a box, over the runtime's own calls.

use std::io;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use box_protocol::actions::{PortChunk, PortOpen, PortOpenParams, PortOpenResult};
use box_protocol::actions::{PortSend, PortSendParams};
use box_protocol::{BoxError, BoxId, ConnId, MAX_CHUNK_BYTES};
use box_runtime::{BoxRuntime, Caller};
use bytes::{Buf as _, Bytes};
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// The number of received chunks that wait for their reader.
const WAITING_CHUNKS: usize = 4;

/// A connection to a port; dropping it closes both directions.
pub(crate) struct PortStream {
    runtime: BoxRuntime,
    caller: Caller,
    box_id: BoxId,
    conn_id: ConnId,
    /// The running `port.open`, which ends with this set.
    opening: JoinSet<Result<PortOpenResult, BoxError>>,
    chunks: mpsc::Receiver<PortChunk>,
    unread: Bytes,
    sending: Option<BoxFuture<'static, Result<(), BoxError>>>,
    closed: bool,
}

impl PortStream {
    /// Connects to a port of a box as this caller.
    pub(crate) async fn open(
        runtime: &BoxRuntime,
        caller: &Caller,
        box_id: &BoxId,
        port: NonZeroU16,
    ) -> Result<Self, BoxError> {
        let (sender, mut chunks) = mpsc::channel(WAITING_CHUNKS);
        let mut opening = JoinSet::new();
        let (runtime, caller, box_id) = (runtime.clone(), caller.clone(), box_id.clone());
        opening.spawn({
            let (runtime, caller, box_id) = (runtime.clone(), caller.clone(), box_id.clone());
            async move {
                let params = PortOpenParams { box_id, port };
                let opened = runtime.forward_streamed::<PortOpen>(&caller, &params, sender);
                opened.await
            }
        });
        let Some(PortChunk::ConnId(conn_id)) = chunks.recv().await else {
            return Err(match opening.join_next().await {
                Some(Ok(Err(error))) => error,
                _ => BoxError::unavailable("port: the connection ended at once"),
            });
        };
        Ok(Self {
            runtime,
            caller,
            box_id,
            conn_id,
            opening,
            chunks,
            unread: Bytes::new(),
            sending: None,
            closed: false,
        })
    }

    fn send(&mut self, data: Option<Bytes>) {
        let (runtime, caller) = (self.runtime.clone(), self.caller.clone());
        let params = PortSendParams {
            box_id: self.box_id.clone(),
            conn_id: self.conn_id.clone(),
            close: data.is_none(),
            data: data.map(Into::into),
        };
        self.sending = Some(Box::pin(async move {
            runtime
                .forward::<PortSend>(&caller, &params)
                .await
                .map(drop)
        }));
    }

    /// Waits until the agent has written the sent bytes.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(sending) = &mut self.sending {
            let sent = ready!(sending.as_mut().poll(cx));
            self.sending = None;
            sent.map_err(io::Error::other)?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            match ready!(self.chunks.poll_recv(cx)) {
                Some(PortChunk::Data(data)) => self.unread = data.0,
                Some(PortChunk::ConnId(_)) => {}
                None => {
                    return Poll::Ready(match ready!(self.opening.poll_join_next(cx)) {
                        Some(Ok(Err(error))) => Err(io::Error::other(error)),
                        _ => Ok(()),
                    });
                }
            }
        }
        let count = self.unread.len().min(into.remaining());
        into.put_slice(&self.unread[..count]);
        self.unread.advance(count);
        Poll::Ready(Ok(()))
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
            self.send(Some(Bytes::copy_from_slice(&data[..count])));
            // The first poll sends the call.
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
            self.send(None);
        }
        self.poll_sent(cx)
    }
}
