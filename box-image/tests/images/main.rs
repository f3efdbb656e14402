//! Pulls, imports and exports, against registries that lie, cut and refuse.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure is the end of a test"
)]

mod auth;
mod crash;
mod false_metadata;
mod formats;
mod pulls;
mod real;
mod support;
