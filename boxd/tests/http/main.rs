//! The HTTP port of `boxd serve` from the outside: the real program, real sockets, real boxes.
//!
//! - `support`: a running `boxd serve`, and an HTTP client that sends exactly the bytes of a test.
//! - `health`, `routes`, `origin`, `tokens`: which request gets which answer.
//! - `pages`: web pages that the operator allows.
//! - `rpc`: boxes over `/rpc/ws`, in both dialects, and their owners.
//! - `ports`: servers inside a box.
//! - `load`: clients that stall, send too much, or are too many.
//! - `drain`: shutdown.

#![allow(clippy::unwrap_used, reason = "test code")]

mod drain;
mod health;
mod load;
mod origin;
mod pages;
mod ports;
mod routes;
mod rpc;
mod support;
mod tokens;
