//! Interface between the engine and a transport.

use std::collections::VecDeque;

use async_trait::async_trait;

/// A transport of whole messages, one string each, in order, both ways.
///
/// The engine splits it before use. One task owns each half, so no read is cancelled half way and no half needs a
/// lock.
pub trait Connection: Send + 'static {
    /// Splits the connection into its two halves.
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

/// Sending half.
#[async_trait]
pub trait SendHalf: Send {
    /// Takes one message; may buffer it until [`flush`](Self::flush).
    async fn send(&mut self, message: String) -> Result<(), ConnectionError>;

    /// Sends all buffered messages.
    async fn flush(&mut self) -> Result<(), ConnectionError> {
        Ok(())
    }

    /// Sends all of `messages` and flushes once. The engine calls this method.
    ///
    /// Override it if the transport can write a whole batch at once.
    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        while let Some(message) = messages.pop_front() {
            self.send(message).await?;
        }
        self.flush().await
    }

    /// Ends the sending direction, so that the peer sees the end.
    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.flush().await
    }

    /// Checks whether the peer is still there, by sending data that peers ignore.
    /// An error means that it is gone. A peer that left a moment ago may be detected only the next time.
    async fn probe(&mut self) -> Result<(), ConnectionError> {
        Ok(())
    }
}

/// Receiving half.
#[async_trait]
pub trait ReceiveHalf: Send {
    /// Returns the next message; `None` once the peer has ended its sending side.
    ///
    /// After [`ConnectionError::TooLarge`] the connection continues with the next message. Any other error ends it.
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError>;

    /// Returns a further message that has already arrived, without waiting.
    ///
    /// Override it if one read returns many messages.
    fn receive_ready(&mut self) -> Option<String> {
        None
    }

    /// Sets the maximum length of a message from now on.
    ///
    /// It is below the configured limit until the peer has identified itself.
    ///
    /// Override it if a message arrives in parts, so that the transport buffers no more than this. The engine checks
    /// every message in any case.
    fn set_message_limit(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Marks the peer as identified, or as readable if no identity is required.
    /// Returns `false` if the listener has already evicted the connection.
    ///
    /// Override it if a listener evicts connections of unidentified peers.
    fn peer_identified(&mut self) -> bool {
        true
    }
}

/// Error of a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer is gone, or the local end was closed.
    #[error("connection closed")]
    Closed,
    /// A message longer than `limit` bytes was skipped. The connection stays open.
    #[error("message exceeds the limit of {limit} bytes")]
    TooLarge {
        /// First bytes of the message, enough to find its id.
        head: String,
        /// The exceeded limit.
        limit: usize,
    },
    /// The peer broke the framing in a way that cannot be resumed.
    #[error("framing: {0}")]
    Framing(&'static str),
    /// A message did not arrive, or could not be written, in time.
    #[error("no whole message within the limit frame of {0:?}")]
    Stalled(std::time::Duration),
    /// The operating system returned an error.
    #[error("connection: {}", reason(.0))]
    Io(#[from] std::io::Error),
}

/// Returns the error of the operating system, or its kind.
/// Texts that libraries add may contain paths.
fn reason(error: &std::io::Error) -> String {
    let Some(number) = error.raw_os_error() else {
        return error.kind().to_string();
    };
    let text = std::io::Error::from_raw_os_error(number).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
