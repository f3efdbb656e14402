//! Who may send which control request. In LangBot's dialect they come with a context, as calls do, and only the server's
//! owner can read it.

use std::fmt;

use crate::error::RpcError;

/// Bytes of all files of one connection that have not been taken, unless a [`Warden`] says otherwise.
pub(crate) const FILE_BYTES: usize = 20 * 1024 * 1024;

/// Decides about `__ping`, `__cancel_action`, `__stream_ack` and `__file_chunk` of a [`Router`](crate::Router)'s connections.
/// Without one, whoever has the connection may send them all.
pub trait Warden: Send + Sync + 'static {
    /// Whether this request may be made in this context, which is JSON.
    fn check(&self, request: &str, context: Option<&str>) -> Result<(), RpcError>;

    /// Whether whoever asks in `context` may end, or take the chunks of, a call of this action that was made in the context
    /// `of`.
    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool;

    /// The most bytes of all files of one connection that have not been taken.
    fn file_bytes(&self) -> usize {
        FILE_BYTES
    }
}

impl fmt::Debug for dyn Warden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Warden")
    }
}
