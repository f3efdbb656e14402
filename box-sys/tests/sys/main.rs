//! Tests with real boxes, as root and as an ordinary user.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod changes;
mod cleanup;
mod commands;
mod delegated_cgroups;
mod disk_layers;
mod disks;
mod escapes;
mod files;
mod images;
mod layers;
mod limits;
mod many_boxes;
mod merged_layers;
mod missing_primitives;
mod snapshots;
mod support;
mod termination;
mod volumes;
