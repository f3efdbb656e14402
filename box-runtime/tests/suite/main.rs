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
mod isolation;
mod lifetime;
mod model;
mod owners;
mod regressions;
mod shared_memory;
mod shutdown;
mod streaming;
mod timeouts;
mod untrusted_agent;
mod update;
mod volumes;
