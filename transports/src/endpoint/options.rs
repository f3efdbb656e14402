//! Options for connecting and listening.

use std::{fmt, io, sync::Arc, time::Duration};

use box_rpc::Limits;

use crate::{
    tls::{ClientTls, ServerTls, TlsError},
    websocket::{CheckUpgrade, UpgradePolicy},
};

/// Options for connecting. The default suits a near and trusted peer.
#[derive(Clone)]
pub struct ConnectOptions {
    /// Limits of the connection.
    pub limits: Limits,
    /// TLS settings for `tls://` and `wss://`.
    pub tls: ClientTls,
    /// Headers of a websocket's request, such as `Authorization`.
    pub headers: Vec<(String, String)>,
    /// Timeout from name resolution to the end of the last handshake.
    pub timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            tls: ClientTls::default(),
            headers: Vec::new(),
            timeout: Duration::from_secs(10),
        }
    }
}

/// Shows the names of headers, never their values.
impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("ConnectOptions")
            .field("limits", &self.limits)
            .field("tls", &self.tls)
            .field("headers", &names)
            .field("timeout", &self.timeout)
            .finish()
    }
}

/// Options for listening.
#[derive(Clone)]
pub struct ListenOptions {
    /// Limits of each connection.
    /// Handshakes time out after `first_message`, or after ten seconds.
    pub limits: Limits,
    /// TLS settings, required for `tls://` and `wss://`.
    pub tls: Option<ServerTls>,
    /// Maximum number of concurrent connections.
    ///
    /// Above it, the listener closes the oldest connection with an unidentified peer. If every peer is identified, it
    /// closes the new connection immediately. It counts both.
    pub max_connections: usize,
    /// Decides which clients may open a websocket.
    /// `None` is [`UpgradePolicy::new`], with the path of the endpoint if it has one.
    pub upgrade_policy: Option<Arc<dyn CheckUpgrade>>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            limits: Limits::network(),
            tls: None,
            max_connections: 1024,
            upgrade_policy: None,
        }
    }
}

impl ListenOptions {
    /// Returns the policy for an endpoint with this path.
    pub(super) fn upgrade_policy_for(&self, path: &str) -> Arc<dyn CheckUpgrade> {
        match &self.upgrade_policy {
            Some(policy) => Arc::clone(policy),
            None if path.is_empty() => Arc::new(UpgradePolicy::new()),
            None => Arc::new(UpgradePolicy::new().paths([path])),
        }
    }

    /// Returns the handshake timeout of a new connection.
    pub(super) fn handshake_timeout(&self) -> Duration {
        self.limits.first_message.unwrap_or(Duration::from_secs(10))
    }
}

impl fmt::Debug for ListenOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenOptions")
            .field("limits", &self.limits)
            .field("tls", &self.tls)
            .field("max_connections", &self.max_connections)
            .finish_non_exhaustive()
    }
}

/// Error of listening at an endpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Another process listens at the endpoint.
    #[error("address: in use by another process")]
    InUse,
    /// The path is a file other than a socket; the listener leaves it alone.
    #[error("path: exists and is not a socket; remove it or choose another path")]
    NotASocket,
    /// `tls://` and `wss://` need a certificate.
    #[error("tls: no certificate; configure a certificate and a key")]
    NoCertificate,
    /// The endpoint is a command; only `stdio:` alone can listen.
    #[error("stdio: cannot listen at a command; omit the command to serve the standard streams")]
    Command,
    /// The certificates or keys are unusable.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The operating system returned an error.
    #[error("cannot listen: {0}")]
    Io(#[from] io::Error),
}
