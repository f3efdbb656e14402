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

use super::answer::{Answer, Refusal, Why};
use super::body::Asked;
use super::caps::{Named, Scope};
use super::dispatch::not_ready;
use super::page;
use super::shared::{Phase, Shared};
use super::websocket::lists;

/// The capacity of the message queue to the service in this process.
const QUEUED: usize = 64;

/// Hop-by-hop headers, which the proxy does not forward.
const HOP: [&str; 8] = [
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
    named: Named,
    port: NonZeroU16,
    /// The path up to and including the port, as the client wrote it.
    prefix: &'a str,
    /// The rest of the path, from its slash.
    rest: &'a str,
}

impl<'a> Target<'a> {
    fn of(path: &'a str) -> Result<Self, Refusal> {
        let malformed = |what| Refusal::new(Why::Malformed, what);
        let mut parts = path.splitn(6, '/').skip(2);
        let (segment, port) = (parts.next().unwrap_or_default(), parts.nth(1));
        let named = Named::read(segment).ok_or_else(|| malformed("the box's id is not UTF-8"))?;
        let text = port.unwrap_or_default();
        let port = text.parse().ok();
        let port = port.ok_or_else(|| malformed("a port is a number from 1 to 65535"))?;
        let length = path.len() - parts.next().map_or(0, |rest| rest.len() + 1);
        let (prefix, rest) = path.split_at(length);
        Ok(Self {
            named,
            port,
            prefix,
            rest,
        })
    }

    fn box_id(&self) -> Result<BoxId, Refusal> {
        BoxId::new(&self.named.id).map_err(|_| unknown(&self.named.id))
    }
}

fn unknown(id: &str) -> Refusal {
    Refusal::new(Why::NotFound, format!("there is no box {id:?}"))
}

/// Returns the caller that the capability in a path stands for, if it has one.
pub(super) async fn invited(shared: &Shared, path: &str) -> Result<Option<Caller>, Refusal> {
    let target = Target::of(path)?;
    let Some(cap) = &target.named.cap else {
        return Ok(None);
    };
    if shared.phase() != Phase::Serving {
        return Err(not_ready(shared.phase()));
    }
    let Ok(id) = target.box_id() else {
        return Ok(None);
    };
    let Ok(info) = shared.runtime.get(&Caller::Local, &id).await else {
        return Ok(None);
    };
    let scope = Scope::Port(target.port);
    let opens = shared.key.opens(cap, &info, scope, UnixMs::now());
    Ok(opens.then_some(Caller::Local))
}

/// Returns whether the path has the form of a capability, valid or not.
pub(super) fn is_addressed(path: &str) -> bool {
    Target::of(path).is_ok_and(|target| target.named.cap.is_some())
}

/// Forwards a request to the server inside the box, and returns its answer.
pub(super) async fn pass(
    shared: &Arc<Shared>,
    asked: &mut Asked,
    caller: Caller,
    place: ConnectionPermit,
) -> Result<Answer, Refusal> {
    let path = asked.uri().path().to_owned();
    let target = Target::of(&path)?;
    let wants_socket = lists(asked.headers(), &CONNECTION, "upgrade")
        && lists(asked.headers(), &UPGRADE, "websocket");
    let (stream, way) = connect(shared, caller, &target).await?;
    let request = forward(shared, asked, &target, wants_socket)?;
    let (mut sender, connection) = http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| silent(target.port))?;
    let held = Arc::clone(&way);
    tokio::spawn(async move {
        // The connection ends with the answer, or with the upgraded connection.
        let _ = connection.with_upgrades().await;
        drop(held);
    });
    let answer = sender.send_request(request).await;
    let mut answer = answer.map_err(|error| {
        tracing::debug!(%error, "a box's answer");
        silent(target.port)
    })?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (mut parts, body) = answer.into_parts();
        // The box's HTTP version does not apply to the client's connection.
        parts.version = hyper::Version::HTTP_11;
        strip(&mut parts.headers);
        page::confine(&mut parts.headers, target.prefix);
        // Keep the connection to the box until the answer's body ends.
        let body = body.map_err(move |error| {
            let _held = &way;
            std::io::Error::other(error)
        });
        return Ok(Response::from_parts(parts, body.boxed_unsync()));
    }
    if !wants_socket {
        return Err(silent(target.port));
    }
    let (near, far) = (hyper::upgrade::on(asked), hyper::upgrade::on(&mut answer));
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let joined = async {
            let (near, far) = futures::future::try_join(near, far).await?;
            let (mut near, mut far) = (TokioIo::new(near), TokioIo::new(far));
            let copied = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            tracing::debug!(?copied, "a websocket to a port is over");
            Ok::<_, hyper::Error>(())
        };
        tokio::select! {
            _ = joined => {}
            () = shared.draining() => {}
        }
        drop((way, place));
    });
    let (mut parts, _) = answer.into_parts();
    strip(&mut parts.headers);
    upgrades(&mut parts.headers);
    let nothing = http_body_util::Empty::new().map_err(|never| match never {});
    Ok(Response::from_parts(parts, nothing.boxed_unsync()))
}

