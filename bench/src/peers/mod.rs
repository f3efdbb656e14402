//! The other contestants. Each one has a `serve` and a `connect`.
//!
//! [`mux`] is written by hand, as well as we can and with nothing that an RPC could do without: what it costs is what the
//! work itself costs. The others are libraries, with their limits raised so that none of them gets in the way.

pub(crate) mod jsonrpsee;
pub(crate) mod mux;
pub(crate) mod mux_queue;
pub(crate) mod mux_tcp;
pub(crate) mod tarpc;

/// Room for a 15 MiB message and its envelope.
const MAX_MESSAGE: u32 = 32 * 1024 * 1024;

/// More calls than any load has in flight.
const MAX_IN_FLIGHT: usize = 4096;
