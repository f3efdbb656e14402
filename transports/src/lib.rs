//! Transports: implementations of [`Connection`](box_rpc::Connection).
//!
//! They carry whole messages, one string each, in order, both ways. Only [`server`] and [`reconnecting`] know about
//! calls.
//!
//! | endpoint | module | framing | for |
//! |---|---|---|---|
//! | `queue:NAME` | [`queue`] | none: strings are moved | tests, a runtime linked into its host |
//! | `stdio:COMMAND` | [`stdio`] | a line each | plugin hosts |
//! | `tcp://HOST:PORT` | [`tcp`] | a line each | runtimes on a trusted network |
//! | `tls://HOST:PORT` | [`tcp`], [`tls`] | a line each | runtimes elsewhere, with client certificates |
//! | `unix:PATH` | [`unix`] | a line each | the same machine and user |
//! | `ws://HOST:PORT/PATH`, `wss://…` | [`websocket`] | a text message each | anything behind HTTP |
//!
//! # Reading order
//!
//! 1. `bytes`: read and write buffers, and the timeout of a message, for every framing.
//! 2. [`line`](mod@line): one message, one line. Most transports consist of this and a socket.
//! 3. [`queue`], [`tcp`], [`unix`], [`stdio`], [`websocket`]: one transport each.
//! 4. [`tls`]: certificates and configurations.
//! 5. `endpoint`: an [`Endpoint`] is an address as text; it connects and listens.
//! 6. [`connection_limit`]: the maximum number of connections, and eviction.
//! 7. [`server`]: serves a router to every peer. [`reconnecting`]: a connection that reconnects.
//!
//! # Guarantees of all transports
//!
//! * The reader skips a message longer than `message_bytes` in constant memory, reports its first 512 bytes and
//!   continues with the next message.
//! * A started message must be complete within `frame`, and so must each write.
//! * A batch of messages is one write (or one lock), and one read returns many messages.
//! * An idle connection holds no buffer of more than a few kilobytes.
//! * Errors never contain sent data, a key, a token or a path.

mod bytes;
pub mod connection_limit;
mod endpoint;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod line;
pub mod queue;
pub mod reconnecting;
pub mod server;
pub mod stdio;
pub mod tcp;
pub mod tls;
pub mod unix;
pub mod websocket;

pub use crate::bytes::free_thread_buffers;
pub use crate::endpoint::{
    Accepted, ConnectOptions, Endpoint, EndpointError, HostPort, ListenError, ListenOptions,
    Listener, PeerInfo, Refused, Transport,
};
