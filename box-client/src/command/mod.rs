//! Commands: starting them, reading their output across lost connections, and controlling them.
//!
//! 1. `builder`: [`CommandBuilder`], the parameters of a command.
//! 2. `chunk_stream`: the chunks of one call.
//! 3. `reader`: one chunk stream after the other, by the policy of [`reconnect`](crate::reconnect).
//! 4. `handle`: [`CommandHandle`] and [`CommandControl`].

mod builder;
mod chunk_stream;
mod handle;
mod reader;

pub(crate) use builder::millis;
pub use builder::{CommandBuilder, DEFAULT_CAPTURE_LIMIT, DEFAULT_IDLE_LIMIT};
pub(crate) use chunk_stream::{Begin, Key};
pub use handle::{CommandControl, CommandHandle};
pub(crate) use reader::Shared;
