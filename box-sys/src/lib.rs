//! Builds and runs one hardened box on Linux. Knows nothing of RPC or policy.
//!
//! This is the only crate of the workspace with `unsafe`. Each block states its reason.
//!
//! # Reading order
//! 1. `plan.rs`: [`SandboxPlan`] describes a box. `probe.rs`: [`Primitives`] lists what the host
//!    supports.
//! 2. `client/`: [`ForkServer`] and [`Sandbox`], the handles of a program that creates boxes.
//!    `record.rs`: the record from which a later program adopts a box.
//! 3. `server/`: the fork server. `template_mounts.rs` builds the mounts that every box starts
//!    from, `pools.rs` prepares parts in advance, `disks.rs` makes disks, `launch.rs` forks.
//! 4. `child/`: from the fork to init. `mod.rs` orders the steps, `root.rs` builds the root
//!    directory.
//! 5. `init/`: [`Init`], the interface of a box's first process: commands and their exits.
//! 6. `network/`: the network of a box and its egress sockets.
//! 7. `cgroup/`, `seccomp/`, `landlock.rs`, `mounts.rs`, `identity.rs`, `quota.rs`: kernel
//!    features, one module each.
//! 8. `disk_file.rs`: file systems in files that outlive boxes: disks of ended boxes, and
//!    `volumes.rs`.
//! 9. `walk.rs`: walks a directory that guests write to. `limited_reader.rs`: reads an archive of a
//!    guest.
//! 10. `snapshot.rs`: copies the private files of a box, and merges such copies.
//! 11. `changes/`: compares the files of a box with those it began with.
//! 12. `wire.rs`: messages between client and fork server; `raw/`: system calls; `error.rs`.
//!
//! # A program that creates boxes
//! Its `main` begins with [`serve_if_asked`], because the fork server is the same program started
//! again. The program calls [`ForkServer::start`] once and [`ForkServer::create`] for each box.

mod cgroup;
mod changes;
mod child;
mod client;
mod disk_file;
mod error;
mod identity;
mod init;
mod landlock;
mod limited_reader;
mod mounts;
mod network;
mod own_root;
mod peer;
mod plan;
mod probe;
mod quota;
mod raw;
mod record;
pub mod seccomp;
mod server;
mod snapshot;
mod volumes;
pub mod walk;
mod wire;

pub use cgroup::{CgroupFeature, Cgroups, DiskLimits, Usage};
pub use changes::{
    Applied, ApplyOptions, Change, ChangeKind, ChangePage, ChangedType, ComparedLayer, Comparison,
    LayerSource, Named, Selection,
};
pub use child::InitMain;
pub use client::{
    ChangesOf, ForkServer, PendingChanges, PendingSandbox, PendingSnapshot, Sandbox, serve_if_asked,
};
pub use disk_file::{repair_disk, settle_disk};
pub use error::{Error, Result};
pub use init::{
    ChildExit, Command, GuestThread, Init, Outer, ProcessTime, SpawnPlan, Stdio, release_memory,
};
pub use limited_reader::{ENTRY_NAMES_BYTES, LimitedReader};
pub use network::{
    EgressCookies, EgressSockets, FIRST_MARK, OWN_V4, OWN_V6, QueuedSyn, SynQueue, Verdict,
    socket_mark,
};
pub use own_root::own_all_files;
pub use peer::{peer_is_in_our_user_namespace, peer_pidfd};
pub use plan::{
    Caps, Guest, LAYERS_MAX, Layer, LayerKind, Limits, MOUNTS_MAX, Mount, Network, Root,
    SandboxPlan, Scratch, Source,
};
pub use probe::{Primitives, WORKSPACE as WORKSPACE_OVERLAY};
pub use quota::DirectoryQuota;
pub use raw::signal_fd;
pub use record::SandboxRecord;
pub use server::disks::{DISK_BYTES_PER_INODE, DiskKind};
pub use snapshot::{SnapshotLimits, SnapshotSize};
pub use volumes::{
    COPY as VOLUME_COPY, create_volume, open_volume_directory, resize_volume, sub_path_error,
    volume_used,
};
pub use wire::{ServerConfig, receive, send, socket_pair};
