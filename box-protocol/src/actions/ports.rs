//! `port.*`: connections to a port inside a running box, dialled by its agent.

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::actions;
use crate::blob::Blob;
use crate::ids::{ConnId, SessionId};
use crate::time::UnixMs;

actions! {
    /// Connects to a port and streams what it says until either side closes; dropping the call closes.
    /// The first chunk names the relay. `not_found` (box), `unavailable` (nobody listens).
    PortOpen = "port.open": PortOpenParams => PortOpenResult | PortChunk;

    /// Writes to an open relay of the box, whoever of its owner opened it: to have its id is enough. Answered
    /// when written, which is the back-pressure. `not_found` (no such relay), `conflict` (closed for writing).
    PortSend = "port.send": PortSendParams => Empty;

    /// Hands out an address at which whoever has it reaches a port over HTTP, without a token. `not_found` (box),
    /// `unsupported` (a server without an HTTP port).
    PortShare = "port.share": PortShareParams => PortShareResult;
}

/// Parameters of `port.open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortOpenParams {
    /// The box.
    pub session_id: SessionId,
    /// The port; never 0.
    pub port: std::num::NonZeroU16,
}

/// Answer to `port.open`, once it is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortOpenResult {
    /// Bytes into the box.
    pub sent: u64,
    /// Bytes out of it.
    pub received: u64,
}

/// What an open relay streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PortChunk {
    /// First: the relay.
    ConnId(ConnId),
    /// Bytes out of the box.
    Data(Blob),
}

/// Parameters of `port.send`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortSendParams {
    /// The box.
    pub session_id: SessionId,
    /// The relay.
    pub conn_id: ConnId,
    /// Bytes into the box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// No more of them.
    #[serde(default)]
    pub close: bool,
}

/// Parameters of `port.share`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortShareParams {
    /// The box.
    pub session_id: SessionId,
    /// The port; never 0. Nobody needs to listen yet.
    pub port: std::num::NonZeroU16,
    /// For how long; as long as the box lives if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<std::num::NonZeroU64>,
}

/// Answer to `port.share`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortShareResult {
    /// The address. It is a credential: whoever has it may use the port.
    pub url: String,
    /// Until when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<UnixMs>,
}

impl std::fmt::Debug for PortShareResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortShareResult")
            .field("expires_at", &self.expires_at)
            .finish_non_exhaustive()
    }
}
