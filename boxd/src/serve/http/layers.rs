//! The layers around every route: who may call it, and what the server records of the call.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::{ALLOW, CONNECTION, EXPECT, HOST, HeaderName, HeaderValue};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use box_gateways::e2b::hosts::ByHost;
use box_gateways::http::capability::{BoxSegment, Signature};
use box_gateways::http::context::{Context, InBox};
use box_gateways::http::refusal::{Refusal, RefusalReason};
use box_gateways::http::routes::CapabilityAccess;
use box_protocol::{BoxId, UnixMs};
use box_rpc::Caller;
use box_transports::connection_limit::ConnectionPermit;

use super::origin::refuse_cross_origin;
use super::pages;
use super::router::{Access, RouteInfo, no_such_path, redacted};
use super::state::{HttpState, Phase};

/// The header that identifies a request in logs of both sides.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The maximum length of a client's request id.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The connection of a request.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) peer: SocketAddr,
    pub(super) permit: ConnectionPermit,
}

/// The route that a layer belongs to, and the state of its port.
#[derive(Debug, Clone)]
pub(super) struct Guard {
    pub(super) state: Arc<HttpState>,
    pub(super) route: RouteInfo,
}

/// The value of `X-Request-ID` of a request.
#[derive(Debug, Clone)]
struct RequestId(HeaderValue);

/// Limits the body, writes refusals in the format of the route, counts and logs.
pub(super) async fn observe(
    State(Guard { state, route }): State<Guard>,
    Extension(Client { peer, .. }): Extension<Client>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = redacted(request.uri().path());
    let method = request.method().clone();
    let request_id = request_id(request.headers());
    let page = state.origins.page(&route, request.headers()).cloned();
    let expects_request = request.headers().contains_key(EXPECT);
    let (limited, unread) = state.max_body.limit(std::mem::take(request.body_mut()));
    *request.body_mut() = limited;
    request
        .extensions_mut()
        .insert(RequestId(request_id.clone()));
    let mut response = next.run(request).await;
    let refusal = response.extensions_mut().remove::<Refusal>();
    let is_refused = |refusal: &Refusal| refusal.reason == RefusalReason::TooLarge;
    let is_too_large = response.status() == StatusCode::PAYLOAD_TOO_LARGE
        || refusal.as_ref().is_some_and(is_refused);
    // An unread body would end the connection. A client that waits for a request to send its body gets none.
    if !is_too_large && !expects_request {
        unread.drain().await;
    }
    if let Some(refusal) = refusal {
        log_refusal(peer, route.name, &path, &refusal);
        let allowed = response.headers_mut().remove(ALLOW);
        response = refusal.response(route.errors);
        if let Some(allowed) = allowed {
            response.headers_mut().insert(ALLOW, allowed);
        }
    }
    // A response of a box may have an id of its own.
    let headers = response.headers_mut();
    headers.entry(REQUEST_ID).or_insert(request_id);
    if is_too_large {
        // The client must not use this connection again: the rest of the body is unread.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(origin) = page {
        pages::open_to(origin, headers);
    }
    let status = response.status().as_u16();
    state.counters.count_request(route.name, status);
    tracing::debug!(%peer, %method, path, route = route.name, status, "request");
    response
}

/// Returns the client's request id, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| {
        let id = id.as_bytes();
        (1..=MAX_REQUEST_ID_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
    });
    let new = || HeaderValue::try_from(uuid::Uuid::now_v7().simple().to_string());
    let new = || new().unwrap_or(HeaderValue::from_static("none"));
    given.cloned().unwrap_or_else(new)
}

