//! Real boxes on this machine, through the runtime and through the service. Each test runs in root's boxes and in an ordinary
//! user's where the tests run as root.

#![allow(
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    reason = "a test fails by panicking, and its `json!` values are used once"
)]

mod adoption;
mod agent;
mod basics;
mod commands;
// Its probes make system calls by the numbers of this architecture.
#[cfg(target_arch = "x86_64")]
mod catalogue;
mod closed;
mod ends;
mod entry;
mod environment;
mod events;
mod far;
mod figures;
mod files;
mod kept;
mod limits;
mod mounts;
mod network;
mod order;
mod output;
mod pause;
mod ports;
mod reaching;
mod readers;
mod service;
mod shells;
mod stop;
mod support;
mod unreached;
