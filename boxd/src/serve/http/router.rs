//! The routes of the HTTP port, and the layers around them.

use std::sync::Arc;

use axum::Router;
use axum::http::Uri;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, any, get, post};
use box_gateways::http::refusal::{ErrorBody, Refusal, RefusalReason, flat_error, relay_error};
use box_gateways::http::routes::{CapabilityAccess, RouteAccess, Routes, box_in_path};

use super::auth::LANGBOT_HEADER;
use super::layers::{Guard, admit, observe};
use super::state::HttpState;
use super::{health, langbot, metrics, openapi, ports, rpc, websocket};

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Every program; the responses must not contain secrets.
    Public,
    /// The programs of this machine on a loopback port, else callers with a token.
    TokenUnlessLoopback,
    /// Callers with a token, or with a capability if the route accepts any.
    Token,
    /// Callers that the handler of the route checks.
    Handler,
    /// No caller: the path has no route.
    Unknown,
}

/// The protocols of gateways.
const GATEWAYS: [fn() -> Vec<Routes>; 6] = [
    box_gateways::opensandbox::routes,
    box_gateways::langsmith::routes,
    box_gateways::aio::routes,
    box_gateways::e2b::routes,
    box_gateways::mcp::routes,
    box_gateways::codex::routes,
];

/// A route as the layers see it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RouteInfo {
    /// The name in metrics and logs.
    pub(super) name: &'static str,
    /// The paths; each is also served with a slash at its end.
    paths: &'static [&'static str],
    pub(super) access: Access,
    /// The header of a token, besides `Authorization: Bearer`, which all accept.
    pub(super) token_header: Option<&'static str>,
    /// The capabilities that open the route, if any.
    pub(super) capability: Option<CapabilityAccess>,
    pub(super) errors: ErrorBody,
    /// Whether its handlers get a [`Context`](box_gateways::http::context::Context).
    pub(super) has_context: bool,
    /// Whether LangBot's own port serves the route.
    pub(super) in_langbot: bool,
    pub(super) pages: PageUse,
}

/// How web pages of the origins that the operator allows may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageUse {
    None,
    /// By requests.
    Requests,
    /// By websockets, whose token may be a sub-protocol.
    Sockets,
}

