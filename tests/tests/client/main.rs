//! The client for Rust programs: against a server that follows a script, where each word of the server and each loss of
//! the connection is the test's, and against real boxes behind a queue and a Unix socket, whose connections are really cut.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod client;
mod commands;
mod executions;
mod files;
#[path = "../native/support.rs"]
#[allow(
    dead_code,
    reason = "what the tests of native boxes have, and not all of it"
)]
mod machine;
mod ports;
mod reconnect;
mod scripted_server;
mod shells;
mod support;
