//! The other contestants; each one has a `serve` and a `connect`.
//!
//! [`mux`] is handwritten with only the parts that an RPC needs, so its cost is that of the work itself. The others are
//! libraries with raised limits, so that no limit affects the results.

pub(crate) mod jsonrpsee;
pub(crate) mod mux;
pub(crate) mod mux_queue;
pub(crate) mod mux_tcp;
pub(crate) mod tarpc;

/// The maximum message length: 15 MiB and an envelope.
const MAX_MESSAGE: u32 = 32 * 1024 * 1024;

/// The maximum number of calls in flight, which no load reaches.
const MAX_IN_FLIGHT: usize = 4096;
