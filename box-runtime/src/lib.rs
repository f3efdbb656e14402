//! The runtime of Box: keeps the boxes, and runs commands in them through the agent in each.
//!
//! # Reading order
//!
//! 1. `runtime`: [`BoxRuntime`], the handle. One method an action; [`BoxRuntime::router`] serves the
//!    same methods over any connection.
//! 2. `registry`: the actor behind it. It owns the table of sessions, finds or makes the one a call is
//!    for, and hands the call over. It waits for nobody.
//! 3. `entry`: what is known of a box; `persist` writes it down for a later process.
//! 4. `box_actor`: one actor a box. Calls wait in its lane; it starts the box, grants execs their turns
//!    and ends the box. Whatever is slow, stuck or broken about a box happens here and nowhere else.
//! 5. `access`, `data_plane` and `commands`: calls to what is inside a box. They go to its agent past the lane, and keep the box
//!    in use. `start` starts every command and passes its output on; `exec` is a command with a turn in the lane. `output`
//!    checks what an agent says of output; `audit` logs who started what, and how it ended.
//! 6. [`backend`]: what makes boxes. A [`Backend`] hands over a connection to a box's agent and never
//!    runs a command. `select` decides which one is used.
//! 7. [`native`]: boxes made with nothing but this machine's kernel, behind the feature `native`.
//! 8. [`egress`]: the way out of a box with a network.
//! 9. [`fake`]: a scripted backend, behind the feature `fake`.
//! 10. [`Caller`], [`RuntimeConfig`]: whose box it is, and every limit.
//!
//! # What holds
//!
//! * Calls for one session are served in the order they arrive; sessions never wait for each other.
//! * A call that has begun is answered from the box it began in. One that still waits when its box
//!   ends is served by a new box.
//! * What an agent says is checked before it is believed: it lives with the guest.
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
