//! What connecting and listening need besides the address.

use std::{fmt, io, sync::Arc, time::Duration};

use box_rpc::Limits;

use crate::{
    tls::{ClientTls, ServerTls, TlsError},
    websocket::{Admit, Gate},
};

/// How to connect. The default suits a peer that is near and trusted.
#[derive(Clone)]
pub struct ConnectOptions {
    /// The caps of the connection.
    pub limits: Limits,
    /// For `tls://` and `wss://`.
    pub tls: ClientTls,
    /// Headers of a websocket's request, such as `Authorization`.
    pub headers: Vec<(String, String)>,
    /// The time for everything from looking up the name to the end of every handshake.
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

/// How to listen.
#[derive(Clone)]
pub struct ListenOptions {
    /// The caps of each connection. Handshakes have the time of `first_message`, or ten seconds.
    pub limits: Limits,
    /// Needed for `tls://` and `wss://`.
    pub tls: Option<ServerTls>,
    /// Connections at once. Beyond: the oldest whose peer has not said who it is makes room; where there is none, the new
    /// one is closed as soon as it is accepted. Both are counted.
    pub max_connections: usize,
    /// Who may open a websocket. `None` is [`Gate::new`], with the path of the endpoint if it has
    /// one.
    pub gate: Option<Arc<dyn Admit>>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            limits: Limits::network(),
            tls: None,
            max_connections: 1024,
            gate: None,
        }
    }
}

impl ListenOptions {
    /// The gate to use at an endpoint with this path.
    pub(super) fn gate_at(&self, path: &str) -> Arc<dyn Admit> {
        match &self.gate {
            Some(gate) => Arc::clone(gate),
            None if path.is_empty() => Arc::new(Gate::new()),
            None => Arc::new(Gate::new().paths([path])),
        }
    }

    /// The time a new connection has for its handshakes.
    pub(super) fn handshake(&self) -> Duration {
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

/// Why an endpoint cannot be listened at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Somebody listens there already.
    #[error("somebody listens there already")]
    InUse,
    /// There is a file that is no socket, and it is left alone.
    #[error("the path is taken by something that is no socket")]
    NotASocket,
    /// `tls://` and `wss://` need a certificate.
    #[error("TLS needs a certificate and a key")]
    NoCertificate,
    /// A command cannot be listened at: `stdio:` alone serves our own standard streams.
    #[error("a command is connected to, not listened at; stdio: alone serves the standard streams")]
    Command,
    /// The certificates or keys are unusable.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The operating system said no.
    #[error("cannot listen: {0}")]
    Io(#[from] io::Error),
}
