//! Sending half, and the responses to control frames of the peer.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
};

use async_trait::async_trait;
use box_rpc::{ConnectionError, SendHalf, buffer_pool};
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::{io::AsyncWrite, sync::Mutex as AsyncMutex};
use tungstenite::{
    Bytes, Utf8Bytes,
    protocol::{
        CloseFrame, Role,
        frame::{
            Frame, FrameHeader,
            coding::{CloseCode, Data, OpCode},
        },
    },
};

use super::decoder::Violation;
use crate::bytes::{DIRECT_WRITE_BYTES, WriteBuffer};

/// Opcode of messages.
const TEXT: OpCode = OpCode::Data(Data::Text);

/// Writer of frames.
/// Only pings contend for its lock, because one task owns the sending half.
#[derive(Debug)]
pub(super) struct Writer<W> {
    sink: AsyncMutex<Sink<W>>,
    /// The ping to answer, and whether a task is answering it.
    ping: Mutex<(Option<Bytes>, bool)>,
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
        }
    }

    /// Sends a ping.
    async fn ping(&self) -> Result<(), ConnectionError> {
        let mut sink = self.sink.lock().await;
        sink.control(Frame::ping(Bytes::new())).await
    }

    /// Answers a ping in a separate task, because the reader must not wait for writes.
    /// Of several pending pings it answers only the last, as the protocol allows.
    pub(super) fn pong(self: &Arc<Self>, payload: Bytes) {
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
            if sink.control(Frame::pong(payload)).await.is_err() {
                return;
            }
        }
    }

    /// Sends the peer the reason why this end stops reading.
    pub(super) fn refuse(self: &Arc<Self>, violation: Violation) {
        let writer = Arc::clone(self);
        tokio::spawn(async move {
            let mut sink = writer.sink.lock().await;
            // The connection is over either way.
            let _ = sink.close(violation.status, violation.reason).await;
        });
    }
}

impl<W: AsyncWrite + Unpin> Sink<W> {
    /// Takes one message; buffers small ones until the flush.
    async fn text(&mut self, message: String) -> Result<(), ConnectionError> {
        if self.closed {
            return Err(ConnectionError::Closed);
        }
        if self.masks.is_some() {
            self.append(Frame::message(message, TEXT, true))?;
            return self.write_buffer.write_if_full().await;
        }
        // Without a mask the payload is not changed, so it needs no copy of its own.
        let header = FrameHeader {
            opcode: TEXT,
            ..FrameHeader::default()
        };
        let buffer = self.write_buffer.buffer();
        header
            .format(message.len() as u64, buffer)
            .map_err(std::io::Error::other)?;
        if message.len() >= DIRECT_WRITE_BYTES {
            let written = self.write_buffer.write_directly(message.as_bytes()).await;
            buffer_pool::recycle(message);
            return written;
        }
        buffer.extend_from_slice(message.as_bytes());
        self.write_buffer.write_if_full().await
    }

    /// Sends a control frame at once.
    async fn control(&mut self, frame: Frame) -> Result<(), ConnectionError> {
        if self.closed {
            return Err(ConnectionError::Closed);
        }
        self.append(frame)?;
        self.write_buffer.flush().await
    }

    /// Sends the close frame, unless one was sent.
    async fn close(
        &mut self,
        code: CloseCode,
        reason: &'static str,
    ) -> Result<(), ConnectionError> {
        if self.closed {
            return Ok(());
        }
        let reason = Utf8Bytes::from_static(reason);
        let written = self
            .control(Frame::close(Some(CloseFrame { code, reason })))
            .await;
        self.closed = true;
        written
    }

    /// Adds a frame to the buffer, masked if this end masks.
    fn append(&mut self, mut frame: Frame) -> Result<(), ConnectionError> {
        frame.header_mut().mask = self.masks.as_mut().map(Masks::next).transpose()?;
        let written = frame.format(self.write_buffer.buffer());
        Ok(written.map_err(std::io::Error::other)?)
    }
}

/// Random masks for the frames of a client.
/// It fetches many at a time from the kernel. An attacker who chooses the payload must not be able to guess them.
#[derive(Debug, Default)]
struct Masks {
    pool: Vec<[u8; 4]>,
}

impl Masks {
    /// Returns an unused mask.
    fn next(&mut self) -> std::io::Result<[u8; 4]> {
        if let Some(mask) = self.pool.pop() {
            return Ok(mask);
        }
        let mut random = [0; 512];
        fill_random(&mut random)?;
        let (masks, _) = random.as_chunks::<4>();
        self.pool.extend_from_slice(masks);
        self.pool
            .pop()
            .ok_or_else(|| std::io::ErrorKind::Other.into())
    }
}

/// Fills `bytes` with random bytes of the kernel.
pub(crate) fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
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
        sink.close(status.into(), "").await
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.writer.ping().await
    }
}

#[cfg(test)]
mod tests {
    use super::Masks;

    #[test]
    fn masks_differ() {
        let mut masks = Masks::default();
        let some: std::collections::HashSet<_> = (0..300).map(|_| masks.next().unwrap()).collect();
        assert!(some.len() > 290);
    }
}
