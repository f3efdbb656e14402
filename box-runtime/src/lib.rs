//! The runtime of Box: manages boxes and runs commands through their agents.
//!
//! # Reading order
//!
//! 1. `runtime.rs`: [`BoxRuntime`], the handle, with one method per action. `handlers.rs` serves the
//!    same methods over any connection ([`BoxRuntime::router`]). `config.rs`: [`RuntimeConfig`], all
//!    limits.
//! 2. `registry/`: the actor behind the handle. It owns the registry of boxes, finds or creates the
//!    box of a call, and passes the call to it. It never waits for a box. `caller.rs`: the boxes
//!    that a [`Caller`] can see.
//! 3. `box_actor/`: one actor per box. Calls wait in its queue. The actor starts the box, grants
//!    execs their turns and ends the box. Slow, stuck and failed boxes affect only their actor.
//!    `box_actor/entry.rs` holds the state and settings of a box, `watched.rs` a value that tasks can
//!    wait for.
//! 4. `exec.rs`: a command with a turn in the queue. `commands.rs`, `shells.rs` and `watch.rs`:
//!    commands without one. `start.rs` starts every command and forwards its output; `output.rs`
//!    validates that output. `environment.rs`: the environment of commands.
//! 5. `data_plane.rs`: calls to the agent of a box, past the queue, for files and ports.
//!    `call_order.rs` keeps calls to one object in order, `health_check.rs` detects an agent that
//!    does not answer. `file_transfer.rs` and `shm.rs`: data in shared memory.
//! 6. `events.rs`, `audit.rs`, `stats.rs`, `ended_boxes.rs`: reports about boxes and commands.
//! 7. `catalog/`: items that outlive boxes, and their uses. `pools/`: boxes started in advance.
//!    `changes.rs`: what a box has changed.
//! 8. [`backend`]: the interface that creates boxes. A [`Backend`] returns a connection to a box's
//!    agent and never runs a command. `backend_choice.rs` chooses the backend. `adoption.rs` adopts
//!    the boxes of an earlier process. `volumes.rs`: the volumes of a backend.
//! 9. [`native`]: boxes that need only the kernel of this machine, behind the feature `native`.
//!    [`egress`]: outgoing connections of a box with a network.
//! 10. `images/`: the images of boxes, and `image.*`, behind the feature `native`.
//! 11. [`fake`]: a scripted backend, behind the feature `fake`.
//!
//! # Guarantees
//!
//! * The runtime serves the calls of one box in the order of arrival. Boxes never wait for each
//!   other.
//! * The box in which a call began answers it. If a box ends, a new box serves the calls that still
//!   wait.
//! * The runtime validates everything an agent sends, because the guest may control the agent.
//! * Dropping the last handle ends every box.

mod adoption;
mod audit;
pub mod backend;
mod backend_choice;
mod box_actor;
mod call_order;
mod caller;
mod catalog;
mod changes;
mod commands;
mod config;
mod data_plane;
#[cfg(feature = "native")]
pub mod egress;
mod ended_boxes;
mod environment;
mod events;
mod exec;
#[cfg(feature = "fake")]
pub mod fake;
mod file_transfer;
#[cfg(any(all(test, feature = "native"), feature = "fuzzing"))]
pub mod fuzzing;
mod handlers;
mod health_check;
mod history;
#[cfg(feature = "native")]
mod images;
#[cfg(not(feature = "native"))]
#[path = "images/none.rs"]
mod images;
mod layers;
#[cfg(feature = "native")]
pub mod native;
mod output;
mod pools;
mod records;
mod registry;
mod runtime;
mod shells;
mod shm;
mod snapshots;
mod start;
mod state_directory;
mod stats;
mod volumes;
mod watch;
mod watched;

pub use backend::{
    AdoptedBox, Availability, Backend, Capabilities, ChangeList, ChangesRequest, Diagnosis,
    DiffBase, Difference, Facts, Feature, FoundBoxes, ImageRoot, Layer, LayerFiles, LayerKind,
    Reach, Readable, Snapshot, SnapshotRequest, StartRequest, StartedBox,
};
pub use box_rpc::Caller;
pub use call_order::OrderTicket;
pub use config::RuntimeConfig;
pub use data_plane::DataPlane;
pub use handlers::RuntimeActions;
#[cfg(feature = "native")]
pub use images::{ImagesConfig, PullRule, archive_if_asked};
pub use runtime::BoxRuntime;
pub use shm::ShmPool;
pub use volumes::{MountedVolume, Volumes};
