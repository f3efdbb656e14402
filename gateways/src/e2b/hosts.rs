//! The host names of boxes: `PORT-ID.DOMAIN`, and those of the API below the same domain.
//!
//! The server rewrites a request for such a name to a path. A path of a port is served only after that: below the
//! server's own name, the pages of all boxes would share one origin.

use std::num::NonZeroU16;

use axum::http::header::HOST;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use axum::{Extension, Router, extract::Request};
use box_protocol::{BoxInfo, UnixMs};
use serde_json::json;

use super::access::{
    ACCESS_TOKEN, API_KEY, SANDBOX_ID, TRAFFIC_TOKEN, every_box, holder, is_named,
};
use super::error::{EnvdError, GONE, PlainError};
use super::model::BoxNote;
use super::{API, ENVD};
use crate::http::capability::{BoxSegment, Scope};
use crate::http::context::Context;
use crate::http::proxy::{Target, forward};
use crate::http::refusal::{RefusalReason, json_response};

/// The domain of boxes on a server that only its own machine reaches. Resolvers answer with a loopback address for all
/// names below `localhost`.
pub const LOOPBACK_DOMAIN: &str = "box.localhost";

/// The path of ports.
const PORTS: &str = "/e2b/hosts";

/// The ports of the calls into a box and of its code interpreter, which this server has itself.
const OWN_PORTS: [u16; 2] = [49983, 49999];

/// A request that named its target by its host.
#[derive(Debug, Clone, Copy)]
pub struct ByHost;

pub(super) fn routes() -> Router {
    let path = format!("{PORTS}/{{port}}/{{id}}/{{*path}}");
    let root = format!("{PORTS}/{{port}}/{{id}}/");
    Router::new()
        .route(&path, any(port))
        .route(&root, any(port))
}

/// Returns the domain below which the ports of boxes answer, with the port of this server.
pub(super) fn domain(context: &Context) -> Option<String> {
    if let Some(domain) = &context.server.box_domain {
        return Some(domain.clone());
    }
    let address = context.address();
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let port = &address[host.len()..];
    let is_loopback = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    is_loopback.then(|| format!("{LOOPBACK_DOMAIN}{port}"))
}

/// Rewrites a request for a host name below the domain of boxes to a path; returns whether it did.
pub fn rewrite(domain: &str, request: &mut Parts) -> bool {
    let rewritten = (|| {
        let mut hosts = request.headers.get_all(HOST).iter();
        // A proxy in front of this server may read another one of two names.
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return None;
        };
        let host = host.to_str().ok()?;
        let host = host.split(':').next()?.to_ascii_lowercase();
        // A proxy in front of this server may listen on another port than that of HTTPS.
        let domain = domain.split(':').next()?;
        let label = host.strip_suffix(domain)?.strip_suffix('.')?;
        let (prefix, id) = match label {
            // Below the name of the API are the addresses to upload the files of builds to.
            "api" | "sandbox" if is_signed(request) => (String::new(), None),
            "api" => (API.to_owned(), None),
            "sandbox" => (ENVD.to_owned(), None),
            _ => {
                let (port, id) = label.split_once('-')?;
                let port: NonZeroU16 = port.parse().ok()?;
                if OWN_PORTS.contains(&port.get()) {
                    let prefix = if is_signed(request) { "" } else { ENVD };
                    (prefix.to_owned(), Some(HeaderValue::try_from(id).ok()?))
                } else {
                    (format!("{PORTS}/{port}/{id}"), None)
                }
            }
        };
        let rest = request.uri.path_and_query().map_or("/", |it| it.as_str());
        let uri: Uri = format!("{prefix}{rest}").parse().ok()?;
        Some((uri, id))
    })();
    let Some((uri, id)) = rewritten else {
        return false;
    };
    request.uri = uri;
    if let Some(id) = id {
        request.headers.insert(SANDBOX_ID, id);
    }
    request.extensions.insert(ByHost);
    true
}

/// Returns whether a request is for a signed address of a file, which has no other credential.
fn is_signed(request: &Parts) -> bool {
    let query = request.uri.query().unwrap_or_default();
    let has = |name| request.headers.contains_key(name);
    request.uri.path() == "/files"
        && query.split('&').any(|part| part.starts_with("signature="))
        && !has(ACCESS_TOKEN)
        && !has(API_KEY)
}

