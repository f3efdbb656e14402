//! Every cap of a connection: its name, its default, what happens beyond it.

use std::time::Duration;

/// The caps of one connection. The field's name is the name printed in the error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Longest message in bytes, both ways. Beyond: `too_large`, the connection lives.
    pub message_bytes: usize,
    /// Longest message in bytes of a peer that needs a token and has not shown it. Beyond:
    /// `too_large`, and closed.
    pub hello_bytes: usize,
    /// Calls of the peer that may run at once, streams apart. Beyond: `overloaded`.
    pub in_flight: usize,
    /// Streaming calls of the peer that may run at once. Beyond: `overloaded`.
    pub open_streams: usize,
    /// Chunks a stream may be ahead of its reader: what we ask for, and the most we grant a peer.
    pub stream_credit: u32,
    /// Places in the outbound queue: one for each message and one for each 16 KiB of it. Whoever
    /// sends waits for a place.
    pub queue_slots: usize,
    /// Refusals and control messages that may wait for a peer that does not read. Beyond: the
    /// connection is closed as flooded.
    pub control_queue: usize,
    /// Bytes of answers that may be held for a peer that has not read them. Beyond: an answer becomes `overloaded`, and all
    /// connections together hold at most [`ALL_UNREAD_BYTES`](crate::ALL_UNREAD_BYTES), or the one that holds most is
    /// closed. `usize::MAX` where the other end is ours and reads at all times.
    pub unread_bytes: usize,
    /// Deepest nesting of a message. Beyond: `validation`.
    pub depth: usize,
    /// Longest id of a call in bytes. Beyond: `validation`.
    pub id_bytes: usize,
    /// Calls in one JSON-RPC batch. Beyond: `too_large`.
    pub batch: usize,
    /// How long a new connection may stay silent. `None` where both ends are ours to begin with
    /// (queues, stdio). Beyond: closed.
    pub first_message: Option<Duration>,
    /// How long one message may take to arrive or to be written once begun. Beyond: closed.
    pub frame: Duration,
    /// Silence after which a ping is sent; three of them close the connection. `None` sends none.
    pub heartbeat: Option<Duration>,
    /// How long answers may take once the peer has said that it sends no more. Beyond: aborted.
    pub drain: Duration,
}

/// Bytes that a message may grow by when it is passed on: a longer id, members that were left out, another name.
const PASSED_ON: usize = 64 * 1024;

/// How many silent heartbeats end a connection.
pub(crate) const HEARTBEATS_MISSED: u32 = 3;

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
    /// What a listener on a network uses: as the default, and a new connection must speak within
    /// ten seconds.
    pub fn network() -> Self {
        Self {
            first_message: Some(Duration::from_secs(10)),
            ..Self::default()
        }
    }

    /// What a connection between two ends of ours uses: as the default, without heartbeats, with some room for what a
    /// message grows by when it is passed on.
    pub fn in_process() -> Self {
        let outside = Self::default();
        Self {
            message_bytes: outside.message_bytes + PASSED_ON,
            unread_bytes: usize::MAX,
            heartbeat: None,
            ..outside
        }
    }
}
