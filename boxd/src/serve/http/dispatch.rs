//! Dispatch of a request to its handler; a new gateway adds a line to [`open`].

use std::net::SocketAddr;
use std::sync::Arc;

use box_rpc::Caller;
use box_transports::connection_limit::ConnectionPermit;
use hyper::body::Incoming;
use hyper::{Method, Request};

use super::answer::{Answer, Refusal, Why};
use super::body::{self, Asked, Unread};
use super::browsers::no_page;
use super::routes::{self, Door};
use super::shared::{Phase, Shared};
use super::{auth, health, langbot, metrics, ports, websocket};

/// Answers one request.
pub(super) async fn answer(
    shared: &Arc<Shared>,
    place: ConnectionPermit,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> Answer {
    let path = routes::redacted(request.uri().path());
    let method = request.method().clone();
    let found = routes::find(request.uri().path());
    let door = found;
    let mut asked = request.map(Unread::new);
    let outcome = match admit(shared, found, &asked).await {
        Ok((door, caller)) => {
            // An admitted caller keeps its connection, unless that was already closed to make room for another.
            let kept = auth::needs_nothing(door) || door == Door::Metrics || place.confirm();
            if kept {
                open(shared, door, caller, place, &mut asked).await
            } else {
                Err(Refusal::new(
                    Why::NotReady,
                    "server.max_connections: this connection made room for another; connect again",
                ))
            }
        }
        Err(refusal) => Err(refusal),
    };
    let name = door.map_or("none", Door::name);
    let answer = match outcome {
        Ok(answer) => answer,
        Err(refusal) => {
            told(peer, name, &path, &refusal);
            if refusal.why != Why::TooLarge {
                body::discard(&mut asked).await;
            }
            refusal.answer(door)
        }
    };
    let status = answer.status().as_u16();
    shared.counters.answered(name, status);
    tracing::debug!(%peer, %method, path, door = name, status, "request");
    answer
}

/// Checks a request before its handler runs.
///
/// The request must not come from a web page, must have a route, and must have a token or a valid capability.
async fn admit(
    shared: &Shared,
    found: Option<Door>,
    asked: &Asked,
) -> Result<(Door, Caller), Refusal> {
    let (uri, headers) = (asked.uri(), asked.headers());
    shared.hosts.check(uri, headers)?;
    if shared.only_langbot && found.is_some_and(|door| !langbot::has(door)) {
        return Err(Refusal::new(
            Why::NotFound,
            "this port is LangBot's; the others are served by --http",
        ));
    }
    if found == Some(Door::BoxPort)
        && let Some(caller) = ports::invited(shared, uri.path()).await?
    {
        body::check_length(headers)?;
        return Ok((Door::BoxPort, caller));
    }
    no_page(headers)?;
    let door =
        found.ok_or_else(|| Refusal::new(Why::NotFound, routes::no_such_path(uri.path())))?;
    let caller = shared.auth.who(door, headers);
    let caller = caller.map_err(|refusal| match door {
        Door::BoxPort if ports::is_addressed(uri.path()) => Refusal::new(
            Why::WrongToken,
            "the address is not valid here, or not any more",
        ),
        _ => refusal,
    })?;
    body::check_length(headers)?;
    Ok((door, caller))
}

/// Calls the handler of a route.
async fn open(
    shared: &Arc<Shared>,
    door: Door,
    caller: Caller,
    place: ConnectionPermit,
    asked: &mut Asked,
) -> Result<Answer, Refusal> {
    let looks = asked.method() == Method::GET || asked.method() == Method::HEAD;
    match door {
        Door::Healthz | Door::Readyz | Door::Health | Door::Version | Door::Metrics if !looks => {
            Err(Refusal::new(Why::Method, "it can only be read"))
        }
        Door::Healthz | Door::Health => Ok(health::alive(shared).await),
        Door::Readyz => Ok(health::ready(shared).await),
        Door::Version => Ok(health::version()),
        Door::Metrics => Ok(metrics::answer(shared).await),
        Door::Rpc | Door::BoxPort | Door::Relay if shared.phase() != Phase::Serving => {
            Err(not_ready(shared.phase()))
        }
        Door::Rpc => websocket::upgrade(shared, asked, caller, place),
        Door::BoxPort => ports::pass(shared, asked, caller, place).await,
        Door::Relay => langbot::relay(shared, asked, caller, place).await,
    }
}

pub(super) fn not_ready(phase: Phase) -> Refusal {
    let message = match phase {
        Phase::Draining => "the server is stopping",
        Phase::Starting | Phase::Serving => "the server is starting",
    };
    Refusal::new(Why::NotReady, message)
}

/// Logs a refused request, without its token.
fn told(peer: SocketAddr, door: &str, path: &str, refusal: &Refusal) {
    match refusal.why {
        Why::NoToken | Why::WrongToken | Why::Browser | Why::Misdirected | Why::Stranger => {
            tracing::info!(target: "audit", %peer, door, path, why = ?refusal.why, "refused");
        }
        _ => {}
    }
}
