//! Commands: how one is asked for, how it is read across lost connections, and how it is spoken to.
//!
//! 1. `builder`: [`CommandBuilder`], what to run and how.
//! 2. `feed`: the stream of one call, whichever call it is.
//! 3. `reader`: feeds one after the other, by the policy of [`reconnect`](crate::reconnect).
//! 4. `handle`: [`CommandHandle`], and [`CommandControl`] beside it.

mod builder;
mod feed;
mod handle;
mod reader;

pub(crate) use builder::millis;
pub use builder::{CommandBuilder, DEFAULT_IDLE_LIMIT, DEFAULT_KEPT_BYTES};
pub(crate) use feed::{Begin, Key};
pub use handle::{CommandControl, CommandHandle};
pub(crate) use reader::Shared;
