//! The contract of Box: every action, model and error.
//!
//! The crate has no I/O, no policy and no state. Client, service, runtime, agent and gateways
//! share it.
//!
//! # Reading order
//! 1. [`model`]: [`SpecDraft`] becomes a [`BoxSpec`], a box has a [`BoxInfo`], an exec a
//!    [`BoxExecutionResult`]. [`first_conflict`] decides whether a box can be reused, and
//!    [`BoxProfile`] holds the defaults and limits of a caller.
//! 2. [`actions`]: every action by noun, with its preconditions, parameters and result.
//!    A runtime calls `agent.*` on the agent inside a box.
//! 3. [`error`]: the error codes and their details.
//! 4. [`catalog`]: items that outlive boxes, such as volumes and templates.
//!
//! # Nouns
//!
//! | noun | id | unique within | created by | ended by |
//! |---|---|---|---|---|
//! | box | [`BoxId`], and a [`Name`] that the owner can change | server | `box.create`, `box.exec` | `box.delete`, its [`Lifetime`], an exec's timeout |
//! | command | [`CommandId`] | its box | `command.start`, `shell.run`, `box.exec` | its exit; the record is kept for a time |
//! | shell | [`ShellId`] | its box | `shell.create` | `shell.delete`, its idle limit, its box |
//! | file | absolute path | its box | any process of the box, `file.*` | any process of the box, `file.*` |
//! | item | [`ItemId`], and a [`Name`] that the owner can change | server | `catalog.put` | `catalog.delete` |
//! | image | digest, and names that can move | server | `image.pull`, `image.import` | `image.remove`, `image.prune` |
//! | port | number; an open connection has a [`ConnId`] | its box | `port.open` | either side |
//!
//! # Validation
//! A model with rules has readable fields, but only a constructor or a decoder creates it, and both
//! run the same check. A violation is an [`Invalid`]: a field and the rule. It becomes the error
//! `validation` with the field in its details. `Debug` does not show secrets ([`Env`] values,
//! [`Blob`] contents).

pub mod actions;
mod blob;
pub mod catalog;
mod decode;
mod env;
pub mod error;
mod ids;
mod invalid;
mod invisible;
mod json_string;
pub mod model;
mod note;
pub mod paths;
#[cfg(feature = "schema")]
pub mod schema;
mod text;
mod time;

pub use blob::{Blob, MAX_CHUNK_BYTES};
pub use env::{DEFAULT_HOME, Env, default_path};
pub use error::{BoxError, Code};
pub use ids::{
    BoxId, CommandId, ConnId, ItemId, ItemRef, LayerId, MAX_ID_BYTES, Name, ShellId, UploadId,
};
pub use invalid::Invalid;
pub use invisible::is_invisible;
pub use model::*;
pub use note::{MAX_NOTE_BYTES, Note};
pub use text::TextDecoder;
pub use time::UnixMs;
