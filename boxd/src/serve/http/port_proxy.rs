//! `/boxes/{box}/port/{port}/…`: HTTP and websockets to a server inside a box.
//!
//! The proxy trusts neither side: a page from a box gets no origin, and neither side receives the other's secrets.

use std::num::NonZeroU16;
use std::sync::Arc;

use box_client::{BoxClient, ClientError, Code, PortStream};
use box_protocol::{BoxId, UnixMs};
use box_rpc::{Options, Router, Session};
use box_runtime::Caller;
use box_transports::connection_limit::ConnectionPermit;
use box_transports::queue;
use http_body_util::BodyExt as _;
use hyper::client::conn::http1;
use hyper::header::{
    CONNECTION, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN, UPGRADE,
};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;

use super::body::IncomingRequest;
use super::dispatch::not_ready;
use super::header_filter;
use super::response::{HttpResponse, Refusal, RefusalReason};
use super::signed_url::{BoxSegment, Scope};
use super::state::{HttpState, Phase};
use super::websocket::lists;

/// The capacity of the message queue to the service in this process.
const QUEUE_MESSAGES: usize = 64;

/// Hop-by-hop headers, which the proxy does not forward.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The parsed path of a request.
struct Target<'a> {
    segment: BoxSegment,
    port: NonZeroU16,
    /// The path up to and including the port, as the client wrote it.
    prefix: &'a str,
    /// The rest of the path, from its slash.
    rest: &'a str,
}

impl<'a> Target<'a> {
    fn of(path: &'a str) -> Result<Self, Refusal> {
        let malformed = |what| Refusal::new(RefusalReason::Malformed, what);
        let mut parts = path.splitn(6, '/').skip(2);
        let (segment, port) = (parts.next().unwrap_or_default(), parts.nth(1));
        let segment =
            BoxSegment::read(segment).ok_or_else(|| malformed("box: the id is not UTF-8"))?;
        let text = port.unwrap_or_default();
        let port = text.parse().ok();
        let port = port.ok_or_else(|| malformed("port: must be a number from 1 to 65535"))?;
        let length = path.len() - parts.next().map_or(0, |rest| rest.len() + 1);
        let (prefix, rest) = path.split_at(length);
        Ok(Self {
            segment,
            port,
            prefix,
            rest,
        })
    }

    fn box_id(&self) -> Result<BoxId, Refusal> {
        BoxId::new(&self.segment.id).map_err(|_| unknown_box(&self.segment.id))
    }
}

fn unknown_box(id: &str) -> Refusal {
    Refusal::new(RefusalReason::NotFound, format!("box {id:?} not found"))
}

/// Returns the caller that a signed path acts as; `None` without a valid signature.
pub(super) async fn signed_caller(
    state: &HttpState,
    path: &str,
) -> Result<Option<Caller>, Refusal> {
    let target = Target::of(path)?;
    let Some(signature) = &target.segment.signature else {
        return Ok(None);
    };
    if state.phase() != Phase::Serving {
        return Err(not_ready(state.phase()));
    }
    let Ok(id) = target.box_id() else {
        return Ok(None);
    };
    let Ok(info) = state.runtime.get(&Caller::Local, &id).await else {
        return Ok(None);
    };
    let scope = Scope::Port(target.port);
    let permits = state.key.permits(signature, &info, scope, UnixMs::now());
    Ok(permits.then_some(Caller::Local))
}

/// Returns whether the path has a signature, valid or not.
pub(super) fn has_signature(path: &str) -> bool {
    Target::of(path).is_ok_and(|target| target.segment.signature.is_some())
}

/// Forwards a request to the server inside the box, and returns its response.
pub(super) async fn forward(
    state: &Arc<HttpState>,
    request: &mut IncomingRequest,
    caller: Caller,
    permit: ConnectionPermit,
) -> Result<HttpResponse, Refusal> {
    let path = request.uri().path().to_owned();
    let target = Target::of(&path)?;
    let wants_socket = lists(request.headers(), &CONNECTION, "upgrade")
        && lists(request.headers(), &UPGRADE, "websocket");
    let (stream, service) = connect(state, caller, &target).await?;
    let inner = box_request(state, request, &target, wants_socket)?;
    let (mut sender, connection) = http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| no_http_response(target.port))?;
    let held = Arc::clone(&service);
    tokio::spawn(async move {
        // The connection ends with the response, or with the upgraded connection.
        let _ = connection.with_upgrades().await;
        drop(held);
    });
    let response = sender.send_request(inner).await;
    let mut response = response.map_err(|error| {
        tracing::debug!(%error, "no HTTP response from the box");
        no_http_response(target.port)
    })?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (mut parts, body) = response.into_parts();
        // The box's HTTP version does not apply to the client's connection.
        parts.version = hyper::Version::HTTP_11;
        remove_hop_by_hop(&mut parts.headers);
        header_filter::confine(&mut parts.headers, target.prefix);
        // Keep the connection to the box until the response body ends.
        let body = body.map_err(move |error| {
            let _held = &service;
            std::io::Error::other(error)
        });
        return Ok(Response::from_parts(parts, body.boxed_unsync()));
    }
    if !wants_socket {
        return Err(no_http_response(target.port));
    }
    let (near, far) = (
        hyper::upgrade::on(request),
        hyper::upgrade::on(&mut response),
    );
    let state = Arc::clone(state);
    tokio::spawn(async move {
        let joined = async {
            let (near, far) = futures::future::try_join(near, far).await?;
            let (mut near, mut far) = (TokioIo::new(near), TokioIo::new(far));
            let copied = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            tracing::debug!(?copied, "websocket to a port ended");
            Ok::<_, hyper::Error>(())
        };
        tokio::select! {
            _ = joined => {}
            () = state.draining() => {}
        }
        drop((service, permit));
    });
    let (mut parts, _) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    set_upgrade_headers(&mut parts.headers);
    let empty = http_body_util::Empty::new().map_err(|never| match never {});
    Ok(Response::from_parts(parts, empty.boxed_unsync()))
}

