//! The models: the spec of a box, its record, and the result of a command.

#![allow(
    clippy::wildcard_imports,
    unused_parens,
    reason = "the macros of `fields` name what it imports, and types of several words in parentheses"
)]

mod adjusted;
mod bounds;
mod changes;
mod command;
mod compat;
mod execution;
mod fields;
mod gateway_name;
mod info;
mod mount;
mod network;
mod parts;
mod profile;
mod rules;
mod spec;
mod template;
mod volume;

pub use adjusted::Adjusted;
pub(crate) use bounds::few;
pub use bounds::{
    MAX_ARGUMENTS, MAX_ENTRIES, MAX_LABEL_BYTES, MAX_LABELS, MAX_MOUNTS, MAX_TEXT_BYTES,
    MAX_WORD_BYTES, check_labels, check_mounts,
};
pub use changes::{DefaultsChange, LifetimeChange};
pub use command::{CommandInfo, CommandState, PerStream, Program, Role, RunError};
pub use compat::{Conflict, Fixed, first_conflict};
pub use execution::{BoxExecutionResult, ExecutionStatus, Exit, ExitWhy, Killed};
pub use gateway_name::GatewayName;
pub use info::{Access, BoxInfo, BoxState, Checkpoint, ExecStatus};
pub use mount::{BoxMountSpec, HostPathMode};
pub use network::{Host, HostName, NetworkDefault, NetworkPolicy, NetworkRule, NetworkVerdict};
pub use parts::{Defaults, Guest, Labels, Lifetime, LifetimeAction, Main, Prepare, PullPolicy};
pub use profile::{BoxProfile, Lockable};
pub use spec::{BoxSpec, DEFAULT_MOUNT_PATH, HOST_IMAGE, Network, SpecDraft};
pub use template::first_difference;
pub use volume::VolumeMount;
