//! Parts that the HTTP routes of all protocols share.
//!
//! # Reading order
//! - [`routes`]: the routes of a protocol, and how its clients authenticate. [`context`]: what a handler knows of its
//!   request, and its calls to boxes. `creation`: boxes whose creation may outlive its request.
//! - [`refusal`]: responses, refusals, and the error bodies of each protocol.
//! - [`body`]: JSON, queries and forms. [`upload`] and [`download`]: files.
//! - [`stream`]: calls with chunks, and response bodies of them. [`mod@array`]: lists in parts. [`framing`]: how they are written. [`lines`]: output in
//!   lines. [`socket`]: websockets. [`input`]: what their clients write to commands.
//! - [`page`], [`quantity`], [`preset`]: parts of lists, quantities of resources, and the settings of a protocol's boxes.
//! - [`capability`]: signatures that give access to one part of one box. [`token_filter`]: removal of tokens.
//! - [`proxy`]: requests and websockets to a port of a box. `port`: its byte stream. `confine` and `flushed_body`:
//!   its responses.

pub mod array;
pub mod body;
pub mod capability;
mod confine;
pub mod context;
pub(crate) mod creation;
pub mod download;
mod flushed_body;
pub mod framing;
pub mod input;
pub mod lines;
pub mod page;
pub(crate) mod port;
pub mod preset;
pub mod proxy;
pub mod quantity;
pub mod refusal;
pub mod routes;
pub mod socket;
pub mod stream;
pub mod token_filter;
pub mod upload;
