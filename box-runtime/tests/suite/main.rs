//! The runtime's behaviour over a scripted backend, one file per topic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod file_backend;
mod fixture;

mod agent_access;
mod backend_selection;
mod boxes;
mod catalog;
mod concurrency;
mod contract;
mod delete;
mod exec;
mod failed_start;
mod isolation;
mod lifetime;
mod model;
mod owners;
mod pools;
mod regressions;
mod shared_memory;
mod shutdown;
mod snapshots;
mod streaming;
mod templates;
mod timeouts;
mod untrusted_agent;
mod update;
mod volumes;
