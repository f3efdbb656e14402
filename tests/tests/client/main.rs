//! The client for Rust programs.
//!
//! Some tests use a scripted server, where the test controls each message and each loss of the
//! connection. The others use real boxes behind a queue and a Unix socket, and cut the connections.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod client;
mod commands;
mod executions;
mod files;
mod ports;
mod reconnect;
mod scripted_server;
mod shells;
mod support;
