//! Check of an upgrade request before it becomes a connection.

use std::fmt;

use subtle::ConstantTimeEq;
use tungstenite::handshake::server::Request;

/// A request to become a websocket.
#[derive(Debug)]
pub struct UpgradeRequest<'a>(&'a Request);

impl<'a> UpgradeRequest<'a> {
    pub(super) fn new(request: &'a Request) -> Self {
        Self(request)
    }

    /// Returns the requested path, without its query.
    pub fn path(&self) -> &'a str {
        self.0.uri().path()
    }

    /// Returns the first header of this name, if it is text.
    /// Names are compared case-insensitively.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        let value = self.0.headers().get(name)?;
        std::str::from_utf8(value.as_bytes()).ok().map(str::trim)
    }

    /// Returns the number of headers of this name, text or not.
    pub fn count(&self, name: &str) -> usize {
        self.0.headers().get_all(name).iter().count()
    }
}

/// Rejection of an upgrade request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("upgrade refused with status {status}: {reason}")]
pub struct UpgradeRejection {
    /// HTTP status of the response.
    pub status: u16,
    /// Text of the response. It must not contain a secret.
    pub reason: &'static str,
}

impl UpgradeRejection {
    /// Creates a rejection with this status and text.
    pub const fn new(status: u16, reason: &'static str) -> Self {
        Self { status, reason }
    }
}

/// Decides about requests. Implemented by [`UpgradePolicy`] and by matching closures.
///
/// ```
/// use box_transports::websocket::{CheckUpgrade, UpgradeRejection, UpgradeRequest};
///
/// let only_known = |request: &UpgradeRequest<'_>| match request.header("x-tenant") {
///     Some("blue" | "green") => Ok(()),
///     _ => Err(UpgradeRejection::new(403, "unknown tenant")),
/// };
/// let _: &dyn CheckUpgrade = &only_known;
/// ```
pub trait CheckUpgrade: Send + Sync {
    /// Admits the request, or returns the rejection.
    fn check(&self, request: &UpgradeRequest<'_>) -> Result<(), UpgradeRejection>;
}

impl<F> CheckUpgrade for F
where
    F: Fn(&UpgradeRequest<'_>) -> Result<(), UpgradeRejection> + Send + Sync,
{
    fn check(&self, request: &UpgradeRequest<'_>) -> Result<(), UpgradeRejection> {
        self(request)
    }
}

/// The default check: it admits every program and no browser page.
///
/// A browser sends `Origin` with every upgrade and a page cannot prevent that. The policy therefore recognises pages,
/// and [`origins`](Self::origins) lists the allowed ones. In a DNS rebinding attack the page sends its own name as
/// `Host`; [`hosts`](Self::hosts), if set, lists the accepted names.
///
/// ```
/// use box_transports::websocket::UpgradePolicy;
///
/// let policy = UpgradePolicy::new()
///     .origins(["https://console.example.org"])
///     .hosts(["box.example.org", "localhost:5410"])
///     .token("from the configuration");
/// assert!(!format!("{policy:?}").contains("configuration"));
/// ```
#[derive(Clone, Default)]
pub struct UpgradePolicy {
    paths: Vec<String>,
    origins: Vec<String>,
    hosts: Vec<String>,
    token: Option<String>,
}

/// Default paths of a policy.
const PATHS: [&str; 2] = ["/rpc/ws", "/"];

impl UpgradePolicy {
    /// Creates the default check.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the served paths, instead of `/rpc/ws` and `/`.
    pub fn paths<I: IntoIterator<Item = S>, S: Into<String>>(mut self, paths: I) -> Self {
        self.paths = paths.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the pages that may connect, as browsers write them.
    /// Example: `https://console.example.org`.
    pub fn origins<I: IntoIterator<Item = S>, S: Into<String>>(mut self, origins: I) -> Self {
        self.origins = origins.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the accepted values of `Host`; one without a port matches any port.
    pub fn hosts<I: IntoIterator<Item = S>, S: Into<String>>(mut self, hosts: I) -> Self {
        self.hosts = hosts.into_iter().map(Into::into).collect();
        self
    }

    /// Requires `Authorization: Bearer <token>`.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Whether the request carries the token.
    /// Compares in constant time, so that timing does not reveal how much of a guess is right.
    fn carries_token(&self, request: &UpgradeRequest<'_>) -> bool {
        let Some(token) = &self.token else {
            return true;
        };
        let given = request
            .header("authorization")
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, given)| given.trim());
        given.is_some_and(|given| given.as_bytes().ct_eq(token.as_bytes()).into())
    }
}

/// Whether `host` equals `ours`, with or without a port.
pub fn is_host(ours: &str, host: &str) -> bool {
    let (Some(name), Some(rest)) = (host.get(..ours.len()), host.get(ours.len()..)) else {
        return false;
    };
    // The last group of an IPv6 address without brackets is no port.
    let bare = ours.contains(':') && !ours.ends_with(']');
    let port = rest.strip_prefix(':').unwrap_or_default();
    let only_port = !bare && !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    name.eq_ignore_ascii_case(ours) && (rest.is_empty() || only_port)
}

impl CheckUpgrade for UpgradePolicy {
    fn check(&self, request: &UpgradeRequest<'_>) -> Result<(), UpgradeRejection> {
        let served = if self.paths.is_empty() {
            PATHS.contains(&request.path())
        } else {
            self.paths.iter().any(|path| path == request.path())
        };
        if !served {
            return Err(UpgradeRejection::new(404, "no such path"));
        }
        let host = request.header("host").unwrap_or_default();
        if !self.hosts.is_empty() && !self.hosts.iter().any(|ours| is_host(ours, host)) {
            return Err(UpgradeRejection::new(403, "host not allowed"));
        }
        if request.count("origin") > 0 {
            let origin = request.header("origin").unwrap_or_default();
            if request.count("origin") > 1 || !self.origins.iter().any(|allowed| allowed == origin)
            {
                return Err(UpgradeRejection::new(403, "origin not allowed"));
            }
        }
        if !self.carries_token(request) {
            return Err(UpgradeRejection::new(401, "a token is required"));
        }
        Ok(())
    }
}

impl fmt::Debug for UpgradePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpgradePolicy")
            .field("paths", &self.paths)
            .field("origins", &self.origins)
            .field("hosts", &self.hosts)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .finish()
    }
}
