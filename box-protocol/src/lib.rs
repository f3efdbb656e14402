//! The contract of Box: every action, every model with its rules, every error.
//! No I/O, no policy, no state; client, service, runtime, agent and gateways all stand on it.
//!
//! # Reading order
//! 1. [`model`]: [`SpecDraft`] becomes a [`BoxSpec`], a box has a [`BoxSessionInfo`], an exec a
//!    [`BoxExecutionResult`]; [`first_conflict`] says whether a box may be reused, [`BoxProfile`] what a
//!    caller gets unasked.
//! 2. [`actions`]: what can be asked, noun by noun, each with when it is allowed and what it answers.
//!    `agent.*` is what a runtime asks inside a box.
//! 3. [`error`]: the twelve codes and their details.
//! 4. [`langbot`]: LangBot's names for our actions and its view of our models.
//! 5. [`catalog`]: volumes, templates and pools as the client models of seed 004 write them; no action
//!    serves them yet.
//!
//! # Nouns
//!
//! | noun | id | within | made by | ends by |
//! |---|---|---|---|---|
//! | box | [`SessionId`], and a [`Name`] that may change | server | `box.create`, `box.exec` | `box.delete`, its [`Lifetime`], an exec's timeout |
//! | command | [`CommandId`] | its box | `command.start`, `shell.run`, `box.exec` | its exit; the record is kept a while |
//! | shell | [`ShellId`] | its box | `shell.create` | `shell.delete`, idleness, its box |
//! | file | absolute path | its box | anything | anything |
//! | port | number; an open relay has a [`ConnId`] | its box; the caller's connection | `port.open` | either side |
//!
//! # How a rule is kept
//! A model with rules cannot be made without them: its fields are readable, but only a constructor or
//! a decoder makes one, and both go through the same check. A broken rule is an [`Invalid`], a field
//! and a sentence; it becomes the error `validation` with the field among the details. Secrets
//! ([`Env`] values, [`Blob`] contents) are not shown by `Debug`.

pub mod actions;
mod blob;
pub mod catalog;
mod decode;
mod env;
pub mod error;
mod ids;
mod invalid;
mod invisible;
pub mod langbot;
pub mod model;
mod note;
mod paths;
mod quoted;
#[cfg(feature = "schema")]
pub mod schema;
mod text;
mod time;

pub use blob::{Blob, MAX_CHUNK_BYTES};
pub use env::{DEFAULT_HOME, Env, default_path};
pub use error::{BoxError, Code};
pub use ids::{CommandId, ConnId, ItemId, MAX_ID_BYTES, Name, SessionId, ShellId, UploadId};
pub use invalid::Invalid;
pub use invisible::is_invisible;
pub use model::*;
pub use note::{MAX_NOTE_BYTES, Note};
pub use text::TextDecoder;
pub use time::UnixMs;