impl RouteInfo {
    const fn new(name: &'static str, paths: &'static [&'static str], access: Access) -> Self {
        Self {
            name,
            paths,
            access,
            token_header: None,
            capability: None,
            errors: flat_error,
            has_context: false,
            in_langbot: false,
            pages: PageUse::None,
        }
    }

    const fn of_langbot(mut self) -> Self {
        self.in_langbot = true;
        self.token_header = Some(LANGBOT_HEADER);
        self
    }

    const fn for_pages(mut self, pages: PageUse) -> Self {
        self.pages = pages;
        self
    }

    const fn with_errors(mut self, errors: ErrorBody) -> Self {
        self.errors = errors;
        self
    }

    /// Adds a context for a gateway.
    const fn of_gateway(mut self, access: RouteAccess) -> Self {
        self.token_header = access.token_header;
        self.capability = access.capability;
        self.errors = access.errors;
        self.has_context = true;
        self
    }
}

static HEALTHZ: RouteInfo = RouteInfo::new("healthz", &["/healthz"], Access::Public).of_langbot();
static READYZ: RouteInfo = RouteInfo::new("readyz", &["/readyz"], Access::Public).of_langbot();
static HEALTH: RouteInfo = RouteInfo::new("health", &["/health"], Access::Public);
static VERSION: RouteInfo = RouteInfo::new("version", &["/version"], Access::Public);
pub(super) static METRICS: RouteInfo =
    RouteInfo::new("metrics", &["/metrics"], Access::TokenUnlessLoopback);
pub(super) static RPC: RouteInfo = RouteInfo::new("rpc", &["/rpc/ws"], Access::Token)
    .of_langbot()
    .for_pages(PageUse::Sockets);
pub(super) static RPC_CALL: RouteInfo =
    RouteInfo::new("rpc_call", &["/rpc"], Access::Token).for_pages(PageUse::Requests);
static OPENAPI: RouteInfo = RouteInfo::new("openapi", &["/openapi.json"], Access::Public);
static RELAY: RouteInfo = RouteInfo::new(
    "langbot_relay",
    &[
        "/v1/sessions/{session}/managed-process/{process}/ws",
        "/v1/sessions/{session}/managed-process/ws",
    ],
    Access::Token,
)
.of_langbot()
.with_errors(relay_error);
static BOX_PORT: RouteInfo = RouteInfo::new(
    "box_port",
    &[
        "/boxes/{box}/port/{port}",
        "/boxes/{box}/port/{port}/{*path}",
    ],
    Access::Token,
)
.of_gateway(RouteAccess {
    capability: Some(CapabilityAccess {
        box_of: box_in_path,
        scope: ports::scope,
        header: None,
    }),
    ..RouteAccess::new()
});
static UNKNOWN: RouteInfo = RouteInfo::new("none", &[], Access::Unknown);

/// How a pattern ends that matches any number of segments.
const OPEN_END: &str = "/{*path}";

/// All routes.
pub(super) static OWN_ROUTES: [&RouteInfo; 10] = [
    &HEALTHZ, &READYZ, &HEALTH, &VERSION, &METRICS, &RPC, &RPC_CALL, &OPENAPI, &RELAY, &BOX_PORT,
];

/// Returns all routes with their layers.
pub(super) fn router(state: &Arc<HttpState>) -> Router {
    let guard = |route: RouteInfo| Guard {
        state: Arc::clone(state),
        route,
    };
    let guarded = |route: &'static RouteInfo, handlers: MethodRouter<Arc<HttpState>>| {
        let guard = guard(*route);
        handlers
            .layer(from_fn_with_state(guard.clone(), admit))
            .layer(from_fn_with_state(guard, observe))
    };
    let mut router = Router::new();
    for (route, handlers) in [
        (&HEALTHZ, get(health::live).fallback(read_only)),
        (&READYZ, get(health::ready).fallback(read_only)),
        (&HEALTH, get(health::live).fallback(read_only)),
        (&VERSION, get(health::version).fallback(read_only)),
        (&METRICS, get(metrics::response).fallback(read_only)),
        (&RPC, any(websocket::upgrade)),
        (&RPC_CALL, post(rpc::call).fallback(wrong_method)),
        (&OPENAPI, get(openapi::document).fallback(read_only)),
        (&RELAY, any(langbot::relay)),
        (&BOX_PORT, any(ports::forward)),
    ] {
        let handlers = guarded(route, handlers);
        for path in route.paths {
            router = router.route(path, handlers.clone());
            if !path.ends_with(OPEN_END) {
                router = router.route(&format!("{path}/"), handlers.clone());
            }
        }
    }
    for gateway in gateway_routes() {
        let access = if gateway.access.checked_by_handler {
            Access::Handler
        } else {
            Access::Token
        };
        let route = RouteInfo::new(gateway.name, &[], access).of_gateway(gateway.access);
        let guard = guard(route);
        let guarded = gateway
            .router
            .method_not_allowed_fallback(wrong_method)
            .route_layer(from_fn_with_state(guard.clone(), admit))
            .route_layer(from_fn_with_state(guard, observe));
        router = router.merge(guarded.with_state(()));
    }
    let unknown = guarded(&UNKNOWN, any(unknown));
    router
        .fallback_service(unknown.with_state(Arc::clone(state)))
        .with_state(Arc::clone(state))
}

/// Returns the routes of all gateways.
pub(super) fn gateway_routes() -> impl Iterator<Item = Routes> {
    GATEWAYS.into_iter().flat_map(|routes| routes())
}

/// Returns the headers of tokens and capabilities, which no box may receive.
pub(super) fn credential_headers() -> Vec<&'static str> {
    let own = OWN_ROUTES
        .iter()
        .map(|route| (route.token_header, route.capability));
    // A box may have a header of the same name as the token of a gateway, so only its value is removed.
    let others = gateway_routes().map(|routes| (None, routes.access.capability));
    own.chain(others)
        .flat_map(|(token, capability)| [token, capability.and_then(|it| it.header)])
        .flatten()
        .collect()
}

/// Refuses a method that the route of a gateway does not have.
async fn wrong_method() -> Refusal {
    Refusal::new(RefusalReason::Method, "the path does not allow this method")
}

