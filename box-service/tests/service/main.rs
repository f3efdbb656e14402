//! What the service does for its callers, against a scripted runtime reached over a queue.
#![allow(clippy::unwrap_used, clippy::expect_used)] // the helpers are tests, too

mod audit;
mod forwarding;
mod lifecycle;
mod mounts;
mod observability;
mod profiles;
mod quotas;
mod scripted_runtime;
mod sessions;
mod truncation;
