//! Sending half, and the responses to control frames of the peer.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use box_rpc::{ConnectionError, SendHalf, buffer_pool};
use tokio::{io::AsyncWrite, sync::Mutex as AsyncMutex};

use super::{
    Role,
    frame::{Header, Masks, Opcode, Violation, apply_mask},
};
use crate::bytes::{DIRECT_WRITE_BYTES, WriteBuffer};

/// Writer of frames.
/// Only pings contend for its lock, because one task owns the sending half.
#[derive(Debug)]
pub(super) struct Writer<W> {
    sink: AsyncMutex<Sink<W>>,
    /// The ping to answer, and whether a task is answering it.
    ping: Mutex<(Option<Vec<u8>>, bool)>,
    /// Number of received frames of any kind.
    pub(super) frames_received: AtomicU64,
}

/// State that the lock guards.
#[derive(Debug)]
struct Sink<W> {
    write_buffer: WriteBuffer<W>,
    /// Masks of a client; a server does not mask.
    masks: Option<Masks>,
    /// Whether a close frame was written, after which no frame may follow.
    closed: bool,
}

impl<W: AsyncWrite + Unpin + Send + 'static> Writer<W> {
    /// Creates a writer into `write_buffer`.
    pub(super) fn new(write_buffer: WriteBuffer<W>, role: Role) -> Self {
        Self {
            sink: AsyncMutex::new(Sink {
                write_buffer,
                masks: (role == Role::Client).then(Masks::default),
                closed: false,
            }),
            ping: Mutex::default(),
            frames_received: AtomicU64::new(0),
        }
    }

    /// Sends a ping.
    async fn ping(&self) -> Result<(), ConnectionError> {
        self.sink
            .lock()
            .await
            .control(Opcode::Ping, Vec::new())
            .await
    }

    /// Answers a ping in a separate task, because the reader must not wait for writes.
    /// Of several pending pings it answers only the last, as the protocol allows.
    pub(super) fn pong(self: &Arc<Self>, payload: Vec<u8>) {
        let mut ping = self.ping.lock().unwrap_or_else(PoisonError::into_inner);
        ping.0 = Some(payload);
        if !std::mem::replace(&mut ping.1, true) {
            tokio::spawn(Arc::clone(self).send_pongs());
        }
    }

    /// Answers until no ping is left.
    async fn send_pongs(self: Arc<Self>) {
        loop {
            let payload = {
                let mut ping = self.ping.lock().unwrap_or_else(PoisonError::into_inner);
                let payload = ping.0.take();
                ping.1 = payload.is_some();
                payload
            };
            let Some(payload) = payload else { return };
            let mut sink = self.sink.lock().await;
            if sink.control(Opcode::Pong, payload).await.is_err() {
                return;
            }
        }
    }

    /// Sends the peer the reason why this end stops reading.
    pub(super) fn refuse(self: &Arc<Self>, violation: Violation) {
        let writer = Arc::clone(self);
        tokio::spawn(async move {
            let mut sink = writer.sink.lock().await;
            let mut payload = violation.status.to_be_bytes().to_vec();
            payload.extend_from_slice(violation.reason.as_bytes());
            // The connection is over either way.
            let _ = sink.close(payload).await;
        });
    }
}

impl<W: AsyncWrite + Unpin> Sink<W> {
    /// Takes one message; buffers small ones until the flush.
    async fn text(&mut self, message: String) -> Result<(), ConnectionError> {
        if self.closed {
            return Err(ConnectionError::Closed);
        }
        let mask = self.mask()?;
        Header::whole(Opcode::Text, message.len(), mask).write(self.write_buffer.buffer());
        if message.len() >= DIRECT_WRITE_BYTES {
            let mut payload = message.into_bytes();
            if let Some(mask) = mask {
                apply_mask(&mut payload, mask, 0);
            }
            let written = self.write_buffer.write_directly(&payload).await;
            buffer_pool::recycle(payload);
            return written;
        }
        self.payload(message.as_bytes(), mask);
        self.write_buffer.write_if_full().await
    }

    /// Sends a control frame at once.
    async fn control(&mut self, opcode: Opcode, payload: Vec<u8>) -> Result<(), ConnectionError> {
        if self.closed {
            return Err(ConnectionError::Closed);
        }
        let mask = self.mask()?;
        Header::whole(opcode, payload.len(), mask).write(self.write_buffer.buffer());
        self.payload(&payload, mask);
        self.write_buffer.flush().await
    }

    /// Sends the close frame, unless one was sent.
    async fn close(&mut self, payload: Vec<u8>) -> Result<(), ConnectionError> {
        if self.closed {
            return Ok(());
        }
        let written = self.control(Opcode::Close, payload).await;
        self.closed = true;
        written
    }

    /// Returns the mask for the next frame, if this end masks.
    fn mask(&mut self) -> Result<Option<[u8; 4]>, ConnectionError> {
        Ok(self.masks.as_mut().map(Masks::next).transpose()?)
    }

    /// Copies a payload behind its header.
    fn payload(&mut self, bytes: &[u8], mask: Option<[u8; 4]>) {
        let buffer = self.write_buffer.buffer();
        let start = buffer.len();
        buffer.extend_from_slice(bytes);
        if let Some(mask) = mask {
            apply_mask(&mut buffer[start..], mask, 0);
        }
    }
}

/// Checks whether the peer is still there, independently of both halves.
#[derive(Debug)]
pub struct Pinger<W> {
    pub(super) writer: Arc<Writer<W>>,
}

impl<W: AsyncWrite + Unpin + Send + 'static> Pinger<W> {
    /// Sends a ping. The receiving half sees the response while a task waits on it.
    pub async fn ping(&self) -> Result<(), ConnectionError> {
        self.writer.ping().await
    }

    /// Returns the number of received frames, including answers to pings.
    pub fn frames_received(&self) -> u64 {
        self.writer.frames_received.load(Ordering::Relaxed)
    }
}

/// Sending half: one unfragmented text frame for each message.
#[derive(Debug)]
pub(super) struct WebSocketSend<W> {
    pub(super) writer: Arc<Writer<W>>,
    /// Close status, if other than [`NORMAL`].
    pub(super) status: Option<Arc<AtomicU16>>,
}

/// Status of a normal closure.
const NORMAL: u16 = 1000;

impl<W> WebSocketSend<W> {
    pub(super) fn new(writer: Arc<Writer<W>>) -> Self {
        Self {
            writer,
            status: None,
        }
    }
}

#[async_trait]
impl<W: AsyncWrite + Unpin + Send + 'static> SendHalf for WebSocketSend<W> {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.writer.sink.lock().await.text(message).await
    }

    async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.writer.sink.lock().await.write_buffer.flush().await
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        let mut sink = self.writer.sink.lock().await;
        while let Some(message) = messages.pop_front() {
            sink.text(message).await?;
        }
        sink.write_buffer.flush().await
    }

    /// Sends the close frame.
    /// The receiving half still gets messages that the peer sends before its own.
    async fn close(&mut self) -> Result<(), ConnectionError> {
        let status = self.status.as_ref();
        let status = status.map_or(NORMAL, |status| status.load(Ordering::Relaxed));
        let mut sink = self.writer.sink.lock().await;
        sink.close(status.to_be_bytes().to_vec()).await
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.writer.ping().await
    }
}