/// Lets a request pass to its handler, with its caller.
pub(super) async fn admit(
    State(guard): State<Guard>,
    Extension(client): Extension<Client>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let admitted = async {
        if guard.state.origins.is_preflight(&guard.route, &parts) {
            guard.state.hosts.check(&parts.uri, &parts.headers)?;
            return Ok(None);
        }
        let (caller, in_box) = caller_of(&guard, &client, &parts).await?;
        if guard.route.has_context {
            let context = context(&guard.state, &client, &parts, &caller)?;
            parts.extensions.insert(context);
        }
        parts.extensions.insert(caller);
        in_box.map(|in_box| parts.extensions.insert(in_box));
        Ok::<_, Refusal>(Some(Request::from_parts(parts, body)))
    };
    match admitted.await {
        Ok(Some(request)) => next.run(request).await,
        Ok(None) => pages::preflight_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// Returns the context of a request, which counts as a call of its caller.
fn context(
    state: &HttpState,
    client: &Client,
    request: &Parts,
    caller: &Caller,
) -> Result<Context, Refusal> {
    let call = state.gateways.policy.begin_call(caller);
    let call = call.map_err(|error| Refusal::new(RefusalReason::Overloaded, error.message()))?;
    let host = request
        .headers
        .get(HOST)
        .and_then(|host| host.to_str().ok());
    let url = match &state.public_url {
        Some(url) => url.as_str().into(),
        None => format!("http://{}", host.unwrap_or("localhost")).into(),
    };
    let request_id = request.extensions.get::<RequestId>();
    let request_id = request_id.and_then(|RequestId(id)| id.to_str().ok());
    Ok(Context {
        server: Arc::clone(&state.gateways),
        caller: caller.clone(),
        url,
        request_id: request_id.unwrap_or_default().into(),
        connection: client.permit.clone(),
        call: Arc::new(call),
    })
}

/// A box in a request, with the signature that the request has for it.
struct NamedBox<'a> {
    id: BoxId,
    signature: Option<Signature>,
    access: &'a CapabilityAccess,
}

impl<'a> NamedBox<'a> {
    fn of(access: &'a CapabilityAccess, request: &Parts) -> Option<Self> {
        let segment = BoxSegment::read((access.box_of)(request)?)?;
        let id = BoxId::new(&segment.id).ok()?;
        let in_header = || {
            let value = request.headers.get(access.header?)?;
            Signature::read(value.to_str().ok()?)
        };
        let signature = segment.signature.or_else(in_header);
        Some(Self {
            id,
            signature,
            access,
        })
    }

    /// Returns the caller that a valid signature makes; it sees no other box.
    async fn holder(&self, state: &HttpState, request: &Parts) -> Result<Option<Caller>, Refusal> {
        let (Some(signature), Some(scope)) = (&self.signature, (self.access.scope)(request)) else {
            return Ok(None);
        };
        check_serving(state.phase())?;
        // A signed address has the unique id of its box.
        let holder = Caller::only(self.id.as_str());
        let Ok(info) = state.runtime.get(&holder, &self.id).await else {
            return Ok(None);
        };
        let key = &state.gateways.key;
        let permits = key.permits(signature, &info, scope, UnixMs::now());
        Ok(permits.then_some(holder))
    }
}

/// Checks a request, and returns its caller and the box that it names.
///
/// The request must not come from a web page, unless the operator allows its origin on the route. It must have a token
/// or a valid signature if the route needs one.
async fn caller_of(
    guard: &Guard,
    client: &Client,
    request: &Parts,
) -> Result<(Caller, Option<InBox>), Refusal> {
    let Guard { state, route } = guard;
    let (uri, headers) = (&request.uri, &request.headers);
    // The gateway knows the host names of boxes.
    if request.extensions.get::<ByHost>().is_none() {
        state.hosts.check(uri, headers)?;
    }
    if state.only_langbot && !route.in_langbot && route.access != Access::Unknown {
        return Err(Refusal::new(
            RefusalReason::NotFound,
            "this port serves LangBot only; use the port of --http",
        ));
    }
    // No handler sees these segments.
    let mut segments = uri.path().split('/');
    if segments.any(|part| matches!(part, "." | "..")) {
        return Err(Refusal::new(
            RefusalReason::NotFound,
            no_such_path(uri.path()),
        ));
    }
    let named = route.capability.as_ref();
    let named = named.and_then(|access| NamedBox::of(access, request));
    let holder = match &named {
        Some(named) => named.holder(state, request).await?,
        None => None,
    };
    let caller = if let Some(holder) = holder {
        holder
    } else {
        // A request that its handler checks has no credential that a browser adds by itself.
        if route.access != Access::Handler && state.origins.page(route, headers).is_none() {
            refuse_cross_origin(headers)?;
        }
        let caller = state.auth.authenticate(route, headers);
        let is_signed = named
            .as_ref()
            .is_some_and(|named| named.signature.is_some());
        caller.map_err(|refusal| {
            if is_signed {
                Refusal::new(RefusalReason::WrongToken, "invalid or expired address")
            } else {
                refusal
            }
        })?
    };
    state.max_body.check_length(headers)?;
    let in_box = named.map(|named| InBox(named.id));
    if route.access == Access::Handler {
        check_serving(state.phase())?;
    }
    if route.access != Access::Token {
        return Ok((caller, in_box));
    }
    // An admitted caller keeps its connection, unless that was already closed to make room for another.
    if !client.permit.confirm() {
        return Err(Refusal::new(
            RefusalReason::NotReady,
            "server.max_connections: connection closed to admit another; reconnect",
        ));
    }
    check_serving(state.phase())?;
    Ok((caller, in_box))
}

/// Refuses a request while the server starts or stops.
pub(super) fn check_serving(phase: Phase) -> Result<(), Refusal> {
    let message = match phase {
        Phase::Serving => return Ok(()),
        Phase::Draining => "the server is stopping",
        Phase::Starting => "the server is starting",
    };
    Err(Refusal::new(RefusalReason::NotReady, message))
}

/// Logs a refused request, without its token.
fn log_refusal(peer: SocketAddr, route: &str, path: &str, refusal: &Refusal) {
    let reason = match refusal.reason {
        RefusalReason::NoToken => "no_token",
        RefusalReason::WrongToken => "wrong_token",
        RefusalReason::Browser => "browser",
        RefusalReason::Misdirected => "wrong_host",
        RefusalReason::UnknownInstance => "unknown_instance",
        _ => return,
    };
    tracing::info!(target: "audit", %peer, route, path, reason, "refused");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_request_id_is_returned_and_another_is_replaced() {
        let id_of = |id: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, id.parse().unwrap());
            request_id(&headers)
        };
        assert_eq!(id_of("abc-1"), "abc-1");
        let long = "x".repeat(MAX_REQUEST_ID_BYTES + 1);
        for other in ["", "a b", &long] {
            let id = id_of(other);
            assert!(id != *other && id.len() == 32, "{id:?}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }
}