/// Forwards a request to a port of a box. Ports are public unless the box says otherwise.
async fn port(
    context: Context,
    by_host: Option<Extension<ByHost>>,
    request: Request,
) -> Result<Response, PlainError> {
    let mut segments = request.uri().path().split('/').skip(3);
    let (number, id) = (segments.next(), segments.next());
    let number = number.and_then(|number| number.parse::<NonZeroU16>().ok());
    let (Some(number), Some(id), Some(_)) = (number, id, by_host) else {
        return Err(EnvdError::not_found("path: not found; use the host name of the port").into());
    };
    let (id, prefix) = (id.to_owned(), format!("{PORTS}/{number}/{id}"));
    let (all, boxes) = every_box(context).await?;
    let gone = || {
        let body = json!({"sandboxId": id, "message": GONE, "code": 502});
        Ok(json_response(StatusCode::BAD_GATEWAY, &body))
    };
    let Some(info) = boxes.iter().find(|info| is_named(info, id.as_bytes())) else {
        return gone();
    };
    if !BoxNote::of(info).public && !has_token(&all, info, &request) {
        let message = "e2b-traffic-access-token: missing or invalid";
        return Ok(PlainError::from(EnvdError::new("permission_denied", message)).into_response());
    }
    let (context, box_id) = holder(all, info)?;
    let mut target = Target::of(&context, box_id, number, &prefix, request.uri())?;
    // The box has the whole origin.
    target.prefix = String::new();
    match forward(context, &target, request).await {
        Err(refusal) if refusal.reason == RefusalReason::BadGateway => {
            let message = "The sandbox is running but port is not open";
            let body = json!({"sandboxId": id, "message": message, "port": number, "code": 502});
            Ok(json_response(StatusCode::BAD_GATEWAY, &body))
        }
        Err(refusal)
            if matches!(
                refusal.reason,
                RefusalReason::Conflict | RefusalReason::NotFound
            ) =>
        {
            gone()
        }
        forwarded => Ok(forwarded?),
    }
}

fn has_token(context: &Context, info: &BoxInfo, request: &Request) -> bool {
    let token = request.headers().get(TRAFFIC_TOKEN);
    let token = token.and_then(|token| BoxSegment::read(token.to_str().ok()?));
    let Some(BoxSegment {
        id,
        signature: Some(signature),
    }) = token
    else {
        return false;
    };
    let key = &context.server.key;
    id == info.unique_id && key.permits(&signature, info, Scope::Ports, UnixMs::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(host: &str, uri: &str) -> Option<(String, Option<String>)> {
        let request = Request::builder().header(HOST, host).uri(uri);
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        let id = |parts: &Parts| Some(parts.headers.get(SANDBOX_ID)?.to_str().unwrap().to_owned());
        rewrite("box.localhost", &mut parts).then(|| (parts.uri.to_string(), id(&parts)))
    }

    #[test]
    fn host_names_of_boxes_are_paths() {
        let ports = |path: &str| Some((path.to_owned(), None));
        assert_eq!(
            rewritten("3000-1f.box.localhost:7080", "/a?b=c"),
            ports("/e2b/hosts/3000/1f/a?b=c")
        );
        assert_eq!(
            rewritten("8080-p-1.BOX.localhost", "/"),
            ports("/e2b/hosts/8080/p-1/")
        );
        assert_eq!(
            rewritten("api.box.localhost", "/v2/x"),
            ports("/e2b/api/v2/x")
        );
        let envd = rewritten("49983-1f.box.localhost", "/files?path=a");
        assert_eq!(
            envd,
            Some(("/e2b/envd/files?path=a".to_owned(), Some("1f".to_owned())))
        );
        let file = "/files?path=a&signature=v1_x";
        for (host, id) in [
            ("49983-1f.box.localhost", Some("1f")),
            ("sandbox.box.localhost", None),
            ("api.box.localhost", None),
        ] {
            let expected = (file.to_owned(), id.map(str::to_owned));
            assert_eq!(rewritten(host, file), Some(expected), "{host}");
        }
        for host in [
            "localhost",
            "box.localhost",
            "x.box.localhost",
            "0-1f.box.localhost",
            "3000-1f.evil",
            "xbox.localhost",
        ] {
            assert_eq!(rewritten(host, "/"), None, "{host}");
        }
    }

    #[test]
    fn the_domain_may_have_the_port_of_a_proxy() {
        for host in ["api.boxes.example:8443", "api.boxes.example"] {
            let request = Request::builder().header(HOST, host);
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            assert!(rewrite("boxes.example:8443", &mut parts), "{host}");
        }
    }

    #[test]
    fn a_request_with_two_host_names_has_none() {
        let request = Request::builder()
            .header(HOST, "3000-1f.box.localhost")
            .header(HOST, "3000-2f.box.localhost");
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        assert!(!rewrite("box.localhost", &mut parts));
        assert!(parts.extensions.get::<ByHost>().is_none());
    }

    #[test]
    fn a_signed_file_with_a_token_is_a_call_into_the_box() {
        let request = Request::builder()
            .header(HOST, "49983-1f.box.localhost")
            .header(ACCESS_TOKEN, "a~b")
            .uri("/files?path=a&signature=v1_x");
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        assert!(rewrite("box.localhost", &mut parts));
        assert_eq!(parts.uri.path(), "/e2b/envd/files");
    }
}