/// Both ends of the connection to the service; dropping them closes it.
type Way = Arc<(Session, Session)>;

/// Connects to the port as this caller.
async fn connect(
    shared: &Shared,
    caller: Caller,
    target: &Target<'_>,
) -> Result<(PortStream, Way), Refusal> {
    let id = target.box_id()?;
    let (near, far) = queue::pair(QUEUED);
    let far = Session::start(far, shared.router.clone(), Options::new(caller));
    let near = Session::start(near, Router::empty(), Options::client());
    let client = BoxClient::from_peer(near.peer());
    let way = Arc::new((near, far));
    let stream = async {
        client
            .open(id.as_str())
            .await?
            .connect_port(target.port)
            .await
    };
    match stream.await {
        Ok(stream) => Ok((stream, way)),
        Err(error) => Err(refused(&error, &target.named.id)),
    }
}

fn refused(error: &ClientError, id: &str) -> Refusal {
    let why = match error.code() {
        Code::NotFound => return unknown(id),
        Code::Conflict => Why::Conflict,
        Code::Capacity | Code::Overloaded => Why::NotReady,
        _ => Why::BadGateway,
    };
    let said = error.refusal().map(|refusal| refusal.message().to_owned());
    Refusal::new(why, said.unwrap_or_else(|| error.to_string()))
}

fn silent(port: NonZeroU16) -> Refusal {
    let message = format!("what listens on port {port} of the box does not answer in HTTP");
    Refusal::new(Why::BadGateway, message)
}

/// Builds the request that the box receives.
fn forward(
    shared: &Shared,
    asked: &mut Asked,
    target: &Target<'_>,
    wants_socket: bool,
) -> Result<Request<super::body::Body>, Refusal> {
    let rest = if target.rest.is_empty() {
        "/"
    } else {
        target.rest
    };
    let query = asked
        .uri()
        .query()
        .map(|query| shared.auth.other_query(query));
    let path = query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"));
    let malformed = || Refusal::new(Why::Malformed, "the request cannot be passed on");
    if shared.auth.is_in(&path) {
        let why = "path: it holds a token of this server; send it in a header";
        return Err(Refusal::new(Why::Malformed, why));
    }
    let body = asked.body_mut().take().ok_or_else(malformed)?;
    let mut request = Request::new(body);
    *request.method_mut() = asked.method().clone();
    *request.uri_mut() = path.parse::<Uri>().map_err(|_| malformed())?;
    let headers = request.headers_mut();
    headers.clone_from(asked.headers());
    strip(headers);
    shared.auth.withhold(headers);
    // The server has already checked the caller, and `Origin` would name this server, not the box's.
    for name in [ORIGIN, EXPECT] {
        headers.remove(name);
    }
    let host = HeaderValue::try_from(format!("localhost:{}", target.port));
    headers.insert(HOST, host.map_err(|_| malformed())?);
    if wants_socket {
        upgrades(headers);
    }
    Ok(request)
}

/// Removes the hop-by-hop headers, including those that `Connection` names.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP {
        headers.remove(name);
    }
}

fn upgrades(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_taken_apart_as_it_was_written() {
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
                    target.named.id.as_str(),
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
    fn what_concerns_one_connection_is_not_passed_on() {
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
        strip(&mut headers);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["x-other"], "2");
    }
}
