//! The behaviour of the service towards its callers, against a scripted runtime over a queue.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers unwrap, too

mod audit;
mod forwarding;
mod lifecycle;
mod mounts;
mod observability;
mod profiles;
mod quotas;
mod running;
mod scripted_runtime;
mod sessions;
mod truncation;
