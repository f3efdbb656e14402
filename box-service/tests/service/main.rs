//! The behaviour of the service towards its callers, against a scripted runtime over a queue.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers unwrap, too

mod audit;
mod box_ids;
mod commands;
mod forwarding;
mod lifecycle;
mod mounts;
mod observability;
mod profiles;
mod quotas;
mod scripted_runtime;
mod truncation;
