//! `/boxes/{box}/port/{port}/…`: HTTP and websockets to whoever listens inside a box. What is passed on is not believed: a box's
//! page gets no origin of its own, and neither side learns the other's secrets.

use std::num::NonZeroU16;
use std::sync::Arc;

use box_client::{BoxClient, ClientError, Code, PortStream};
use box_protocol::{BoxId, UnixMs};
use box_rpc::{Options, Router, Session};
use box_runtime::Caller;
use box_transports::places::Place;
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

/// Messages that may wait on their way to the service in this process.
const QUEUED: usize = 64;

/// What concerns one connection only, and is not passed on.
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

/// What a path asks for.
struct Target<'a> {
    named: Named,
    port: NonZeroU16,
    /// Up to and with the port, as it was written.
    prefix: &'a str,
    /// The rest, from its slash.
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

/// Whether the path itself is the credential: as whom the request goes on then.
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

/// Whether the path would be the credential, were it right.
pub(super) fn is_addressed(path: &str) -> bool {
    Target::of(path).is_ok_and(|target| target.named.cap.is_some())
}

/// Passes a request on to whoever listens, and the answer back.
pub(super) async fn pass(
    shared: &Arc<Shared>,
    asked: &mut Asked,
    caller: Caller,
    place: Place,
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
        // It ends with the answer, or with the connection that it has become.
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
        // The box's, which says nothing about ours.
        parts.version = hyper::Version::HTTP_11;
        strip(&mut parts.headers);
        page::confine(&mut parts.headers, target.prefix);
        // What is asked on this connection is over when the answer is, and not before.
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

/// The two ends of the way to the service in this process; dropped, everything on it is over.
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

/// The request as the box gets it.
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
    // Who may come is decided; a page of the box is none of this server's, which it would name.
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

/// Takes out what concerns one connection only, and what that says does.
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
