//! Addresses of the ports of a sandbox, and the proxy to them.

use std::num::NonZeroU16;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::{OriginalUri, Request};
use axum::http::header::HeaderName;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use box_protocol::{BoxId, UnixMs};
use serde_json::json;
use tower_service::Service as _;

use super::error::{Error, InPath};
use super::lifecycle::{box_id, find};
use super::{EGRESS_HEADER, EGRESS_PORT, EXECD_HEADER, EXECD_PORT, execd, policy};
use crate::http::body::Params;
use crate::http::capability::Scope;
use crate::http::context::{Context, InBox};
use crate::http::proxy::{self, Target};
use crate::http::refusal::{Refusal, RefusalReason, json_response};

/// A header for the server of the reference, which no sandbox gets.
const ACCESS_RENEW: HeaderName = HeaderName::from_static("opensandbox-access-renew");

/// The routes of the inside of a sandbox, which the proxy shares.
static EXECD: LazyLock<Router> = LazyLock::new(|| with_fallbacks(execd::routes()));
static EGRESS: LazyLock<Router> = LazyLock::new(|| with_fallbacks(policy::egress_routes()));

/// Adds the responses that boxd adds to the same routes at their direct address.
fn with_fallbacks(routes: Router) -> Router {
    routes
        .fallback(async || Refusal::new(RefusalReason::NotFound, "unknown path of the sandbox"))
        .method_not_allowed_fallback(async || {
            Refusal::new(RefusalReason::Method, "the path does not allow this method")
        })
}

/// Returns the address of a port, with the headers that open it.
pub(super) async fn endpoint(
    context: Context,
    InPath((id, port)): InPath<(String, String)>,
    params: Params,
) -> Result<Response, Error> {
    let info = find(&context, &id).await?;
    let port = port_of(&port)?;
    let address = context.address();
    let expires: Option<u64> = params.parsed("expires", "must be a time in Unix seconds")?;
    if params.flag("use_server_proxy")? {
        if expires.is_some() {
            return Err(Error::invalid(
                "expires: not possible with use_server_proxy",
            ));
        }
        let endpoint = format!("{address}/v1/sandboxes/{}/proxy/{port}", info.box_id);
        return Ok(json_response(
            StatusCode::OK,
            &json!({"endpoint": endpoint}),
        ));
    }
    let until = expires.map(|seconds| UnixMs(seconds.saturating_mul(1000)));
    if until.is_some_and(|until| until <= UnixMs::now()) {
        return Err(Error::invalid("expires: must be in the future"));
    }
    let path = Context::box_path(&info);
    let found = match port.get() {
        EXECD_PORT => {
            let token = context.grant(&info, Scope::Execd, until);
            json!({"endpoint": format!("{address}{path}/execd"), "headers": {EXECD_HEADER: token}})
        }
        EGRESS_PORT => {
            let token = context.grant(&info, Scope::Egress, until);
            json!({"endpoint": format!("{address}{path}/egress"), "headers": {EGRESS_HEADER: token}})
        }
        _ => {
            let signature = context.grant(&info, Scope::Port(port), until);
            json!({"endpoint": format!("{address}{path}~{signature}/port/{port}")})
        }
    };
    Ok(json_response(StatusCode::OK, &found))
}

fn port_of(text: &str) -> Result<NonZeroU16, Error> {
    let port = text.parse().ok();
    port.ok_or_else(|| Error::invalid("port: must be a number from 1 to 65535"))
}

/// Forwards a request to a port of a sandbox. execd and the network policy are answered here.
pub(super) async fn proxy(context: Context, request: Request) -> Result<Response, Error> {
    let path = request.uri().path().to_owned();
    // `/v1/sandboxes/{id}/proxy/{port}`, as the client wrote it.
    let mut parts = path.split('/').skip(3);
    let id = parts.next().unwrap_or_default();
    let id = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
    let id = box_id(&id)?;
    let text = parts.nth(1).unwrap_or_default();
    let port = port_of(text)?;
    let length: usize = path.split('/').take(6).map(|part| part.len() + 1).sum();
    let prefix = &path[..length - 1];
    match port.get() {
        EXECD_PORT => inside(EXECD.clone(), id, prefix, request).await,
        EGRESS_PORT => inside(EGRESS.clone(), id, prefix, request).await,
        _ => forward(context, id, port, prefix, request).await,
    }
}

/// Passes a request to routes of the inside of a sandbox.
async fn inside(
    mut routes: Router,
    id: BoxId,
    prefix: &str,
    mut request: Request,
) -> Result<Response, Error> {
    let rest = request
        .uri()
        .path_and_query()
        .map_or("", |path| path.as_str());
    let rest = rest.strip_prefix(prefix).unwrap_or_default();
    let inner = if rest.starts_with('/') {
        rest.to_owned()
    } else {
        format!("/{rest}")
    };
    let inner: Result<Uri, _> = inner.parse();
    let inner = inner.map_err(|_| Error::invalid("path: cannot be forwarded"))?;
    let original = std::mem::replace(request.uri_mut(), inner);
    request.extensions_mut().insert(OriginalUri(original));
    request.extensions_mut().insert(InBox(id));
    let Ok(mut response) = routes.call(request).await;
    // The layers would write it as an error of the lifecycle API.
    let refusal = response.extensions().get::<Refusal>();
    if refusal.is_some_and(|refusal| refusal.reason == RefusalReason::Malformed)
        && let Some(refusal) = response.extensions_mut().remove::<Refusal>()
    {
        return Err(refusal.into());
    }
    Ok(response)
}

/// Forwards a request to a server inside a sandbox.
pub(super) async fn forward(
    context: Context,
    id: BoxId,
    port: NonZeroU16,
    prefix: &str,
    mut request: Request,
) -> Result<Response, Error> {
    let target = Target::of(&context, id, port, prefix, request.uri())?;
    request.headers_mut().remove(ACCESS_RENEW);
    let answered = proxy::forward(context, &target, request).await;
    answered.map_err(|refusal: Refusal| match refusal.reason {
        RefusalReason::BadGateway => {
            let code = "BACKEND_CONNECTION_FAILED";
            Error::new(StatusCode::BAD_GATEWAY, code, refusal.message())
        }
        RefusalReason::BadResponse => {
            let code = "BACKEND_RESPONSE_FAILED";
            Error::new(StatusCode::BAD_GATEWAY, code, refusal.message())
        }
        RefusalReason::GatewayTimeout => {
            let code = "BACKEND_TIMEOUT";
            Error::new(StatusCode::GATEWAY_TIMEOUT, code, refusal.message())
        }
        RefusalReason::NotFound => Error::no_sandbox(target.box_id.as_str()),
        _ => refusal.into(),
    })
}
