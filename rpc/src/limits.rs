//! Limits of a connection: names, defaults and the effect of exceeding them.

use std::time::Duration;

/// Limits of one connection. Errors name the limit by its field.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum message bytes, both ways. Beyond: `too_large`; the connection stays.
    pub message_bytes: usize,
    /// Maximum message bytes of a peer that has not sent its required token.
    /// Beyond: `too_large`, and closed.
    pub hello_bytes: usize,
    /// Concurrent calls of the peer, without streams. Beyond: `overloaded`.
    pub in_flight: usize,
    /// Concurrent streaming calls of the peer. Beyond: `overloaded`.
    pub open_streams: usize,
    /// Chunks a stream may be ahead of its reader.
    /// This side requests this many, and grants a peer at most this many.
    pub stream_credit: u32,
    /// Slots in the outbound queue: one per message and one per 16 KiB of it.
    /// A sender waits for a slot.
    pub queue_slots: usize,
    /// Refusals and control messages queued for a peer that does not read.
    /// Beyond: the connection is closed as flooded.
    pub control_queue: usize,
    /// Bytes of answers held for a peer that has not read them.
    ///
    /// Beyond: a response becomes `overloaded`. All connections together hold at most
    /// [`ALL_UNREAD_BYTES`](crate::ALL_UNREAD_BYTES); beyond, the connection that holds most is closed. `usize::MAX`
    /// suits a trusted peer that always reads.
    pub unread_bytes: usize,
    /// Maximum nesting of a message. Beyond: `validation`.
    pub depth: usize,
    /// Maximum bytes of a call id. Beyond: `validation`.
    pub id_bytes: usize,
    /// Maximum calls in one JSON-RPC batch. Beyond: `too_large`.
    pub batch: usize,
    /// Time within which a new connection must send its first message.
    /// Beyond: closed. `None` where both ends are trusted (queues, stdio).
    pub first_message: Option<Duration>,
    /// Time for one message to arrive or be written, once started. Beyond: closed.
    pub frame: Duration,
    /// Silence after which this side sends a ping; `None` sends none.
    /// Three unanswered pings close the connection.
    pub heartbeat: Option<Duration>,
    /// Time for responses after the peer has ended its sending side.
    /// Beyond: aborted.
    pub drain: Duration,
}

/// Bytes that a message may grow by when it is forwarded.
/// The causes are a longer id, members filled in and another name.
const FORWARDING_OVERHEAD: usize = 64 * 1024;

/// Number of silent heartbeats that end a connection.
pub(crate) const MAX_MISSED_HEARTBEATS: u32 = 3;

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes: 16 * 1024 * 1024,
            hello_bytes: 64 * 1024,
            in_flight: 128,
            open_streams: 1024,
            stream_credit: 16,
            queue_slots: 2048,
            control_queue: 4096,
            unread_bytes: 32 * 1024 * 1024,
            depth: 128,
            id_bytes: 256,
            batch: 128,
            first_message: None,
            frame: Duration::from_mins(1),
            heartbeat: Some(Duration::from_secs(15)),
            drain: Duration::from_secs(30),
        }
    }
}

impl Limits {
    /// Limits of a network listener.
    /// As the default, but a new connection must send a message within ten seconds.
    pub fn network() -> Self {
        Self {
            first_message: Some(Duration::from_secs(10)),
            ..Self::default()
        }
    }

    /// Limits of a connection between two trusted ends.
    /// As the default, but without heartbeats, and with room for the growth of a forwarded message.
    pub fn in_process() -> Self {
        let outside = Self::default();
        Self {
            message_bytes: outside.message_bytes + FORWARDING_OVERHEAD,
            unread_bytes: usize::MAX,
            heartbeat: None,
            ..outside
        }
    }
}
