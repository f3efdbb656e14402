//! Listener of every transport: limits, handshakes and temporary errors.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use box_rpc::{Connection, ConnectionError, Limits};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::{Endpoint, HostPort, ListenError, ListenOptions};
use crate::{
    bytes::Probe,
    connection_limit::{AcceptBackoff, ConnectionLimit, ConnectionPermit},
    line::Line,
    queue::QueueListener,
    stdio, tcp,
    unix::UnixListener,
    websocket::{CheckUpgrade, WebSocket},
};

/// Transport of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// A joined queue in this process.
    Queue,
    /// Standard streams.
    Stdio,
    /// TCP.
    Tcp,
    /// TCP with TLS.
    Tls,
    /// A Unix socket.
    Unix,
    /// A websocket, with or without TLS.
    WebSocket,
}

/// Information about a connected peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// Transport of the connection.
    pub transport: Transport,
    /// Origin in readable form: an address and port, or a word.
    pub address: String,
    /// User id of a local peer, as the kernel reports it.
    pub uid: Option<u32>,
    /// Whether the peer showed a certificate signed by a configured client authority.
    pub client_certificate: bool,
}

impl PeerInfo {
    fn new(transport: Transport, address: impl fmt::Display) -> Self {
        Self {
            transport,
            address: address.to_string(),
            uid: None,
            client_certificate: false,
        }
    }
}

/// A new connection.
pub struct Accepted {
    /// The connection; it holds its permit of the listener until both halves are gone.
    pub connection: Box<dyn Connection>,
    /// The peer.
    pub peer: PeerInfo,
}

impl fmt::Debug for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accepted")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// Counters, by reason, of connections that a listener did not return.
#[derive(Debug, Clone, Default)]
pub struct Refused(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    full: AtomicU64,
    handshake: AtomicU64,
    other_user: AtomicU64,
}

impl Refused {
    /// Connections closed at once because the listener was full.
    pub fn full(&self) -> u64 {
        self.0.full.load(Ordering::Relaxed)
    }

    /// Connections that failed, were refused in or did not finish their handshake.
    pub fn handshake(&self) -> u64 {
        self.0.handshake.load(Ordering::Relaxed)
    }

    /// Connections from another user.
    pub fn other_user(&self) -> u64 {
        self.0.other_user.load(Ordering::Relaxed)
    }
}

/// Accepts connections at an endpoint until it is dropped.
/// Connections it has returned stay open.
pub struct Listener {
    socket: Socket,
    connections: ConnectionLimit,
    backoff: AcceptBackoff,
    settings: Arc<Settings>,
    handshakes: JoinSet<Result<Accepted, ConnectionError>>,
    refused: Refused,
    local: Endpoint,
}

/// Source of raw connections.
enum Socket {
    Queue(QueueListener),
    /// The standard streams, which can be served once.
    Stdio {
        served: bool,
    },
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A raw stream and its origin.
enum RawConnection {
    Queue(crate::queue::Queue),
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream, u32),
}

/// Settings of a handshake.
struct Settings {
    limits: Limits,
    /// Timeout for all handshakes of one connection.
    handshake_timeout: Duration,
    tls: Option<Arc<ServerConfig>>,
    /// Whether TLS requires a verified client certificate.
    verifies_clients: bool,
    /// Set for websockets.
    upgrade_policy: Option<Arc<dyn CheckUpgrade>>,
}

impl Endpoint {
    /// Listens at the endpoint.
    /// `stdio:` serves the standard streams of this process, once.
    pub async fn listen(&self, options: &ListenOptions) -> Result<Listener, ListenError> {
        let (socket, local) = self.bind().await?;
        let tls = match (self, &options.tls) {
            (Self::Tcp { tls: true, .. } | Self::WebSocket { tls: true, .. }, Some(tls)) => {
                Some(tls)
            }
            (Self::Tcp { tls: true, .. } | Self::WebSocket { tls: true, .. }, None) => {
                return Err(ListenError::NoCertificate);
            }
            _ => None,
        };
        let upgrade_policy = match self {
            Self::WebSocket { path, .. } => Some(options.upgrade_policy_for(path)),
            _ => None,
        };
        let settings = Settings {
            limits: options.limits.clone(),
            handshake_timeout: options.handshake_timeout(),
            tls: tls.map(crate::tls::ServerTls::config).transpose()?,
            verifies_clients: tls.is_some_and(|tls| tls.client_ca.is_some()),
            upgrade_policy,
        };
        Ok(Listener {
            socket,
            connections: ConnectionLimit::new(options.max_connections),
            backoff: AcceptBackoff::default(),
            settings: Arc::new(settings),
            handshakes: JoinSet::new(),
            refused: Refused::default(),
            local,
        })
    }

