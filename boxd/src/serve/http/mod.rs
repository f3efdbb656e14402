//! The HTTP port: health, metrics, the RPC over a websocket, and the gateways.
//!
//! 1. `routes`: the route of a path.
//! 2. `auth`: tokens. `signed_url`: addresses that need no token. `origin`: rejects web pages before either.
//! 3. `dispatch`: a request from its arrival to its response. `response`: responses and refusals. `body`: request bodies.
//! 4. `health`, `metrics`, `websocket`, `port_proxy`, `langbot`: the handlers of the routes.
//! 5. This file: connections, from the listener to the drain. `state`: their common state. `write_timeout`: write timeouts.

pub(crate) mod auth;
mod body;
mod dispatch;
mod header_filter;
mod health;
mod langbot;
mod metrics;
mod origin;
mod port_proxy;
mod response;
mod routes;
pub(crate) mod signed_url;
mod state;
mod token_filter;
mod websocket;
mod write_timeout;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use box_gateways::langbot::{LangBot, TOKEN_VARIABLE};
use box_rpc::Router;
use box_runtime::BoxRuntime;
use box_transports::Endpoint;
use box_transports::connection_limit::{AcceptBackoff, ConnectionPermit};
use box_transports::server::ServerMetrics;
use box_transports::websocket::is_host;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::auth::Auth;
use self::origin::Hosts;
use self::signed_url::SigningKey;
use self::state::{HttpState, Phase, PortSettings};
use self::write_timeout::WriteTimeout;
use super::tokens::Tokens;
use crate::config::ServerSection;

/// The maximum time from the end of one request to the end of the next one's head.
///
/// The server does not distinguish a stalled client from an idle one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may leave a response unread.
const UNREAD_TIMEOUT: Duration = Duration::from_mins(1);

/// The maximum length of a request's head.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// The extra time for a connection to end after its calls, to send a close message.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

/// A bound port that is not served yet.
#[derive(Debug)]
pub(crate) struct BoundPort {
    listener: TcpListener,
    address: SocketAddr,
    settings: PortSettings,
    limit: usize,
}

impl BoundPort {
    /// Binds the configured port, if any.
    ///
    /// A port that other machines can reach requires tokens.
    pub(super) async fn bind(section: &ServerSection, tokens: &Tokens) -> Result<Option<Self>> {
        let Some(text) = &section.http else {
            return Ok(None);
        };
        let bound = Self::bind_at(text, section, tokens).await;
        bound.map(Some).with_context(|| format!("HTTP at {text}"))
    }

    async fn bind_at(text: &str, section: &ServerSection, tokens: &Tokens) -> Result<Self> {
        let (host, addresses) = resolve(text).await?;
        let loopback = addresses.iter().all(|address| address.ip().is_loopback());
        ensure!(
            loopback || !tokens.is_empty(),
            "not a loopback address; configure tokens (server.token_file, --token-file or BOXD_TOKENS)"
        );
        let tokens = (!tokens.is_empty()).then(|| tokens.to_rpc());
        let settings = PortSettings {
            auth: Auth { tokens, loopback },
            hosts: Hosts::new(&section.allowed_hosts, &host),
            only_langbot: false,
        };
        Self::listen(&addresses, settings, section).await
    }

    /// Binds a port for LangBot alone.
    pub(crate) async fn bind_for_langbot(
        text: &str,
        section: &ServerSection,
        tokens: Option<box_rpc::Tokens>,
    ) -> Result<Self> {
        let (host, addresses) = resolve(text).await?;
        let loopback = addresses.iter().all(|address| address.ip().is_loopback());
        ensure!(
            loopback || tokens.is_some(),
            "not a loopback address; set {TOKEN_VARIABLE} to the same secret on both sides"
        );
        let hosts = match &tokens {
            // A web page cannot send the token, so any host name is safe.
            Some(_) => Hosts::any(),
            None => Hosts::new(&section.allowed_hosts, &host),
        };
        let settings = PortSettings {
            auth: Auth { tokens, loopback },
            hosts,
            only_langbot: true,
        };
        Self::listen(&addresses, settings, section).await
    }

    async fn listen(
        addresses: &[SocketAddr],
        settings: PortSettings,
        section: &ServerSection,
    ) -> Result<Self> {
        let listener = TcpListener::bind(addresses).await?;
        let address = listener.local_addr()?;
        if settings.auth.tokens.is_none() {
            tracing::warn!(%address, "no tokens are configured; every local process can use the HTTP port");
        }
        Ok(Self {
            listener,
            address,
            settings,
            limit: section.max_connections,
        })
    }

    /// Returns the public URL: the operator's, or one derived from the bound address.
    pub(super) fn url(&self, section: &ServerSection) -> String {
        if let Some(url) = &section.public_url {
            return url.trim_end_matches('/').to_owned();
        }
        let port = self.address.port();
        if !self.address.ip().is_unspecified() {
            return format!("http://{}", self.address);
        }
        match section.allowed_hosts.first() {
            Some(name) if has_port(name) => format!("http://{name}"),
            Some(name) => format!("http://{name}:{port}"),
            None => format!("http://localhost:{port}"),
        }
    }

