//! The exec-server of OpenAI Codex: its commands and file accesses happen in a box.
//!
//! Codex starts a program and speaks newline-delimited JSON-RPC with it ([`serve_stdio`]), or opens a websocket at
//! `/codex`, or at `/boxes/{box}/codex` for one box. A process of Codex is a command of the box; its output is read from
//! the log of the command, also after the client has connected again. The sandbox that a request describes is not
//! applied: the box is the sandbox.
//!
//! # Reading order
//! - `wire`: messages and their errors. `paths`: URIs of files.
//! - `connection`: one client: the handshake, and its requests in order. `stdio` and `http`: the transports.
//! - `session`: what outlives a connection: the box, and the processes.
//! - `process`: a process, from its start to its end. `output`: its numbered output.
//! - `environment`: what a client asks about the box. `files`, `links`, `walk`: its file system.

mod connection;
mod environment;
mod files;
mod http;
mod links;
mod output;
mod paths;
mod process;
mod session;
mod stdio;
mod walk;
mod wire;

use box_protocol::GatewayName;

pub use self::http::routes;
pub use self::stdio::{serve_stdio, serve_stdio_for};

/// The name of the protocol in records of boxes.
const GATEWAY: GatewayName = GatewayName::of("codex");

/// The maximum length of a message. Clients refuse a longer frame of a websocket.
const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