/// Both ends of the connection to the service; dropping them closes it.
type ServiceConnection = Arc<(Session, Session)>;

/// Connects to the port as this caller.
async fn connect(
    state: &HttpState,
    caller: Caller,
    target: &Target<'_>,
) -> Result<(PortStream, ServiceConnection), Refusal> {
    let id = target.box_id()?;
    let (near, far) = queue::pair(QUEUE_MESSAGES);
    let far = Session::start(far, state.router.clone(), Options::new(caller));
    let near = Session::start(near, Router::empty(), Options::client());
    let client = BoxClient::from_peer(near.peer());
    let service = Arc::new((near, far));
    let stream = async {
        client
            .open(id.as_str())
            .await?
            .connect_port(target.port)
            .await
    };
    match stream.await {
        Ok(stream) => Ok((stream, service)),
        Err(error) => Err(refusal_of(&error, &target.segment.id)),
    }
}

fn refusal_of(error: &ClientError, id: &str) -> Refusal {
    let reason = match error.code() {
        Code::NotFound => return unknown_box(id),
        Code::Conflict => RefusalReason::Conflict,
        Code::Capacity | Code::Overloaded => RefusalReason::NotReady,
        _ => RefusalReason::BadGateway,
    };
    let message = error.refusal().map(|refusal| refusal.message().to_owned());
    Refusal::new(reason, message.unwrap_or_else(|| error.to_string()))
}

fn no_http_response(port: NonZeroU16) -> Refusal {
    let message = format!("port {port} of the box does not answer in HTTP");
    Refusal::new(RefusalReason::BadGateway, message)
}

/// Builds the request that the box receives.
fn box_request(
    state: &HttpState,
    request: &mut IncomingRequest,
    target: &Target<'_>,
    wants_socket: bool,
) -> Result<Request<super::body::Body>, Refusal> {
    let rest = if target.rest.is_empty() {
        "/"
    } else {
        target.rest
    };
    let query = request
        .uri()
        .query()
        .map(|query| state.auth.query_without_tokens(query));
    let path = query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"));
    let malformed = || Refusal::new(RefusalReason::Malformed, "cannot forward the request");
    if state.auth.has_token(&path) {
        let reason = "path: contains a token of this server; send the token in a header";
        return Err(Refusal::new(RefusalReason::Malformed, reason));
    }
    let body = request.body_mut().take().ok_or_else(malformed)?;
    let mut forwarded = Request::new(body);
    *forwarded.method_mut() = request.method().clone();
    *forwarded.uri_mut() = path.parse::<Uri>().map_err(|_| malformed())?;
    let headers = forwarded.headers_mut();
    headers.clone_from(request.headers());
    remove_hop_by_hop(headers);
    state.auth.remove_tokens(headers);
    // The server has already checked the caller, and `Origin` would name this server, not the box's.
    for name in [ORIGIN, EXPECT] {
        headers.remove(name);
    }
    let host = HeaderValue::try_from(format!("localhost:{}", target.port));
    headers.insert(HOST, host.map_err(|_| malformed())?);
    if wants_socket {
        set_upgrade_headers(headers);
    }
    Ok(forwarded)
}

/// Removes the hop-by-hop headers, including those that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

fn set_upgrade_headers(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_without_decoding() {
        for (path, id, port, prefix, rest) in [
            ("/boxes/b/port/80", "b", 80, "/boxes/b/port/80", ""),
            ("/boxes/b/port/80/", "b", 80, "/boxes/b/port/80", "/"),
            (
                "/boxes/a%20b/port/8080/x/y%2Fz/",
                "a b",
                8080,
                "/boxes/a%20b/port/8080",
                "/x/y%2Fz/",
            ),
            (
                "/boxes/b/port/65535//x",
                "b",
                65535,
                "/boxes/b/port/65535",
                "//x",
            ),
        ] {
            let target = Target::of(path).unwrap();
            assert_eq!(
                (
                    target.segment.id.as_str(),
                    target.port.get(),
                    target.prefix,
                    target.rest
                ),
                (id, port, prefix, rest)
            );
        }
        for path in [
            "/boxes/b/port/0",
            "/boxes/b/port/65536/",
            "/boxes/b/port/x",
            "/boxes/%ff/port/80",
        ] {
            assert!(Target::of(path).is_err(), "{path}");
        }
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("x-other", "2"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["x-other"], "2");
    }
}
