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
mod durability;
mod egress;
mod environment;
mod events;
mod fail_closed;
mod files;
mod limits;
mod main_command;
mod mounts;
mod network;
mod order;
mod output;
mod pause;
mod ports;
mod process_cleanup;
mod readers;
mod remote_runtime;
mod service;
mod shells;
mod stats;
mod stop;
mod support;
mod unreachable;
