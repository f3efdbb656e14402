//! The program from the outside: the real binary, real boxes, pipes and terminals.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod audit;
mod box_end;
mod boxes;
mod commands;
mod config;
mod connect;
mod cp;
mod cp_hostile;
mod docker_usage;
mod full_disk;
mod images;
mod network;
mod option_errors;
mod overlay;
mod packages;
mod policy;
mod pools;
mod program;
mod run;
mod serve;
mod server_loss;
mod snapshot_kills;
mod snapshots;
mod stopped;
mod support;
mod templates;
mod terminal;
mod texts;
mod volumes;
