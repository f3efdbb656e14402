//! Other people's protocols over Box: translation only, one module a protocol. A gateway keeps what only its
//! world knows, calls boxes through a handle in this process, and knows no sockets: whoever listens hands it
//! connections that are upgraded and callers that are known.
//!
//! # Reading order
//! - [`langbot`]: LangBot's Box runtime, so that LangBot connects unmodified.

pub mod langbot;
