//! The RPC listeners, and how each authenticates its callers.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use box_gateways::langbot::ALL_CODECS;
use box_rpc::{Auth, Caller, Codecs, Options, Router};
use box_transports::server::{Server, ServerMetrics};
use box_transports::tls::{Identity, Pem, ServerTls};
use box_transports::websocket::UpgradePolicy;
use box_transports::{Endpoint, ListenOptions, PeerInfo};

use super::tokens::Tokens;
use crate::config::ServerSection;
use crate::connect::parse_endpoint;

/// All open listeners.
#[derive(Debug)]
pub(super) struct Listeners {
    servers: Vec<Server>,
}

impl Listeners {
    /// Listens at every endpoint; if one fails, at none.
    pub(super) async fn open(
        section: &ServerSection,
        listen: &[String],
        router: &Router,
        tokens: &Tokens,
    ) -> Result<Self> {
        let mut servers = Vec::new();
        for text in listen {
            let endpoint = parse_endpoint(text)?;
            let auth_rule = AuthRule::new(&endpoint, section, tokens)
                .with_context(|| format!("endpoint {text}"))?;
            if matches!(auth_rule, AuthRule::Loopback) {
                tracing::warn!(%endpoint, "no tokens are configured; every local process can connect");
            }
            let options = ListenOptions {
                tls: tls(&endpoint, section).with_context(|| format!("endpoint {text}"))?,
                max_connections: section.max_connections,
                upgrade_policy: Some(Arc::new(origin_check(&endpoint, section, &auth_rule))),
                ..ListenOptions::default()
            };
            let listener = endpoint.listen(&options).await;
            let listener = listener.with_context(|| format!("endpoint {text}"))?;
            let limits = options.limits;
            let each = move |_: &PeerInfo| auth_rule.options(limits.clone());
            servers.push(Server::start(listener, router.clone(), each));
        }
        Ok(Self { servers })
    }

    /// Returns the addresses that are actually bound.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.servers
            .iter()
            .map(|server| server.endpoint().to_string())
            .collect()
    }

    /// Returns the metrics of each listener.
    pub(super) fn metrics(&self) -> Vec<ServerMetrics> {
        self.servers.iter().map(Server::metrics).collect()
    }

    /// Closes the listeners and lets running calls finish within this time.
    pub(super) async fn close(self, within: Duration, restart: bool) {
        let closing = self
            .servers
            .into_iter()
            .map(|server| server.close(within, restart));
        futures::future::join_all(closing).await;
    }
}

/// How a listener authenticates its callers.
#[derive(Debug, Clone)]
enum AuthRule {
    /// No authentication: only this user can connect.
    Open,
    /// No authentication: only this machine can connect, and no token is configured.
    ///
    /// Other users of the machine do not see all boxes.
    Loopback,
    /// A hello message with a token.
    Token(box_rpc::Tokens),
    /// A client certificate, required by the TLS handshake.
    Certificate,
}

impl AuthRule {
    fn new(endpoint: &Endpoint, section: &ServerSection, tokens: &Tokens) -> Result<Self> {
        let address = match endpoint {
            Endpoint::Unix { .. } => return Ok(Self::Open),
            Endpoint::Tcp { address, tls } | Endpoint::WebSocket { address, tls, .. } => {
                (address, *tls)
            }
            _ => bail!("unsupported scheme; use unix:, tcp://, tls://, ws:// or wss://"),
        };
        if !tokens.is_empty() {
            return Ok(Self::Token(tokens.to_rpc()));
        }
        if address.1 && section.tls_client_ca.is_some() {
            return Ok(Self::Certificate);
        }
        ensure!(
            is_loopback(&address.0.host),
            "not a loopback address; configure tokens (server.token_file, --token-file or BOXD_TOKENS) or client \
             certificates (server.tls_client_ca)"
        );
        Ok(Self::Loopback)
    }

    fn options(&self, limits: box_rpc::Limits) -> Options {
        let auth = match self {
            Self::Open => Caller::Local.into(),
            Self::Loopback => Caller::Loopback.into(),
            // All clients with a certificate share one identity.
            Self::Certificate => Caller::Certificate.into(),
            Self::Token(tokens) => Auth::Tokens(tokens.clone()),
        };
        Options {
            limits,
            codecs: Codecs::FirstOf(ALL_CODECS),
            ..Options::new(auth)
        }
    }
}

/// Returns whether a host is loopback, as the listener resolves it.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Checks an endpoint without listening at it.
pub(super) fn check(text: &str, section: &ServerSection, tokens: &Tokens) -> Result<()> {
    let endpoint = parse_endpoint(text)?;
    let checked = AuthRule::new(&endpoint, section, tokens).and_then(|_| tls(&endpoint, section));
    checked
        .map(drop)
        .with_context(|| format!("endpoint {text}"))
}

/// Returns the names that a request to a listener at `host` may use.
///
/// They are the loopback names, the names that the operator allows, and `host` itself.
pub(super) fn names(allowed: &[String], host: &str) -> Vec<String> {
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "[::1]"]
        .map(str::to_owned)
        .into();
    names.extend(allowed.iter().map(|name| name.to_ascii_lowercase()));
    match host.trim_matches(['[', ']']) {
        // An unspecified address is not a name of this server.
        "0.0.0.0" | "::" => {}
        host if host.contains(':') => names.push(format!("[{host}]")),
        host => names.push(host.to_ascii_lowercase()),
    }
    names
}

/// Returns the websocket checks: an allowed host name, and no web page but those that the operator allows.
///
/// A page needs a token.
fn origin_check(endpoint: &Endpoint, section: &ServerSection, auth: &AuthRule) -> UpgradePolicy {
    let Endpoint::WebSocket { address, path, .. } = endpoint else {
        return UpgradePolicy::new();
    };
    let policy = if path.is_empty() {
        UpgradePolicy::new()
    } else {
        UpgradePolicy::new().paths([path])
    };
    let policy = policy.hosts(names(&section.allowed_hosts, &address.host));
    match auth {
        AuthRule::Token(_) => policy.origins(&section.allowed_origins),
        _ => policy,
    }
}

fn tls(endpoint: &Endpoint, section: &ServerSection) -> Result<Option<ServerTls>> {
    let (Endpoint::Tcp { tls: true, .. } | Endpoint::WebSocket { tls: true, .. }) = endpoint else {
        return Ok(None);
    };
    let (Some(certificate), Some(key)) = (&section.tls_certificate, &section.tls_key) else {
        bail!("TLS requires server.tls_certificate and server.tls_key; set both");
    };
    let identity = Identity {
        certificates: Pem::Path(certificate.clone()),
        key: Pem::Path(key.clone()),
    };
    let client_ca = section.tls_client_ca.clone().map(Pem::Path);
    Ok(Some(ServerTls {
        identity,
        client_ca,
    }))
}
