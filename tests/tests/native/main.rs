//! Real boxes on this machine, through the runtime and through the service.
//!
//! As root, each test runs in root's boxes and in those of an ordinary user.

#![allow(
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    reason = "a test fails by panicking, and its `json!` values are used once"
)]

mod adoption;
mod agent;
mod basics;
mod commands;
mod disks;
mod durability;
mod egress;
mod environment;
mod events;
mod fail_closed;
mod files;
mod images;
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
// The probes make system calls by their numbers on this architecture.
#[cfg(target_arch = "x86_64")]
mod security;
mod service;
mod shells;
mod snapshots;
mod stats;
mod stop;
mod stopped_files;
mod unreachable;
