//! The program as people use it: the real binary, real boxes, pipes and terminals.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod boxes;
mod commands;
mod config;
mod copies;
mod ends;
mod files;
mod habits;
mod installing;
mod lost;
mod network;
mod policy;
mod reach;
mod run;
mod serve;
mod support;
mod terminal;
mod trail;
