//! `port.*`: connections to a port inside a running box, opened by its agent.

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::actions;
use crate::blob::Blob;
use crate::ids::{BoxId, ConnId};
use crate::time::UnixMs;

actions! {
    /// Connects to a port and streams the received bytes until either side closes. Dropping the
    /// call closes the connection. The first chunk carries the connection id. Errors: `not_found`
    /// (box), `unavailable` (no listener).
    PortOpen = "port.open": PortOpenParams => PortOpenResult | PortChunk;

    /// Writes to an open connection. Any caller that may use the box and knows the connection id
    /// may call it. The call returns when the bytes are written, which provides backpressure.
    /// Errors: `not_found` (connection), `conflict` (closed for writing).
    PortSend = "port.send": PortSendParams => Empty;

    /// Creates a URL that gives access to a port over HTTP without a token. Errors: `not_found`
    /// (box), `unsupported` (the server has no HTTP listener).
    PortShare = "port.share": PortShareParams => PortShareResult;
}

/// Parameters of `port.open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortOpenParams {
    /// The box.
    pub box_id: BoxId,
    /// The port, 1 to 65535.
    pub port: std::num::NonZeroU16,
}

/// Result of `port.open`, sent when the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortOpenResult {
    /// Bytes sent into the box.
    pub sent: u64,
    /// Bytes received from the box.
    pub received: u64,
}

/// A chunk of an open connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PortChunk {
    /// The connection id; always the first chunk.
    ConnId(ConnId),
    /// Bytes received from the box.
    Data(Blob),
}

/// Parameters of `port.send`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortSendParams {
    /// The box.
    pub box_id: BoxId,
    /// The connection.
    pub conn_id: ConnId,
    /// Bytes to send into the box; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Blob>,
    /// Whether to close the connection for writing afterwards; `false` if absent.
    #[serde(default)]
    pub close: bool,
}

/// Parameters of `port.share`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PortShareParams {
    /// The box.
    pub box_id: BoxId,
    /// The port, 1 to 65535. A listener is not required yet.
    pub port: std::num::NonZeroU16,
    /// How long the URL is valid, in milliseconds; for the life of the box if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<std::num::NonZeroU64>,
}

/// Result of `port.share`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortShareResult {
    /// The URL. It is a credential: any client that has it may use the port.
    pub url: String,
    /// When the URL expires; absent if it is valid for the life of the box.
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
