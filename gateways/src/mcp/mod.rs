//! The Model Context Protocol: boxes as tools of a language model.
//!
//! A parent process speaks it over standard input and output ([`serve_stdio`]), other clients over HTTP at `/mcp`, or at
//! `/boxes/{box}/mcp` for one box. No session is kept: each request names its caller, and a call without the argument
//! `box` uses the default box of the caller. So a restart of the server loses nothing.
//!
//! # Reading order
//! - `session`: the caller and its default box. `server`: the protocol. `stdio` and `http`: its
//!   transports. `running`: calls that another request cancels.
//! - `box_tools`: the tools that act inside one box, for gateways with requests of their own.
//! - `tools`: the list of tools. `schema`: the schemas of their arguments. `answer`: their results. `notes`: what a
//!   call tells beside them. `errors`: errors in the words of the tools.
//! - `commands`, `code`, `files`, `search`, `boxes`: the tools. `follow`: the output of a command while it runs.
//!   `excerpt`: the part of it that a model gets.

mod answer;
mod box_tools;
mod boxes;
mod code;
mod commands;
mod errors;
mod excerpt;
mod files;
mod follow;
mod http;
mod notes;
mod running;
mod schema;
mod search;
mod server;
mod session;
mod stdio;
mod tools;

use box_protocol::GatewayName;

pub(crate) use self::box_tools::BoxTools;
pub use self::http::routes;
pub use self::server::{serve_stdio, serve_stdio_for};

/// The name of the protocol in records of boxes.
const GATEWAY: GatewayName = GatewayName::of("mcp");