    /// Returns the listening socket and its actual endpoint.
    async fn bind(&self) -> Result<(Socket, Self), ListenError> {
        let mut local = self.clone();
        let socket = match &mut local {
            Self::Queue { name } => {
                Socket::Queue(QueueListener::bind(name).ok_or(ListenError::InUse)?)
            }
            Self::Stdio { command } if command.is_empty() => Socket::Stdio { served: false },
            Self::Stdio { .. } => return Err(ListenError::Command),
            Self::Unix { path } => Socket::Unix(UnixListener::bind(path)?),
            Self::Tcp { address, .. } | Self::WebSocket { address, .. } => {
                Socket::Tcp(bind_tcp(address).await?)
            }
        };
        Ok((socket, local))
    }
}

/// Binds the address and stores the actual port in it.
async fn bind_tcp(address: &mut HostPort) -> Result<TcpListener, ListenError> {
    let socket = TcpListener::bind((address.host.as_str(), address.port))
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => ListenError::InUse,
            _ => error.into(),
        })?;
    address.port = socket.local_addr()?.port();
    Ok(socket)
}

impl Listener {
    /// Returns the actual endpoint, with the assigned port instead of port 0.
    pub fn local_endpoint(&self) -> &Endpoint {
        &self.local
    }

    /// Returns the counters of connections that the listener did not return.
    pub fn refused(&self) -> Refused {
        self.refused.clone()
    }

    /// Returns the next connection after its handshakes. Cancel safe.
    ///
    /// The listener does not return errors of a single connection or temporary errors. An error means that no further
    /// connection will come.
    pub async fn accept(&mut self) -> Result<Accepted, ConnectionError> {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Ok(accepted)) => return Ok(accepted),
                    outcome => {
                        self.refused.0.handshake.fetch_add(1, Ordering::Relaxed);
                        tracing::debug!(?outcome, "handshake failed");
                    }
                },
                raw = self.socket.next(&self.settings.limits) => match raw {
                    Ok(Some(Next::Raw(raw))) => {
                        if let Some(accepted) = self.admit(raw) {
                            return Ok(accepted);
                        }
                    }
                    Ok(Some(Next::Ready(accepted))) => return Ok(accepted),
                    Ok(None) => return Err(ConnectionError::Closed),
                    Err(error) => self.handle_accept_error(error).await?,
                },
            }
        }
    }

    /// Acquires a permit; returns the connection, or starts its handshakes.
    fn admit(&mut self, raw: RawConnection) -> Option<Accepted> {
        self.backoff.reset();
        let acquired = self.connections.acquire();
        if !matches!(acquired, Some((_, false))) {
            self.refused.0.full.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(limit = "max_connections", "connection limit reached");
        }
        let (permit, _) = acquired?;
        let limits = &self.settings.limits;
        match raw {
            RawConnection::Queue(queue) => {
                // The peer is in this process, and no other connection has arrived since.
                let _ = permit.confirm();
                Some(Accepted {
                    connection: Box::new(queue.with_permit(&permit)),
                    peer: PeerInfo::new(Transport::Queue, "this process"),
                })
            }
            RawConnection::Unix(stream, uid) => {
                let (read, write) = stream.into_split();
                let line = Line::with_permit(read, write, limits, &permit);
                Some(Accepted {
                    connection: Box::new(line.probed_by(Probe::EmptyWrite)),
                    peer: PeerInfo {
                        uid: Some(uid),
                        ..PeerInfo::new(Transport::Unix, "this machine")
                    },
                })
            }
            RawConnection::Tcp(stream, address) => {
                // Fails only when the peer is gone, and then the first read fails as well.
                let _ = tcp::prepare(&stream);
                if self.settings.tls.is_none() && self.settings.upgrade_policy.is_none() {
                    let (read, write) = stream.into_split();
                    return Some(Accepted {
                        connection: Box::new(Line::with_permit(read, write, limits, &permit)),
                        peer: PeerInfo::new(Transport::Tcp, address),
                    });
                }
                let settings = Arc::clone(&self.settings);
                self.handshakes
                    .spawn(async move { settings.handshake(stream, address, permit).await });
                None
            }
        }
    }

    /// Decides whether the listener keeps accepting after `error`.
    async fn handle_accept_error(&mut self, error: io::Error) -> Result<(), ConnectionError> {
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                self.refused.0.other_user.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("connection refused: another user");
            }
            io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted => {}
            io::ErrorKind::InvalidInput | io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => self.backoff.pause(&error, &self.connections).await,
        }
        Ok(())
    }
}

