//! The HTTP port: health, metrics, the RPC over a websocket, and the gateways.
//!
//! 1. `routes`: the route of a path.
//! 2. `auth`: tokens. `caps`: addresses that need no token. `browsers`: rejects web pages before either.
//! 3. `dispatch`: a request from its arrival to its answer. `answer`: answers and refusals. `body`: request bodies.
//! 4. `health`, `metrics`, `websocket`, `ports`, `langbot`: the handlers of the routes.
//! 5. This file: connections, from the listener to the drain. `shared`: their common state. `stream`: write timeouts.

mod answer;
pub(crate) mod auth;
mod body;
mod browsers;
pub(crate) mod caps;
mod dispatch;
mod health;
mod langbot;
mod metrics;
mod page;
mod ports;
mod routes;
mod shared;
mod stream;
mod websocket;
mod withhold;

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
use self::browsers::Hosts;
use self::caps::Key;
use self::shared::{Phase, Shared, Terms};
use self::stream::Patient;
use super::tokens::Tokens;
use crate::config::ServerSection;

/// The maximum time from the end of one request to the end of the next one's head.
///
/// The server does not distinguish a stalled client from an idle one.
const HEAD: Duration = Duration::from_secs(30);

/// How long a client may leave an answer unread.
const UNREAD: Duration = Duration::from_mins(1);

/// The maximum length of a request's head.
const HEAD_BYTES: usize = 64 * 1024;

/// The extra time for a connection to end after its calls, to send a close message.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A bound port that is not served yet.
#[derive(Debug)]
pub(crate) struct Port {
    listener: TcpListener,
    address: SocketAddr,
    terms: Terms,
    limit: usize,
}

impl Port {
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
        let (host, found) = resolved(text).await?;
        let loopback = found.iter().all(|address| address.ip().is_loopback());
        ensure!(
            loopback || !tokens.is_empty(),
            "beyond loopback callers need tokens (server.token_file, --token-file, BOXD_TOKENS)"
        );
        let tokens = (!tokens.is_empty()).then(|| tokens.for_hello());
        let terms = Terms {
            auth: Auth { tokens, loopback },
            hosts: Hosts::new(&section.allowed_hosts, &host),
            only_langbot: false,
        };
        Self::listen(&found, terms, section).await
    }

    /// Binds a port for LangBot alone.
    pub(crate) async fn bind_for_langbot(
        text: &str,
        section: &ServerSection,
        tokens: Option<box_rpc::Tokens>,
    ) -> Result<Self> {
        let (host, found) = resolved(text).await?;
        let loopback = found.iter().all(|address| address.ip().is_loopback());
        ensure!(
            loopback || tokens.is_some(),
            "beyond loopback LangBot needs a token: set {TOKEN_VARIABLE} to the same secret on both sides"
        );
        let hosts = match &tokens {
            // A web page cannot send the token, so any host name is safe.
            Some(_) => Hosts::any(),
            None => Hosts::new(&section.allowed_hosts, &host),
        };
        let terms = Terms {
            auth: Auth { tokens, loopback },
            hosts,
            only_langbot: true,
        };
        Self::listen(&found, terms, section).await
    }

    async fn listen(found: &[SocketAddr], terms: Terms, section: &ServerSection) -> Result<Self> {
        let listener = TcpListener::bind(found).await?;
        let address = listener.local_addr()?;
        if terms.auth.tokens.is_none() {
            tracing::warn!(%address, "no token: every program of this machine may use the HTTP port");
        }
        Ok(Self {
            listener,
            address,
            terms,
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

    /// Serves the port; until it is [ready](Http::ready), only health is answered.
    pub(crate) fn serve(
        self,
        runtime: BoxRuntime,
        router: Router,
        key: Key,
        langbot: &Arc<LangBot>,
    ) -> Http {
        let langbot = Arc::clone(langbot);
        let shared = Shared::new(router, runtime, langbot, self.terms, key, self.limit);
        let shared = Arc::new(shared);
        let (stop, stopping) = watch::channel(Stop::Never);
        let accepting = tokio::spawn(accept(self.listener, Arc::clone(&shared), stopping));
        Http {
            address: self.address,
            shared,
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
async fn resolved(text: &str) -> Result<(String, Vec<SocketAddr>)> {
    let Ok(Endpoint::Tcp { address: named, .. }) = format!("tcp://{text}").parse() else {
        bail!("it is HOST:PORT");
    };
    let found = tokio::net::lookup_host((named.host.as_str(), named.port)).await?;
    let found = found.collect();
    let host = if named.host.contains(':') {
        format!("[{}]", named.host)
    } else {
        named.host
    };
    Ok((host, found))
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
pub(crate) struct Http {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
    stop: watch::Sender<Stop>,
}

impl Http {
    /// Returns the address that is actually bound.
    pub(crate) fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Starts serving all routes, and adds the metrics of the other listeners.
    pub(crate) fn ready(&self, listeners: Vec<ServerMetrics>) {
        self.shared.counters.watch(listeners);
        self.shared.enter(Phase::Serving);
    }

    /// Stops accepting, and ends all connections within this time.
    ///
    /// The server answers running requests and sends websockets the reason.
    pub(crate) async fn close(mut self, within: Duration, restart: bool) {
        self.shared.enter(Phase::Draining);
        self.accepting.abort();
        // The listener releases its address before the connections end.
        let _ = (&mut self.accepting).await;
        self.stop.send_replace(Stop::Soon);
        let all = self.shared.places.all_released();
        let all = tokio::time::timeout(within + LAST_WORDS, all);
        let sockets = self.shared.sockets.close(within, restart);
        let ((), ended) = futures::future::join(sockets, all).await;
        if ended.is_err() {
            let left = self.shared.places.in_use();
            tracing::warn!(left, "HTTP connections are cut");
        }
        self.stop.send_replace(Stop::Now);
    }
}

/// Accepts connections up to the limit.
///
/// At the limit, a connection that has shown no token is closed to make room.
async fn accept(listener: TcpListener, shared: Arc<Shared>, stop: watch::Receiver<Stop>) {
    let mut rests = AcceptBackoff::default();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                rests.pause(&error, &shared.places).await;
                continue;
            }
        };
        rests.reset();
        let taken = shared.places.acquire();
        if !matches!(taken, Some((_, false))) {
            shared.counters.found_no_place();
        }
        let Some((place, _)) = taken else {
            continue;
        };
        let (shared, stop) = (Arc::clone(&shared), stop.clone());
        tokio::spawn(serve(stream, peer, shared, place, stop));
    }
}

/// Answers the requests of one connection.
async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    shared: Arc<Shared>,
    place: ConnectionPermit,
    mut stop: watch::Receiver<Stop>,
) {
    // Setting options fails only on a connection that is already closed.
    let _ = box_transports::tcp::prepare(&stream);
    let held = place.clone();
    let service = service_fn(move |request| {
        let (shared, place) = (Arc::clone(&shared), place.clone());
        async move {
            let answer = dispatch::answer(&shared, place, peer, request).await;
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_header_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(Patient::new(stream, UNREAD)), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let mut asked = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%peer, %error, "HTTP connection over");
                }
                break;
            }
            () = held.evicted() => {
                tracing::debug!(%peer, "HTTP connection without a token made room for another");
                break;
            }
            changed = stop.changed() => {
                if changed.is_err() || *stop.borrow() == Stop::Now {
                    break;
                }
                if !asked {
                    asked = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
    drop(held);
}
