//! Boxes through the whole path: a service with its policy, the RPC over every transport and in
//! both dialects, a runtime with a scripted backend.
//!
//! Behaviour that `box-service` and `box-runtime` test in process holds here too, including error
//! types.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod bad_input;
mod gateway;
mod lifecycle;
mod meta;
mod runtime;
mod service;
