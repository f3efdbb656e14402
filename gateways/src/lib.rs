//! Gateways that translate foreign protocols to Box, one module per protocol.
//!
//! A gateway keeps only the state that its protocol needs, and calls boxes through a handle in this process. It opens
//! no sockets: the server hands it upgraded connections and authenticated callers.
//!
//! # Reading order
//! - [`http`]: parts that the HTTP routes of all protocols share.
//! - [`langbot`]: LangBot's Box runtime, so that LangBot connects unmodified.
//! - [`opensandbox`]: OpenSandbox's server and its daemon, so that its SDKs connect unmodified.
//! - [`langsmith`]: LangSmith's sandbox API, so that its SDKs connect unmodified.
//! - [`aio`]: AIO Sandbox, so that its SDK and deer-flow connect unmodified.
//! - [`e2b`]: E2B's API and its daemon, so that its SDKs connect unmodified.
//! - [`mcp`]: the Model Context Protocol, for tools of language models.
//! - [`codex`]: the exec-server of OpenAI Codex, so that Codex runs its commands in boxes.
//! - `target`: the runtime or server that has the boxes of the last two.

pub mod aio;
pub mod codex;
pub mod e2b;
pub mod http;
pub mod langbot;
pub mod langsmith;
pub mod mcp;
pub mod opensandbox;
mod target;