    /// Serves the port; until it is [ready](HttpServer::ready), only health is answered.
    pub(crate) fn serve(
        self,
        runtime: BoxRuntime,
        router: Router,
        key: SigningKey,
        langbot: &Arc<LangBot>,
    ) -> HttpServer {
        let langbot = Arc::clone(langbot);
        let state = HttpState::new(router, runtime, langbot, self.settings, key, self.limit);
        let state = Arc::new(state);
        let (stop, stopping) = watch::channel(Stop::Never);
        let accepting = tokio::spawn(accept(self.listener, Arc::clone(&state), stopping));
        HttpServer {
            address: self.address,
            state,
            accepting,
            stop,
        }
    }
}

/// Returns whether a host name ends in a port.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':')
        .is_some_and(|(name, _)| is_host(name, host))
}

/// Resolves `HOST:PORT` to the host name in requests and the addresses.
async fn resolve(text: &str) -> Result<(String, Vec<SocketAddr>)> {
    let Ok(Endpoint::Tcp { address: named, .. }) = format!("tcp://{text}").parse() else {
        bail!("expected HOST:PORT");
    };
    let addresses = tokio::net::lookup_host((named.host.as_str(), named.port)).await?;
    let addresses = addresses.collect();
    let host = if named.host.contains(':') {
        format!("[{}]", named.host)
    } else {
        named.host
    };
    Ok((host, addresses))
}

/// How open connections should end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The server does not end them.
    Never,
    /// After the current request.
    Soon,
    /// Immediately.
    Now,
}

/// A port that is being served.
#[derive(Debug)]
pub(crate) struct HttpServer {
    address: SocketAddr,
    state: Arc<HttpState>,
    accepting: JoinHandle<()>,
    stop: watch::Sender<Stop>,
}

impl HttpServer {
    /// Returns the address that is actually bound.
    pub(crate) fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Starts serving all routes, and adds the metrics of the other listeners.
    pub(crate) fn ready(&self, listeners: Vec<ServerMetrics>) {
        self.state.counters.set_listeners(listeners);
        self.state.enter(Phase::Serving);
    }

    /// Stops accepting, and ends all connections within this time.
    ///
    /// The server answers running requests and sends websockets the reason.
    pub(crate) async fn close(mut self, within: Duration, restart: bool) {
        self.state.enter(Phase::Draining);
        self.accepting.abort();
        // The listener releases its address before the connections end.
        let _ = (&mut self.accepting).await;
        self.stop.send_replace(Stop::Soon);
        let all = self.state.permits.all_released();
        let all = tokio::time::timeout(within + CLOSE_GRACE, all);
        let sockets = self.state.sockets.close(within, restart);
        let ((), ended) = futures::future::join(sockets, all).await;
        if ended.is_err() {
            let left = self.state.permits.in_use();
            tracing::warn!(left, "closing HTTP connections that did not finish");
        }
        self.stop.send_replace(Stop::Now);
    }
}

/// Accepts connections up to the limit.
///
/// At the limit, a connection that has shown no token is closed to admit another.
async fn accept(listener: TcpListener, state: Arc<HttpState>, stop: watch::Receiver<Stop>) {
    let mut backoff = AcceptBackoff::default();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                backoff.pause(&error, &state.permits).await;
                continue;
            }
        };
        backoff.reset();
        let taken = state.permits.acquire();
        if !matches!(taken, Some((_, false))) {
            state.counters.count_rejected_connection();
        }
        let Some((permit, _)) = taken else {
            continue;
        };
        let (state, stop) = (Arc::clone(&state), stop.clone());
        tokio::spawn(serve(stream, peer, state, permit, stop));
    }
}

/// Answers the requests of one connection.
async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    state: Arc<HttpState>,
    permit: ConnectionPermit,
    mut stop: watch::Receiver<Stop>,
) {
    // Setting options fails only on a connection that is already closed.
    let _ = box_transports::tcp::prepare(&stream);
    let held = permit.clone();
    let service = service_fn(move |request| {
        let (state, permit) = (Arc::clone(&state), permit.clone());
        async move {
            let response = dispatch::respond(&state, permit, peer, request).await;
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(MAX_HEAD_BYTES)
        .serve_connection(
            TokioIo::new(WriteTimeout::new(stream, UNREAD_TIMEOUT)),
            service,
        )
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let mut is_draining = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%peer, %error, "HTTP connection ended");
                }
                break;
            }
            () = held.evicted() => {
                tracing::debug!(%peer, "closed an HTTP connection without a token to admit another");
                break;
            }
            changed = stop.changed() => {
                if changed.is_err() || *stop.borrow() == Stop::Now {
                    break;
                }
                if !is_draining {
                    is_draining = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
    drop(held);
}
