//! The behaviour of the RPC engine and its transports: one file per behaviour. Each test body runs
//! over every transport and in both dialects.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod batches;
mod calls;
mod cancel;
mod deadlines;
mod disconnect;
mod handshake;
mod heartbeat;
mod idempotency;
mod ids;
mod json_rpc;
mod limits;
mod memory;
mod order;
mod overload;
mod races;
mod reconnect;
mod shutdown;
mod streams;
