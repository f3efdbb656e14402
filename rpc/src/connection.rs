//! The seam between the engine and whatever carries its strings.

use std::collections::VecDeque;

use async_trait::async_trait;

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

    /// Finds out whether the peer is still there, by sending something that every peer passes over. An error says that it
    /// is gone; one that has gone a moment ago may be found out only the next time.
    async fn probe(&mut self) -> Result<(), ConnectionError> {
        Ok(())
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

    /// The peer has said who it is, or at least something that can be read where nothing is asked for.
    /// `false` if the connection was given up for another one before that: it is over.
    ///
    /// Worth overriding where connections of peers that are not known have to make room for others.
    fn peer_is_known(&mut self) -> bool {
        true
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
    #[error("connection: {}", reason(.0))]
    Io(#[from] std::io::Error),
}

/// What the operating system says, or at least which kind of failure it was: what libraries add may hold paths.
fn reason(error: &std::io::Error) -> String {
    let Some(number) = error.raw_os_error() else {
        return error.kind().to_string();
    };
    let text = std::io::Error::from_raw_os_error(number).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
