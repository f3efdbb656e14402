//! Dispatch of a request to its handler; a new gateway adds a line to [`handle`].

use std::net::SocketAddr;
use std::sync::Arc;

use box_rpc::Caller;
use box_transports::connection_limit::ConnectionPermit;
use hyper::body::Incoming;
use hyper::{Method, Request};

use super::body::{self, IncomingRequest, PendingBody};
use super::origin::refuse_cross_origin;
use super::response::{HttpResponse, Refusal, RefusalReason};
use super::routes::{self, Route};
use super::state::{HttpState, Phase};
use super::{auth, health, langbot, metrics, port_proxy, websocket};

/// Answers one request.
pub(super) async fn respond(
    state: &Arc<HttpState>,
    permit: ConnectionPermit,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> HttpResponse {
    let path = routes::redacted(request.uri().path());
    let method = request.method().clone();
    let route = routes::find(request.uri().path());
    let mut request = request.map(PendingBody::new);
    let outcome = match admit(state, route, &request).await {
        Ok((route, caller)) => {
            // An admitted caller keeps its connection, unless that was already closed to make room for another.
            let is_kept = auth::is_public(route) || route == Route::Metrics || permit.confirm();
            if is_kept {
                handle(state, route, caller, permit, &mut request).await
            } else {
                Err(Refusal::new(
                    RefusalReason::NotReady,
                    "server.max_connections: connection closed to admit another; reconnect",
                ))
            }
        }
        Err(refusal) => Err(refusal),
    };
    let route_name = route.map_or("none", Route::name);
    let response = match outcome {
        Ok(response) => response,
        Err(refusal) => {
            log_refusal(peer, route_name, &path, &refusal);
            if refusal.reason != RefusalReason::TooLarge {
                body::drain(&mut request).await;
            }
            refusal.response(route)
        }
    };
    let status = response.status().as_u16();
    state.counters.count_request(route_name, status);
    tracing::debug!(%peer, %method, path, route = route_name, status, "request");
    response
}

/// Checks a request before its handler runs.
///
/// The request must not come from a web page, must have a route, and must have a token or a valid signature.
async fn admit(
    state: &HttpState,
    route: Option<Route>,
    request: &IncomingRequest,
) -> Result<(Route, Caller), Refusal> {
    let (uri, headers) = (request.uri(), request.headers());
    state.hosts.check(uri, headers)?;
    if state.only_langbot && route.is_some_and(|route| !langbot::has(route)) {
        return Err(Refusal::new(
            RefusalReason::NotFound,
            "this port serves LangBot only; use the port of --http",
        ));
    }
    if route == Some(Route::BoxPort)
        && let Some(caller) = port_proxy::signed_caller(state, uri.path()).await?
    {
        body::check_length(headers)?;
        return Ok((Route::BoxPort, caller));
    }
    refuse_cross_origin(headers)?;
    let route = route
        .ok_or_else(|| Refusal::new(RefusalReason::NotFound, routes::no_such_path(uri.path())))?;
    let caller = state.auth.authenticate(route, headers);
    let caller = caller.map_err(|refusal| match route {
        Route::BoxPort if port_proxy::has_signature(uri.path()) => {
            Refusal::new(RefusalReason::WrongToken, "invalid or expired address")
        }
        _ => refusal,
    })?;
    body::check_length(headers)?;
    Ok((route, caller))
}

/// Calls the handler of a route.
async fn handle(
    state: &Arc<HttpState>,
    route: Route,
    caller: Caller,
    permit: ConnectionPermit,
    request: &mut IncomingRequest,
) -> Result<HttpResponse, Refusal> {
    let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
    match route {
        Route::Healthz | Route::Readyz | Route::Health | Route::Version | Route::Metrics
            if !is_read =>
        {
            Err(Refusal::new(
                RefusalReason::Method,
                "only GET and HEAD are allowed",
            ))
        }
        Route::Healthz | Route::Health => Ok(health::live(state).await),
        Route::Readyz => Ok(health::ready(state).await),
        Route::Version => Ok(health::version()),
        Route::Metrics => Ok(metrics::response(state).await),
        Route::Rpc | Route::BoxPort | Route::Relay if state.phase() != Phase::Serving => {
            Err(not_ready(state.phase()))
        }
        Route::Rpc => websocket::upgrade(state, request, caller, permit),
        Route::BoxPort => port_proxy::forward(state, request, caller, permit).await,
        Route::Relay => langbot::relay(state, request, caller, permit).await,
    }
}

pub(super) fn not_ready(phase: Phase) -> Refusal {
    let message = match phase {
        Phase::Draining => "the server is stopping",
        Phase::Starting | Phase::Serving => "the server is starting",
    };
    Refusal::new(RefusalReason::NotReady, message)
}

/// Logs a refused request, without its token.
fn log_refusal(peer: SocketAddr, route: &str, path: &str, refusal: &Refusal) {
    match refusal.reason {
        RefusalReason::NoToken
        | RefusalReason::WrongToken
        | RefusalReason::Browser
        | RefusalReason::Misdirected
        | RefusalReason::UnknownInstance => {
            tracing::info!(target: "audit", %peer, route, path, reason = ?refusal.reason, "refused");
        }
        _ => {}
    }
}
