//! The HTTP port: health, metrics, the RPC over a websocket, and the gateways.
//!
//! 1. `router`: the routes. `layers`: the checks before each of them, and the records after it.
//! 2. `auth`: tokens. `origin`: rejects web pages. `pages`: those that the operator allows. `body`: limits of request
//!    bodies.
//! 3. `health`, `metrics`, `websocket`, `rpc`, `openapi`, `ports`, `langbot`: the handlers of the routes.
//! 4. This file: connections, from the listener to the drain. `state`: their common state. `client_stream`: timeouts.

pub(crate) mod auth;
mod body;
mod client_stream;
mod health;
mod langbot;
mod layers;
mod metrics;
mod openapi;
mod origin;
pub(super) mod pages;
mod ports;
mod router;
mod rpc;
mod state;
mod websocket;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use box_gateways::e2b::hosts::{LOOPBACK_DOMAIN, rewrite};
use box_gateways::http::capability::SigningKey;
use box_gateways::langbot::{LangBot, TOKEN_VARIABLE};
use box_rpc::Router;
use box_transports::connection_limit::AcceptBackoff;
use box_transports::server::ServerMetrics;
use box_transports::websocket::is_host;
use box_transports::{Endpoint, HostPort};
use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tower_service::Service as _;

use self::auth::Auth;
use self::body::BodyLimit;
use self::client_stream::{ClientStream, Progress};
use self::layers::Client;
use self::origin::Hosts;
use self::pages::Origins;
use self::state::{HttpState, Phase, PortSettings};
use super::tokens::Tokens;
use crate::config::ServerSection;
use crate::embedded::EmbeddedServer;

/// The maximum time from the end of one request to the end of the next one's head.
///
/// A head that has begun has less time; `client_stream` has the other limits. E2B's client keeps an idle connection for
/// 300 s. The server waits longer, so that it never closes a connection on which the client sends its next request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(310);

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
        bound.map(Some).context("server.http")
    }

    async fn bind_at(text: &str, section: &ServerSection, tokens: &Tokens) -> Result<Self> {
        let (host, addresses) = resolve(text).await?;
        let loopback = addresses.iter().all(|address| address.ip().is_loopback());
        ensure!(
            loopback || !tokens.is_empty(),
            "{text} is not a loopback address; configure tokens (server.token_file, --token-file or BOXD_TOKENS)"
        );
        let origins = Origins::new(&section.allowed_origins, !tokens.is_empty())?;
        let tokens = (!tokens.is_empty()).then(|| tokens.to_rpc());
        let settings = PortSettings {
            auth: Auth { tokens, loopback },
            hosts: Hosts::new(&section.allowed_hosts, &host),
            origins,
            public_url: public_url(section),
            box_domain: box_domain(section),
            max_body: BodyLimit::of_megabytes(section.max_body_mb),
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
            "{text} is not a loopback address; set {TOKEN_VARIABLE} to the same secret on both sides"
        );
        let hosts = match &tokens {
            // A web page cannot send the token, so any host name is safe.
            Some(_) => Hosts::any(),
            None => Hosts::new(&section.allowed_hosts, &host),
        };
        let settings = PortSettings {
            auth: Auth { tokens, loopback },
            hosts,
            origins: Origins::none(),
            public_url: None,
            box_domain: None,
            max_body: BodyLimit::of_megabytes(section.max_body_mb),
            only_langbot: true,
        };
        Self::listen(&addresses, settings, section).await
    }

    async fn listen(
        addresses: &[SocketAddr],
        settings: PortSettings,
        section: &ServerSection,
    ) -> Result<Self> {
        let listener = TcpListener::bind(addresses).await;
        let listener = listener.with_context(|| shown(addresses))?;
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
        if let Some(url) = public_url(section) {
            return url;
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
        embedded: &EmbeddedServer,
        router: Router,
        key: SigningKey,
        langbot: &Arc<LangBot>,
    ) -> HttpServer {
        let langbot = Arc::clone(langbot);
        let boxes = (embedded.runtime.clone(), embedded.service.clone());
        let state = HttpState::new(router, boxes, langbot, self.settings, key, self.limit);
        let state = Arc::new(state);
        let (stop, stopping) = watch::channel(Stop::Never);
        let served = router::router(&state);
        let accepting = accept(self.listener, Arc::clone(&state), served, stopping);
        let accepting = tokio::spawn(accepting);
        HttpServer {
            address: self.address,
            state,
            accepting,
            stop,
        }
    }
}

/// Lists addresses for an error.
fn shown(addresses: &[SocketAddr]) -> String {
    let all: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    all.join(", ")
}

/// Returns the operator's URL of the port, if any.
fn public_url(section: &ServerSection) -> Option<String> {
    let url = section.public_url.as_ref();
    url.map(|url| url.trim_end_matches('/').to_owned())
}

