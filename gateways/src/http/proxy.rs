//! Requests and websockets to a server inside a box.
//!
//! The proxy trusts neither side: a page from a box gets no origin, and neither side receives the other's secrets.

use std::num::NonZeroU16;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    CONNECTION, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN, UPGRADE,
};
use axum::http::uri::PathAndQuery;
use axum::http::{StatusCode, Uri, Version};
use axum::response::Response;
use box_protocol::{BoxError, BoxId, Code};
use http_body_util::BodyExt as _;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::confine::confine;
use super::context::Context;
use super::flushed_body::FlushedBody;
use super::port::PortStream;
use super::refusal::{Refusal, RefusalReason};

/// How long a server inside a box may take to begin its response, once it has the request.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(10);

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

/// A port of a box, and where its paths begin on this server.
#[derive(Debug)]
pub struct Target {
    /// The box.
    pub box_id: BoxId,
    /// The port.
    pub port: NonZeroU16,
    /// The path on this server up to and including the port.
    pub prefix: String,
    /// The path and query in the box.
    pub path: PathAndQuery,
}

impl Target {
    /// Returns the target of a request whose path is `prefix` and the path in the box.
    ///
    /// The query loses tokens of this server. A path that contains one is refused.
    pub fn of(
        context: &Context,
        box_id: BoxId,
        port: NonZeroU16,
        prefix: &str,
        uri: &Uri,
    ) -> Result<Self, Refusal> {
        let malformed = |what| Refusal::new(RefusalReason::Malformed, what);
        let tokens = &context.server.tokens;
        let rest = uri.path().strip_prefix(prefix).unwrap_or_default();
        let rest = if rest.is_empty() { "/" } else { rest };
        let query = uri.query().map(|query| tokens.clean_query(query));
        let inner = query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"));
        if tokens.has_token(&inner) {
            let reason = "path: contains a token of this server; send the token in a header";
            return Err(malformed(reason));
        }
        let path = inner.parse();
        Ok(Self {
            box_id,
            port,
            prefix: prefix.to_owned(),
            path: path.map_err(|_| malformed("cannot forward the request"))?,
        })
    }
}

/// Forwards a request to the server inside the box without tokens of this server, and returns its response.
///
/// A websocket ends when the server stops.
pub async fn forward(
    context: Context,
    target: &Target,
    mut request: Request,
) -> Result<Response, Refusal> {
    let (runtime, caller) = (context.runtime(), &context.caller);
    context.server.tokens.clean_headers(request.headers_mut());
    let wants_socket = is_upgrade(request.headers());
    let stream = PortStream::open(runtime, caller, &target.box_id, target.port).await;
    let stream = stream.map_err(|error| refusal_of(&error, &target.box_id))?;
    let near = hyper::upgrade::on(&mut request);
    let inner = box_request(request, target, wants_socket)?;
    let (mut sender, connection) = http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| no_http_response(target.port))?;
    // The connection ends with the response, or with the upgraded connection.
    tokio::spawn(connection.with_upgrades());
    let (is_sent, sent) = oneshot::channel::<()>();
    // hyper drops the body once it has sent it.
    let inner = inner.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _ = &is_sent;
            frame
        }))
    });
    let silence = async {
        let _ = sent.await;
        sleep(RESPONSE_TIMEOUT).await;
    };
    let response = tokio::select! {
        response = sender.send_request(inner) => response,
        () = silence => {
            let port = target.port;
            let limit = RESPONSE_TIMEOUT.as_secs();
            let message = format!("port {port} of the box has not answered for {limit} seconds");
            return Err(Refusal::new(RefusalReason::GatewayTimeout, message));
        }
    };
    let mut response = response.map_err(|error| {
        tracing::debug!(%error, "no HTTP response from the box");
        no_http_response(target.port)
    })?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (mut parts, body) = response.into_parts();
        // The box's HTTP version does not apply to the client's connection.
        parts.version = Version::HTTP_11;
        remove_hop_by_hop(&mut parts.headers);
        confine(&mut parts.headers, &target.prefix);
        return Ok(Response::from_parts(
            parts,
            Body::new(FlushedBody::new(body, context)),
        ));
    }
    if !wants_socket {
        return Err(no_http_response(target.port));
    }
    let far = hyper::upgrade::on(&mut response);
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
            _ = context.closing() => {}
        }
    });
    let (mut parts, _) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    set_upgrade_headers(&mut parts.headers);
    Ok(Response::from_parts(parts, Body::empty()))
}

/// Returns the refusal of a request for a box that the caller does not see.
pub fn unknown_box(id: &str) -> Refusal {
    Refusal::new(RefusalReason::NotFound, format!("box {id:?} not found"))
}

fn refusal_of(error: &BoxError, id: &BoxId) -> Refusal {
    let reason = match error.code() {
        Code::NotFound => return unknown_box(id.as_str()),
        Code::Conflict => RefusalReason::Conflict,
        Code::Capacity | Code::Overloaded => RefusalReason::NotReady,
        _ => RefusalReason::BadGateway,
    };
    Refusal::new(reason, error.message())
}

fn no_http_response(port: NonZeroU16) -> Refusal {
    let message = format!("port {port} of the box does not answer in HTTP");
    Refusal::new(RefusalReason::BadResponse, message)
}

/// Builds the request that the box receives.
fn box_request(request: Request, target: &Target, wants_socket: bool) -> Result<Request, Refusal> {
    let malformed = || Refusal::new(RefusalReason::Malformed, "cannot forward the request");
    let (mut parts, body) = request.into_parts();
    parts.uri = Uri::from(target.path.clone());
    parts.version = Version::HTTP_11;
    let headers = &mut parts.headers;
    remove_hop_by_hop(headers);
    // The server has already checked the caller, and `Origin` would name this server, not the box's.
    for name in [ORIGIN, EXPECT] {
        headers.remove(name);
    }
    let host = HeaderValue::try_from(format!("localhost:{}", target.port));
    headers.insert(HOST, host.map_err(|_| malformed())?);
    if wants_socket {
        set_upgrade_headers(headers);
    }
    Ok(Request::from_parts(parts, body))
}

/// Removes the hop-by-hop headers, including those that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = words(headers, &CONNECTION)
        .filter_map(|name| name.parse().ok())
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

/// Returns whether a request asks for a websocket.
pub fn is_upgrade(headers: &HeaderMap) -> bool {
    let lists = |name, word| words(headers, name).any(|part| part.eq_ignore_ascii_case(word));
    lists(&CONNECTION, "upgrade") && lists(&UPGRADE, "websocket")
}

/// Returns the words of a header that lists some, separated by commas.
fn words<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

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
