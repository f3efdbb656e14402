//! Who may upgrade: the check of a request before it becomes a connection.

use std::fmt;

use httparse::Header;
use subtle::ConstantTimeEq;

/// A request to become a websocket.
#[derive(Debug)]
pub struct UpgradeRequest<'a> {
    path: &'a str,
    headers: &'a [Header<'a>],
}

impl<'a> UpgradeRequest<'a> {
    pub(super) fn new(path: &'a str, headers: &'a [Header<'a>]) -> Self {
        Self { path, headers }
    }

    /// The path that was asked for, without its query.
    pub fn path(&self) -> &'a str {
        self.path.split('?').next().unwrap_or_default()
    }

    /// The first header of this name, if it is text. Names are compared without case.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.all(name).next()
    }

    /// How often a header of this name occurs, text or not.
    pub fn count(&self, name: &str) -> usize {
        let named = |header: &&Header<'_>| header.name.eq_ignore_ascii_case(name);
        self.headers.iter().filter(named).count()
    }

    /// Every header of this name that is text.
    fn all(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.headers
            .iter()
            .filter(move |header| header.name.eq_ignore_ascii_case(name))
            .filter_map(|header| std::str::from_utf8(header.value).ok())
            .map(str::trim)
    }

    /// Whether a comma-separated header of this name lists `token`, without regard to case.
    pub(super) fn lists(&self, name: &str, token: &str) -> bool {
        self.all(name)
            .flat_map(|value| value.split(','))
            .any(|part| part.trim().eq_ignore_ascii_case(token))
    }
}

/// A request that does not become a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("upgrade refused with status {status}: {reason}")]
pub struct Refusal {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The text of the answer. Never put a secret here.
    pub reason: &'static str,
}

impl Refusal {
    /// A refusal with this status and text.
    pub const fn new(status: u16, reason: &'static str) -> Self {
        Self { status, reason }
    }
}

/// Decides about requests. Implemented by [`Gate`] and by every fitting closure.
///
/// ```
/// use box_transports::websocket::{Admit, Refusal, UpgradeRequest};
///
/// let only_known = |request: &UpgradeRequest<'_>| match request.header("x-tenant") {
///     Some("blue" | "green") => Ok(()),
///     _ => Err(Refusal::new(403, "unknown tenant")),
/// };
/// let _: &dyn Admit = &only_known;
/// ```
pub trait Admit: Send + Sync {
    /// Lets the request pass, or says why not.
    fn admit(&self, request: &UpgradeRequest<'_>) -> Result<(), Refusal>;
}

impl<F> Admit for F
where
    F: Fn(&UpgradeRequest<'_>) -> Result<(), Refusal> + Send + Sync,
{
    fn admit(&self, request: &UpgradeRequest<'_>) -> Result<(), Refusal> {
        self(request)
    }
}

/// The usual check. As it is made, it lets in every program and no browser page.
///
/// A browser sends `Origin` with every upgrade and cannot be told not to, so a page that somebody
/// visits is recognised; [`origins`](Self::origins) names the pages that may. A page that has made
/// its own name point at this machine sends that name as `Host`; [`hosts`](Self::hosts), if
/// there are any, names those that are ours.
///
/// ```
/// use box_transports::websocket::Gate;
///
/// let gate = Gate::new()
///     .origins(["https://console.example.org"])
///     .hosts(["box.example.org", "localhost:5410"])
///     .token("from the configuration");
/// assert!(!format!("{gate:?}").contains("configuration"));
/// ```
#[derive(Clone, Default)]
pub struct Gate {
    paths: Vec<String>,
    origins: Vec<String>,
    hosts: Vec<String>,
    token: Option<String>,
}

/// The paths of a gate that was given none.
const PATHS: [&str; 2] = ["/rpc/ws", "/"];

impl Gate {
    /// The check as described above.
    pub fn new() -> Self {
        Self::default()
    }

    /// Paths that are served, instead of `/rpc/ws` and `/`.
    pub fn paths<I: IntoIterator<Item = S>, S: Into<String>>(mut self, paths: I) -> Self {
        self.paths = paths.into_iter().map(Into::into).collect();
        self
    }

    /// Pages that may connect, as browsers write them: `https://console.example.org`.
    pub fn origins<I: IntoIterator<Item = S>, S: Into<String>>(mut self, origins: I) -> Self {
        self.origins = origins.into_iter().map(Into::into).collect();
        self
    }

    /// Values of `Host` that are accepted; one without a port is accepted with any.
    pub fn hosts<I: IntoIterator<Item = S>, S: Into<String>>(mut self, hosts: I) -> Self {
        self.hosts = hosts.into_iter().map(Into::into).collect();
        self
    }

    /// Requires `Authorization: Bearer <token>`.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Compares in constant time: how much of a guess is right must not show.
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

/// Whether a `Host` is one of ours, or that and a port.
pub fn is_host(ours: &str, host: &str) -> bool {
    let (Some(name), Some(rest)) = (host.get(..ours.len()), host.get(ours.len()..)) else {
        return false;
    };
    // The last group of an address without brackets is no port.
    let bare = ours.contains(':') && !ours.ends_with(']');
    let port = rest.strip_prefix(':').unwrap_or_default();
    let only_port = !bare && !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    name.eq_ignore_ascii_case(ours) && (rest.is_empty() || only_port)
}

impl Admit for Gate {
    fn admit(&self, request: &UpgradeRequest<'_>) -> Result<(), Refusal> {
        let served = if self.paths.is_empty() {
            PATHS.contains(&request.path())
        } else {
            self.paths.iter().any(|path| path == request.path())
        };
        if !served {
            return Err(Refusal::new(404, "no such path"));
        }
        let host = request.header("host").unwrap_or_default();
        if !self.hosts.is_empty() && !self.hosts.iter().any(|ours| is_host(ours, host)) {
            return Err(Refusal::new(403, "host not allowed"));
        }
        if request.count("origin") > 0 {
            let origin = request.header("origin").unwrap_or_default();
            if request.count("origin") > 1 || !self.origins.iter().any(|allowed| allowed == origin)
            {
                return Err(Refusal::new(403, "origin not allowed"));
            }
        }
        if !self.carries_token(request) {
            return Err(Refusal::new(401, "a token is required"));
        }
        Ok(())
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("paths", &self.paths)
            .field("origins", &self.origins)
            .field("hosts", &self.hosts)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .finish()
    }
}