/// Returns the operator's domain of boxes, if any.
fn box_domain(section: &ServerSection) -> Option<String> {
    let domain = section.box_domain.as_ref();
    domain.map(|domain| domain.trim_matches('.').to_ascii_lowercase())
}

/// Returns whether a host name ends in a port.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':')
        .is_some_and(|(name, _)| is_host(name, host))
}

/// Parses `HOST:PORT`.
pub(super) fn address(text: &str) -> Result<HostPort> {
    match format!("tcp://{text}").parse() {
        Ok(Endpoint::Tcp { address, .. }) => Ok(address),
        _ => bail!("{text:?} is not HOST:PORT"),
    }
}

/// Resolves `HOST:PORT` to the host name in requests and the addresses.
async fn resolve(text: &str) -> Result<(String, Vec<SocketAddr>)> {
    let named = address(text)?;
    let addresses = tokio::net::lookup_host((named.host.as_str(), named.port)).await;
    let addresses = addresses.with_context(|| text.to_owned())?.collect();
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
async fn accept(
    listener: TcpListener,
    state: Arc<HttpState>,
    routes: axum::Router,
    stop: watch::Receiver<Stop>,
) {
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
        let client = Client { peer, permit };
        let domain = state.gateways.box_domain.as_deref();
        let domain: Arc<str> = domain.unwrap_or(LOOPBACK_DOMAIN).into();
        tokio::spawn(serve(
            stream,
            client,
            (routes.clone(), domain),
            stop.clone(),
        ));
    }
}

/// The media types of streams, whose readers may pause between two messages.
const STREAMS: [&str; 4] = [
    "text/event-stream",
    "application/connect+",
    "application/x-ndjson",
    "application/ndjson",
];

/// Returns whether a response is a stream of messages.
fn is_stream(response: &Response) -> bool {
    let kind = response.headers().get(CONTENT_TYPE);
    let kind = kind.map_or(&b""[..], HeaderValue::as_bytes);
    STREAMS
        .iter()
        .any(|stream| kind.starts_with(stream.as_bytes()))
}

/// Answers the requests of one connection.
async fn serve(
    stream: TcpStream,
    client: Client,
    (routes, domain): (axum::Router, Arc<str>),
    mut stop: watch::Receiver<Stop>,
) {
    // Setting options fails only on a connection that is already closed.
    let _ = box_transports::tcp::prepare(&stream);
    let Client { peer, permit: held } = client.clone();
    let progress = Progress::new();
    let stream = ClientStream::new(stream, progress.clone());
    let service = service_fn(move |mut request: Request<Incoming>| {
        let answering = progress.request();
        request.extensions_mut().insert(client.clone());
        let (mut parts, body) = request.into_parts();
        rewrite(&domain, &mut parts);
        let responding = routes.clone().call(Request::from_parts(parts, body));
        async move {
            let response: Response = responding.await?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                answering.upgraded();
                return Ok(response);
            }
            if is_stream(&response) {
                answering.streams();
            }
            // The request lasts until its response is written.
            Ok::<_, Infallible>(response.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    let _ = &answering;
                    frame
                }))
            }))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_header_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
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

#[cfg(test)]
mod tests {
    use super::*;
    use box_transports::connection_limit::ConnectionLimit;

    #[test]
    fn streams_of_all_protocols_are_recognized() {
        let answer = |kind: &'static str| {
            let mut response = Response::new(Body::empty());
            let kind = HeaderValue::from_static(kind);
            response.headers_mut().insert(CONTENT_TYPE, kind);
            is_stream(&response)
        };
        for kind in [
            "text/event-stream; charset=utf-8",
            "application/connect+json",
            "application/connect+proto",
            "application/x-ndjson",
        ] {
            assert!(answer(kind), "{kind}");
        }
        assert!(!answer("application/json") && !is_stream(&Response::new(Body::empty())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_closes_its_idle_connection_before_the_server_does() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        /// The longest time for which a served client keeps an idle connection: E2B's.
        const KEPT: Duration = Duration::from_mins(5);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let (permit, _) = ConnectionLimit::new(1).acquire().unwrap();
        let (_stop, stopping) = watch::channel(Stop::Never);
        let routes = axum::Router::new().fallback(|| async { "answered" });
        let client_of = Client { peer, permit };
        tokio::spawn(serve(stream, client_of, (routes, "x".into()), stopping));
        let mut answer = Vec::new();
        while !answer.ends_with(b"answered") {
            assert_ne!(client.read_buf(&mut answer).await.unwrap(), 0);
        }
        let idle = tokio::time::Instant::now();
        client.read_to_end(&mut answer).await.unwrap();
        assert!(idle.elapsed() > KEPT + Duration::from_secs(5));
    }
}
