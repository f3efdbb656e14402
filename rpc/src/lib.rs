//! RPC engine of Box: typed calls, both ways, over any transport of strings.
//!
//! # Layout, in reading order
//!
//! - `connection`: the interface to a transport. A [`Connection`] sends and receives whole strings.
//! - `action`: the actions. An [`Action`] has a name and types, [`Handle`] handles it, a [`Router`] joins the two.
//! - `peer`: the calling side. [`Peer::call`], [`Peer::stream`]; dropping either cancels the call.
//! - `session`: [`Session::start`] runs a connection with one task that reads and one that writes.
//! - `engine`: the state that the tasks share; `engine::incoming` and `engine::controls` handle incoming messages.
//! - `call`: a call of the peer from its parameters to its response.
//! - `in_flight`, `outbox`, `unread`: the calls in flight, the queue in front of the writer, and the bytes of
//!   responses that peers have not read. No I/O.
//! - [`codec`]: the encoding of messages. JSON-RPC is built in; an endpoint may offer others, and the peer's first
//!   message selects one.
//! - `caller`, `handshake`: the identity of a peer, and the call that transmits its token.
//! - `idempotency`: calls that run once however often they are sent. `turns`: calls that run in order.
//! - `limits`, `error`: limits and errors.
//! - `buffer_pool`: reuse of the memory of large messages.
//!
//! # A connection by hand
//!
//! Any type that can send and receive strings is a connection:
//!
//! ```
//! use async_trait::async_trait;
//! use box_rpc::{
//!     Action, Call, Caller, ConnectionError, Handle, Never, Options, ReceiveHalf, Router, RpcError, SendHalf,
//!     Session,
//! };
//! use serde::{Deserialize, Serialize};
//! use std::sync::Arc;
//! use tokio::sync::mpsc::{Receiver, Sender, channel};
//!
//! struct Out(Sender<String>);
//! struct In(Receiver<String>);
//!
//! #[async_trait]
//! impl SendHalf for Out {
//!     async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
//!         self.0.send(message).await.map_err(|_| ConnectionError::Closed)
//!     }
//! }
//!
//! #[async_trait]
//! impl ReceiveHalf for In {
//!     async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
//!         Ok(self.0.recv().await)
//!     }
//! }
//!
//! // An action and its handler.
//! #[derive(Serialize, Deserialize)]
//! struct Text {
//!     text: String,
//! }
//! struct Shout;
//! impl Action for Shout {
//!     const NAME: &'static str = "shout";
//!     type Params = Text;
//!     type Result = Text;
//!     type Chunk = Never;
//! }
//! struct Server;
//! impl Handle<Shout> for Server {
//!     async fn handle(&self, params: Text, _: Call<Shout>) -> Result<Text, RpcError> {
//!         Ok(Text { text: params.text.to_uppercase() })
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ((to_server, from_client), (to_client, from_server)) = (channel(16), channel(16));
//! let router = Router::builder(Arc::new(Server)).on::<Shout>().build();
//! let _server = Session::start((Out(to_client), In(from_client)), router, Options::new(Caller::Local));
//! let client = Session::start((Out(to_server), In(from_server)), Router::empty(), Options::client());
//!
//! let answer = client.peer().call::<Shout>(&Text { text: "hello".into() }).await?;
//! assert_eq!(answer.text, "HELLO");
//! # Ok(())
//! # }
//! ```

mod action;
#[doc(hidden)] // Only the transports need it, and processes that release memory when they are idle.
pub mod buffer_pool;
mod call;
mod caller;
pub mod codec;
mod connection;
mod engine;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)] // Only the fuzzer and the tests of codecs need it.
pub mod fuzzing;
mod handshake;
mod idempotency;
mod in_flight;
mod limits;
mod outbox;
mod peer;
mod session;
mod turns;
mod unread;

pub use action::{Action, Empty, Handle, Never, Router, RouterBuilder};
pub use call::{Call, Cancellation, ChunkSink};
pub use caller::{Auth, Caller};
pub use codec::{Codec, Codecs, ControlPolicy, JsonRpc};
pub use connection::{Connection, ConnectionError, ReceiveHalf, SendHalf};
pub use engine::Stats;
pub use error::{CallError, Code, Fault, LimitDetail, RpcError};
pub use handshake::{Hello, HelloLimits, HelloParams, HelloResult, Tokens};
pub use limits::Limits;
pub use peer::{Chunks, Peer, PendingCall, Request};
pub use session::{CloseReason, Options, Session};
pub use turns::{Turn, Turns};
pub use unread::{ALL_UNREAD_BYTES, take_unread_peak, unread_bytes};
