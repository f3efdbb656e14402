//! Builds and runs one hardened box on Linux, and knows nothing of RPC or policy. The one crate of the workspace with
//! `unsafe`, each block with its reason.
//!
//! # Reading order
//! 1. `plan.rs`: [`SandboxPlan`], what a box shall be; `probe.rs`: [`Primitives`], what this machine has for it.
//! 2. `client.rs`: [`ForkServer`] and [`Sandbox`], what a program that makes boxes holds.
//!    `record.rs`: what is kept of a box for a later program.
//! 3. `server/`: the fork server. `world.rs` is what it lives in, `pools.rs` what it keeps ready, `launch.rs` the fork.
//! 4. `child/`: from the fork to init. `mod.rs` is the order of steps, `tree.rs` the root directory.
//! 5. `inside/`: what init has: [`Init`], commands, their ends.
//! 6. `network/`: a box's network, and its exits.
//! 7. `cgroup/`, `seccomp/`, `landlock.rs`, `mounts.rs`, `identity.rs`, `quota.rs`: the means.
//! 8. `wire.rs`: messages between the two; `raw.rs`: system calls; `error.rs`.
//!
//! # A program that makes boxes
//! Its `main` begins with [`serve_if_asked`], because the fork server is the same program started again. Then
//! [`ForkServer::start`] once, [`ForkServer::create`] for each box.

mod cgroup;
mod child;
mod client;
mod error;
mod identity;
mod init;
mod landlock;
mod mounts;
mod network;
mod peer;
mod plan;
mod probe;
mod quota;
mod raw;
mod record;
pub mod seccomp;
mod server;
pub mod walk;
mod wire;

pub use cgroup::{Ability, Cgroups, DiskLimits, Usage};
pub use child::InitMain;
pub use client::{ForkServer, PendingSandbox, Sandbox, serve_if_asked};
pub use error::{Error, Result};
pub use init::{
    ChildExit, Command, GuestThread, Init, Moment, OuterNamespaces, SpawnPlan, Stdio,
    release_memory,
};
pub use network::{
    EgressCookies, EgressSockets, FIRST_MARK, OWN_V4, OWN_V6, QueuedSyn, SynQueue, Verdict,
    socket_mark,
};
pub use peer::{peer_is_in_our_user_namespace, peer_pidfd};
pub use plan::{Caps, Guest, Limits, MOUNTS_MAX, Mount, Network, Root, SandboxPlan, Source};
pub use probe::Primitives;
pub use quota::DirectoryQuota;
pub use raw::signal_fd;
pub use record::SandboxRecord;
pub use wire::{ServerConfig, receive, send, socket_pair};
