//! The seam between the engine and whatever carries its strings.

use std::collections::VecDeque;

use async_trait::async_trait;

use crate::wire::Dialect;

/// Something that moves whole messages, one string each, in order, both ways.
///
/// It is split before use: each half is owned by one task, so no read is ever cancelled half way
/// and nothing needs a lock.
pub trait Connection: Send + 'static {
    /// Gives up the connection for its two halves.
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>);
}

impl<S, R> Connection for (S, R)
where
    S: SendHalf + 'static,
    R: ReceiveHalf + 'static,
{
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.0), Box::new(self.1))
    }
}

/// The half that sends.
#[async_trait]
pub trait SendHalf: Send {
    /// Takes one message; may keep it in a buffer until [`flush`](Self::flush).
    async fn send(&mut self, message: String) -> Result<(), ConnectionError>;

    /// Everything taken so far is on its way to the peer.
    async fn flush(&mut self) -> Result<(), ConnectionError> {
        Ok(())
    }

    /// Sends all of `messages` and flushes once: what the engine calls.
    ///
    /// Worth overriding where a whole batch can be written in one go.
    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        while let Some(message) = messages.pop_front() {
            self.send(message).await?;
        }
        self.flush().await
    }

    /// Says to the peer that nothing more will be sent.
    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.flush().await
    }

    /// The dialect the connection has settled on, told once, before anything is sent in it.
    ///
    /// Only a transport whose framing depends on the dialect cares (LangBot's stdio does).
    fn speak(&mut self, dialect: Dialect) {
        let _ = dialect;
    }
}

/// The half that receives.
#[async_trait]
pub trait ReceiveHalf: Send {
    /// The next message; `None` once the peer has said that it sends no more.
    ///
    /// After [`ConnectionError::TooLarge`] the connection goes on with the next message; after any
    /// other error it is over.
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError>;

    /// A further message that is already here, without waiting for one.
    ///
    /// Worth overriding where one read brings many messages.
    fn receive_ready(&mut self) -> Option<String> {
        None
    }

    /// A message may have so many bytes from now on: fewer than its limit while the peer has not
    /// said who it is, and its limit again afterwards.
    ///
    /// Worth overriding where a message comes bit by bit, so that no more of it than this is kept.
    /// The engine checks what arrives in any case.
    fn accept_up_to(&mut self, bytes: usize) {
        let _ = bytes;
    }
}

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer is gone, or the local end was closed.
    #[error("connection closed")]
    Closed,
    /// A message longer than `limit` bytes was skipped. The connection lives.
    #[error("message exceeds the limit of {limit} bytes")]
    TooLarge {
        /// The first bytes of the message, enough to find its id.
        head: String,
        /// The limit that it exceeds.
        limit: usize,
    },
    /// The peer broke the framing in a way that cannot be resumed.
    #[error("framing: {0}")]
    Framing(&'static str),
    /// A message was begun and not ended in time, or could not be written in time.
    #[error("no whole message within the limit frame of {0:?}")]
    Stalled(std::time::Duration),
    /// The operating system said no.
    #[error("connection: {}", .0.kind())]
    Io(#[from] std::io::Error),
}
