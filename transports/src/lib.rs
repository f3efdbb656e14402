//! Ways to make a [`Connection`](box_rpc::Connection): whole messages, one string each, in order,
//! both ways. Nothing but [`server`] and [`link`](mod@link) knows that there are calls.
//!
//! | endpoint | module | framing | for |
//! |---|---|---|---|
//! | `queue:NAME` | [`queue`] | none: strings change hands | tests, a runtime linked into its host |
//! | `stdio:COMMAND` | [`stdio`] | a line each | plugin hosts |
//! | `tcp://HOST:PORT` | [`tcp`] | a line each | runtimes on a trusted network |
//! | `tls://HOST:PORT` | [`tcp`], [`tls`] | a line each | runtimes elsewhere, with client certificates |
//! | `unix:PATH` | [`unix`] | a line each | the same machine and user |
//! | `ws://HOST:PORT/PATH`, `wss://…` | [`websocket`] | a text message each | anything behind HTTP |
//!
//! # Reading order
//!
//! 1. `bytes`: how bytes are buffered, batched and timed, for every framing.
//! 2. [`line`](mod@line): one message, one line. Most transports are this and a socket.
//! 3. [`queue`], [`tcp`], [`unix`], [`stdio`], [`websocket`]: one transport each.
//! 4. [`tls`]: certificates in, configurations out.
//! 5. [`Endpoint`]: addresses as text; connecting and listening by them.
//! 6. [`server`]: a router for everyone who connects. [`link`](mod@link): a connection that comes back.
//!
//! # What holds on all of them
//!
//! * A message longer than `message_bytes` is skipped in constant memory, reported with its first
//!   512 bytes, and the next one is read as if nothing had happened.
//! * A message that was begun must be complete within `frame`, and each write done within it.
//! * A batch of messages is one write (or one lock), and one read brings many messages.
//! * An idle connection holds no buffer of more than a few kilobytes.
//! * Errors never hold what was sent, nor a key, a token or a path.

mod bytes;
pub mod endpoint;
pub mod line;
pub mod link;
pub mod places;
pub mod queue;
pub mod server;
pub mod stdio;
pub mod tcp;
pub mod tls;
pub mod unix;
pub mod websocket;

pub use crate::bytes::free_spare_buffers;
pub use crate::endpoint::{
    Accepted, ConnectOptions, Endpoint, EndpointError, HostPort, ListenError, ListenOptions,
    Listener, PeerInfo, Refused, Transport,
};
