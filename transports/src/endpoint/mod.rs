//! Endpoints: addresses as text, for configurations and command lines.
//!
//! [`Endpoint`] parses and prints; [`Endpoint::connect`] and [`Endpoint::listen`] act on it.
//!
//! ```
//! use box_transports::{ConnectOptions, Endpoint, ListenOptions};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let anywhere: Endpoint = "tcp://127.0.0.1:0".parse()?;
//! let mut listener = anywhere.listen(&ListenOptions::default()).await?;
//! let here = listener.local_endpoint().clone();
//! let options = ConnectOptions::default();
//! let (client, accepted) = tokio::join!(here.connect(&options), listener.accept());
//! let (mut send, _) = client?.split();
//! send.send("{}".to_owned()).await?;
//! send.flush().await?;
//! let (_, mut receive) = accepted?.connection.split();
//! assert_eq!(receive.receive().await?.as_deref(), Some("{}"));
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: this file, `parse`, `options`, `connect`, `listener`.

mod connect;
mod listener;
mod options;
mod parse;
#[cfg(test)]
mod tests;

use std::{fmt, path::PathBuf};

pub use self::{
    listener::{Accepted, Listener, PeerInfo, Refused, Transport},
    options::{ConnectOptions, ListenError, ListenOptions},
    parse::EndpointError,
};

/// Address of a peer or of a listener.
///
/// ```
/// use box_transports::Endpoint;
///
/// let endpoint: Endpoint = "ws://[::1]:5410/rpc/ws".parse()?;
/// assert_eq!(endpoint.to_string(), "ws://[::1]:5410/rpc/ws");
/// let command: Endpoint = "stdio:boxd stdio --name 'my box'".parse()?;
/// assert!(matches!(command, Endpoint::Stdio { command } if command[3] == "my box"));
/// # Ok::<(), box_transports::EndpointError>(())
/// ```
///
/// | text | meaning |
/// |---|---|
/// | `queue:NAME` | a joined queue in this process |
/// | `stdio:COMMAND ARGS` | a command to start; `stdio:` alone listens on the standard streams of this process |
/// | `tcp://HOST:PORT` | TCP |
/// | `tls://HOST:PORT` | TCP with TLS |
/// | `unix:PATH` | a Unix socket |
/// | `ws://HOST:PORT/PATH` | a websocket; the port is 80 and the path `/` unless given |
/// | `wss://HOST:PORT/PATH` | a websocket with TLS; the port is 443 unless given |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Endpoint {
    /// A joined queue in this process.
    Queue {
        /// Name of its listener.
        name: String,
    },
    /// A command, reached by its standard streams.
    Stdio {
        /// The program and its arguments; empty for the standard streams of this process.
        command: Vec<String>,
    },
    /// A byte stream over TCP.
    Tcp {
        /// Host and port.
        address: HostPort,
        /// Whether the stream uses TLS.
        tls: bool,
    },
    /// A Unix socket.
    Unix {
        /// Path of the socket.
        path: PathBuf,
    },
    /// A websocket.
    WebSocket {
        /// Host and port.
        address: HostPort,
        /// Whether the websocket uses TLS.
        tls: bool,
        /// Path of the request, with its slash; empty if not given.
        path: String,
    },
}

/// A host, by name or by address, and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// The name or address; an IPv6 address without its brackets.
    pub host: String,
    /// The port; 0 lets the kernel choose one for a listener.
    pub port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue { name } => write!(f, "queue:{name}"),
            Self::Stdio { command } => {
                f.write_str("stdio:")?;
                parse::write_words(f, command)
            }
            Self::Tcp {
                address,
                tls: false,
            } => write!(f, "tcp://{address}"),
            Self::Tcp { address, tls: true } => write!(f, "tls://{address}"),
            Self::Unix { path } => write!(f, "unix:{}", path.display()),
            Self::WebSocket { address, tls, path } => {
                let scheme = if *tls { "wss" } else { "ws" };
                write!(f, "{scheme}://{address}{path}")
            }
        }
    }
}
