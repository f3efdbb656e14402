//! Gateways that translate foreign protocols to Box, one module per protocol.
//!
//! A gateway keeps only the state that its protocol needs, and calls boxes through a handle in this process. It opens
//! no sockets: the server hands it upgraded connections and authenticated callers.
//!
//! # Reading order
//! - [`langbot`]: LangBot's Box runtime, so that LangBot connects unmodified.

pub mod langbot;
