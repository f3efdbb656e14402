//! LangBot's framing of the standard streams.
//!
//! LangBot's readers fail on lines longer than 64 KiB, so a long message is sent as several lines.

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use tokio::time::{Instant, timeout_at};

use super::chunks::{CHUNK_BYTES, Chunks, LINE_BYTES, Reassembly};

/// A connection that splits long messages, over one that carries lines.
pub struct ChunkedConnection {
    send: Box<dyn SendHalf>,
    receive: Box<dyn ReceiveHalf>,
    limits: (usize, Duration),
}

impl std::fmt::Debug for ChunkedConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InPieces").finish_non_exhaustive()
    }
}

impl ChunkedConnection {
    /// Wraps `lines`; `limits` gives the maximum message length and receive time.
    pub fn new(lines: Box<dyn Connection>, limits: &Limits) -> Self {
        let (send, mut receive) = lines.split();
        receive.set_message_limit(limits.message_bytes.max(LINE_BYTES));
        Self {
            send,
            receive,
            limits: (limits.message_bytes, limits.frame),
        }
    }
}

impl Connection for ChunkedConnection {
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        let (max_bytes, frame) = self.limits;
        let receive = ChunkedReceive {
            lines: self.receive,
            assembly: Reassembly::new(max_bytes),
            frame,
            deadline: None,
            failed: None,
        };
        (Box::new(ChunkedSend(self.send)), Box::new(receive))
    }
}

/// The sending half.
struct ChunkedSend(Box<dyn SendHalf>);

#[async_trait]
impl SendHalf for ChunkedSend {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        if message.len() <= CHUNK_BYTES {
            return self.0.send(message).await;
        }
        for line in Chunks::of(&message) {
            self.0.send(line).await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.0.flush().await
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        if messages.iter().all(|message| message.len() <= CHUNK_BYTES) {
            return self.0.send_all(messages).await;
        }
        while let Some(message) = messages.pop_front() {
            self.send(message).await?;
        }
        self.0.flush().await
    }

    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.0.close().await
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.0.probe().await
    }
}

/// The receiving half.
struct ChunkedReceive {
    lines: Box<dyn ReceiveHalf>,
    assembly: Reassembly,
    /// How long a message may take to arrive.
    frame: Duration,
    /// The deadline of the message that is arriving.
    deadline: Option<Instant>,
    /// An error to return from the next call.
    failed: Option<ConnectionError>,
}

impl ChunkedReceive {
    /// Returns a message if the line completes one.
    fn push(&mut self, line: String) -> Result<Option<String>, ConnectionError> {
        let pushed = self.assembly.push(line);
        if !self.assembly.is_open() {
            self.deadline = None;
            return pushed;
        }
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert_with(|| now + self.frame);
        if now > deadline {
            return Err(ConnectionError::Stalled(self.frame));
        }
        pushed
    }

    async fn line(&mut self) -> Result<Option<String>, ConnectionError> {
        let Some(deadline) = self.deadline else {
            return self.lines.receive().await;
        };
        match timeout_at(deadline, self.lines.receive()).await {
            Err(_) => Err(ConnectionError::Stalled(self.frame)),
            Ok(Err(ConnectionError::TooLarge { .. })) => {
                Err(ConnectionError::Framing("chunk longer than its message"))
            }
            Ok(received) => received,
        }
    }
}

#[async_trait]
impl ReceiveHalf for ChunkedReceive {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        loop {
            let Some(line) = self.line().await? else {
                return Ok(None);
            };
            if let Some(message) = self.push(line)? {
                return Ok(Some(message));
            }
        }
    }

    fn receive_ready(&mut self) -> Option<String> {
        while self.failed.is_none() {
            let line = self.lines.receive_ready()?;
            match self.push(line) {
                Ok(Some(message)) => return Some(message),
                Ok(None) => {}
                Err(error) => self.failed = Some(error),
            }
        }
        None
    }

    fn set_message_limit(&mut self, bytes: usize) {
        self.lines.set_message_limit(bytes.max(LINE_BYTES));
        self.assembly.set_message_limit(bytes);
    }

    fn peer_identified(&mut self) -> bool {
        self.lines.peer_identified()
    }
}

#[cfg(test)]
mod tests;
