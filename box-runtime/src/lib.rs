//! The runtime of Box: manages boxes and runs commands through their agents.
//!
//! # Reading order
//!
//! 1. `runtime`: [`BoxRuntime`], the handle, with one method per action. [`BoxRuntime::router`]
//!    serves the same methods over any connection.
//! 2. `registry`: the actor behind the handle. It owns the registry of boxes, finds or creates the
//!    box of a call, and passes the call to it. It never waits for a box.
//! 3. `entry`: the state and settings of a box; `persist` stores them for a later process.
//! 4. `box_actor`: one actor per box. Calls wait in its queue. The actor starts the box, grants
//!    execs their turns and ends the box. Slow, stuck and failed boxes affect only their actor.
//! 5. `access`, `data_plane` and `commands`: calls to the agent of a box. They bypass the queue and
//!    count as activity of the box. `start` starts every command and forwards its output; `exec` is
//!    a command with a turn in the queue. `output` validates the output that an agent sends;
//!    `audit` logs which caller started a command, and how the command ended.
//! 6. [`backend`]: the interface that creates boxes. A [`Backend`] returns a connection to a box's
//!    agent and never runs a command. `select` chooses the backend.
//! 7. [`native`]: boxes that need only the kernel of this machine, behind the feature `native`.
//! 8. [`egress`]: outgoing connections of a box with a network.
//! 9. [`fake`]: a scripted backend, behind the feature `fake`.
//! 10. [`Caller`], [`RuntimeConfig`]: the owner of a box, and all limits.
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
mod attend;
mod audit;
pub mod backend;
mod box_actor;
mod caller;
mod commands;
mod config;
mod data_plane;
#[cfg(feature = "native")]
pub mod egress;
mod ends;
mod env_file;
mod events;
mod exec;
#[cfg(feature = "fake")]
pub mod fake;
mod file_transfer;
mod handlers;
#[cfg(feature = "native")]
pub mod native;
mod order;
mod output;
mod registry;
mod runtime;
mod select;
mod shells;
mod shm;
mod start;
mod stats;
mod watch;

pub use backend::{
    AdoptedBox, Availability, Backend, Capabilities, Diagnosis, Difference, Facts, Feature, Reach,
    Readable, StartRequest, StartedBox,
};
pub use box_rpc::Caller;
pub use config::RuntimeConfig;
pub use data_plane::DataPlane;
pub use handlers::Served;
pub use order::Queued;
pub use runtime::BoxRuntime;
pub use shm::ShmPool;
