//! The one HTTP port of `boxd serve`, from outside: the real program, real sockets, real boxes.
//!
//! - `server`: a program that serves, and a client that says exactly what a test wants.
//! - `health`, `doors`, `browsers`, `tokens`: what is answered to whom.
//! - `rpc`: boxes over `/rpc/ws`, in both dialects, and whose they are.
//! - `ports`: whoever listens inside a box.
//! - `load`: clients that stall, send too much, or are too many.
//! - `drain`: the end.

#![allow(clippy::unwrap_used, reason = "all of it is for tests")]

mod browsers;
mod doors;
mod drain;
mod health;
mod load;
mod ports;
mod rpc;
mod server;
mod tokens;