/// Next item of a socket.
enum Next {
    /// A raw stream that needs a permit.
    Raw(RawConnection),
    /// A connection that does not need a permit.
    Ready(Accepted),
}

impl Socket {
    /// Returns the next raw connection; `None` at the end. Cancel safe.
    async fn next(&mut self, limits: &Limits) -> io::Result<Option<Next>> {
        let raw = match self {
            Self::Queue(listener) => {
                return Ok(listener
                    .accept()
                    .await
                    .map(RawConnection::Queue)
                    .map(Next::Raw));
            }
            Self::Stdio { served: true } => return Ok(None),
            Self::Stdio { served } => {
                *served = true;
                let connection = stdio::serve(limits).map_err(|error| match error {
                    ConnectionError::Io(error) => {
                        io::Error::new(io::ErrorKind::InvalidInput, error)
                    }
                    other => io::Error::new(io::ErrorKind::InvalidInput, other),
                })?;
                return Ok(Some(Next::Ready(Accepted {
                    connection: Box::new(connection),
                    peer: PeerInfo::new(Transport::Stdio, "parent process"),
                })));
            }
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                RawConnection::Tcp(stream, address)
            }
            Self::Unix(listener) => {
                let (stream, uid) = listener.accept().await?;
                RawConnection::Unix(stream, uid)
            }
        };
        Ok(Some(Next::Raw(raw)))
    }
}

impl Settings {
    /// Performs all handshakes of an accepted stream within the timeout.
    async fn handshake(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        permit: ConnectionPermit,
    ) -> Result<Accepted, ConnectionError> {
        let handshakes = async {
            let Some(config) = &self.tls else {
                let (read, write) = stream.into_split();
                return self.frame(read, write, &permit, Transport::Tcp).await;
            };
            let stream = TlsAcceptor::from(Arc::clone(config)).accept(stream).await?;
            let (read, write) = tokio::io::split(stream);
            self.frame(read, write, &permit, Transport::Tls).await
        };
        let handshakes = tokio::time::timeout(self.handshake_timeout, handshakes);
        let (connection, transport) = tokio::select! {
            biased;
            done = handshakes => done.map_err(|_| ConnectionError::Stalled(self.handshake_timeout))??,
            () = permit.evicted() => return Err(ConnectionError::Closed),
        };
        Ok(Accepted {
            connection,
            peer: PeerInfo {
                client_certificate: self.verifies_clients,
                ..PeerInfo::new(transport, address)
            },
        })
    }

    /// Frames a stream, after the upgrade for a websocket.
    async fn frame<R, W>(
        &self,
        read: R,
        write: W,
        permit: &ConnectionPermit,
        plain: Transport,
    ) -> Result<(Box<dyn Connection>, Transport), ConnectionError>
    where
        R: tokio::io::AsyncRead + Unpin + Send + 'static,
        W: tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let Some(policy) = &self.upgrade_policy else {
            return Ok((
                Box::new(Line::with_permit(read, write, &self.limits, permit)),
                plain,
            ));
        };
        let socket =
            WebSocket::accept_with_permit(read, write, &self.limits, policy.as_ref(), permit)
                .await?;
        Ok((Box::new(socket), Transport::WebSocket))
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local)
            .field("connections", &self.connections)
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}