/// Refuses a request for a path without a route.
async fn unknown(uri: Uri) -> Refusal {
    Refusal::new(RefusalReason::NotFound, no_such_path(uri.path()))
}

/// Refuses a request that would change something.
async fn read_only() -> Refusal {
    Refusal::new(RefusalReason::Method, "only GET and HEAD are allowed")
}

/// Returns the message for a path without a route; it names the most similar route.
pub(super) fn no_such_path(path: &str) -> String {
    match nearest(&segments(path)) {
        Some(route) => format!("unknown path; the closest is {route}"),
        None => "unknown path; the routes are in docs/wire.md".to_owned(),
    }
}

/// Returns the segments of a path; a trailing slash adds none.
fn segments(path: &str) -> Vec<&str> {
    let path = path.strip_prefix('/').unwrap_or(path);
    path.strip_suffix('/').unwrap_or(path).split('/').collect()
}

/// Returns the most similar route, if one is similar enough.
fn nearest(path: &[&str]) -> Option<&'static str> {
    /// The minimum similarity.
    const MIN_SIMILARITY: f64 = 0.55;
    OWN_ROUTES
        .iter()
        .flat_map(|route| route.paths)
        .map(|pattern| (similarity(pattern, path), *pattern))
        .filter(|(similarity, _)| *similarity > MIN_SIMILARITY)
        // Prefer the first of equal routes.
        .rev()
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, pattern)| pattern.strip_suffix(OPEN_END).unwrap_or(pattern))
}

/// Returns the similarity of a route and the start of a path.
///
/// A `{…}` matches any segment.
fn similarity(pattern: &str, path: &[&str]) -> f64 {
    let parts = segments(pattern);
    let open = pattern.ends_with(OPEN_END);
    let named = &parts[..parts.len() - usize::from(open)];
    let length = if open {
        path.len().min(named.len())
    } else {
        path.len()
    };
    let filled: Vec<&str> = named
        .iter()
        .enumerate()
        .map(|(index, part)| match path.get(index) {
            Some(segment) if part.starts_with('{') => *segment,
            _ => *part,
        })
        .collect();
    // A matching first segment weighs more.
    let first = if named.first() == path.first() {
        0.1
    } else {
        0.0
    };
    first + strsim::normalized_damerau_levenshtein(&filled.join("/"), &path[..length].join("/"))
}

/// Returns a path for the log: shortened, and without signatures.
pub(super) fn redacted(path: &str) -> String {
    /// The maximum length of a logged path.
    const MAX_PATH_BYTES: usize = 200;
    let mut redacted_path = String::new();
    for (index, segment) in path.split('/').enumerate() {
        if index > 0 {
            redacted_path.push('/');
        }
        // The separator may be plain or percent-encoded.
        let lower = segment.to_ascii_lowercase();
        match segment.find('~').into_iter().chain(lower.find("%7e")).min() {
            Some(begins) => redacted_path.extend([&segment[..begins], "~…"]),
            None => redacted_path.push_str(segment),
        }
    }
    redacted_path.truncate(redacted_path.floor_char_boundary(MAX_PATH_BYTES));
    redacted_path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_path_suggests_a_route() {
        for (path, route) in [
            ("/rpc/w", "/rpc/ws"),
            ("/helthz", "/healthz"),
            ("/ready", "/readyz"),
            ("/boxes/b/ports/80", "/boxes/{box}/port/{port}"),
        ] {
            let message = no_such_path(path);
            assert!(message.ends_with(route), "{path}: {message}");
        }
        assert!(no_such_path("/favicon.ico").ends_with("docs/wire.md"));
    }

    #[test]
    fn a_logged_path_has_no_credential() {
        for (path, redacted_path) in [
            ("/boxes/b~secret/port/80/x", "/boxes/b~…/port/80/x"),
            ("/boxes/b%7Esecret/x", "/boxes/b~…/x"),
            ("/boxes/b%7esecret~secret/x", "/boxes/b~…/x"),
            ("/rpc/ws", "/rpc/ws"),
        ] {
            assert_eq!(redacted(path), redacted_path);
        }
        assert_eq!(redacted(&"ä".repeat(500)).chars().count(), 100);
    }
}
