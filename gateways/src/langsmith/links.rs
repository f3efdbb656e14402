//! URLs that work without a token: of a port, and of one file.
//!
//! A URL contains a capability, or its client sends the capability in a header. The server keeps no list of them.

use std::num::NonZeroU16;

use axum::extract::{Path, Request};
use axum::http::header::{
    CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::actions::FileReadParams;
use box_protocol::{Invalid, UnixMs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::box_request::{after, refuse_content};
use super::boxes::find;
use super::errors::{ApiError, operation_error};
use super::files::is_relative;
use crate::http::body::{Json, from_json};
use crate::http::capability::Scope;
use crate::http::context::{Context, InBox};
use crate::http::download::Download;
use crate::http::proxy::{self, Target};
use crate::http::refusal::{Refusal, RefusalReason, json_response};

/// The lifetime of a URL of a port, in seconds: the default and the maximum.
const SERVICE_SECONDS: u64 = 600;
const MAX_SERVICE_SECONDS: u64 = 86_400;

/// Returns what a request to the inside of a box needs, if a capability can open it.
pub(super) fn scope(request: &Parts) -> Option<Scope<'_>> {
    let mut segments = request.uri.path().split('/').skip(4);
    let (kind, of) = (segments.next()?, segments.next()?);
    match kind {
        "port" => of.parse().ok().map(Scope::Port),
        "link" if segments.next().is_none() => Some(Scope::Download(of)),
        _ => None,
    }
}

/// A request for the URL of a port.
#[derive(Debug, Deserialize)]
pub(super) struct ServiceRequest {
    port: u32,
    expires_in_seconds: Option<u64>,
    access: Option<String>,
    embed_origins: Option<Vec<String>>,
}

/// `POST /boxes/{name}/service-url`.
pub(super) async fn service_url(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<ServiceRequest>,
) -> Result<Response, ApiError> {
    let port = u16::try_from(request.port).ok().and_then(NonZeroU16::new);
    let port = port.ok_or_else(|| Invalid::new("port", "must be between 1 and 65535"))?;
    let seconds = request.expires_in_seconds.unwrap_or(SERVICE_SECONDS);
    if !(1..=MAX_SERVICE_SECONDS).contains(&seconds) {
        let rule = format!("must be between 1 and {MAX_SERVICE_SECONDS}");
        return Err(Invalid::new("expires_in_seconds", rule).into());
    }
    let access = request.access.as_deref();
    if !matches!(access, None | Some("token" | "off")) {
        let rule = "this server has no logins; omit it for a URL with a token";
        return Err(Invalid::new("access", rule).into());
    }
    if request
        .embed_origins
        .is_some_and(|origins| !origins.is_empty())
    {
        let rule = "pages of a box cannot be embedded; omit it";
        return Err(Invalid::new("embed_origins", rule).into());
    }
    let info = find(&context, &name).await?;
    let expires_at = after(UnixMs::now(), seconds);
    let token = context.grant(&info, Scope::Port(port), Some(expires_at));
    let (url, path) = (&context.url, Context::box_path(&info));
    let body = json!({
        "browser_url": format!("{url}{path}~{token}/port/{port}/"),
        "service_url": format!("{url}{path}/langsmith/port/{port}"),
        "token": token,
        "expires_at": expires_at.to_string(),
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// `GET /boxes/{name}/service-urls`.
pub(super) async fn list_service_urls(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    find(&context, &name).await?;
    let body = json!({"items": [], "next_cursor": null});
    Ok(json_response(StatusCode::OK, &body))
}

/// `DELETE /boxes/{name}/service-urls`.
pub(super) async fn delete_service_url() -> ApiError {
    ApiError::unsupported("URLs of ports cannot be revoked; they expire, or end with their sandbox")
}

/// Forwards a request to a port of a box.
pub(super) async fn port(
    context: Context,
    InBox(box_id): InBox,
    request: Request,
) -> Result<Response, Refusal> {
    let path = request.uri().path();
    let mut segments = path.splitn(7, '/').skip(5);
    let port = segments.next().and_then(|port| port.parse().ok());
    let port = port.ok_or_else(|| {
        let message = "port: must be a number from 1 to 65535";
        Refusal::new(RefusalReason::Malformed, message)
    })?;
    let length = path.len() - segments.next().map_or(0, |rest| rest.len() + 1);
    let target = Target::of(&context, box_id, port, &path[..length], request.uri())?;
    proxy::forward(context, &target, request).await
}

/// A request for the URL of a file.
#[derive(Debug, Deserialize)]
pub(super) struct DownloadRequest {
    path: String,
    expires_in_seconds: Option<u64>,
    content_type: Option<String>,
    content_disposition: Option<String>,
    csp_sandbox: Option<bool>,
    csp_sandbox_flags: Option<Value>,
    csp_source_bundles: Option<Value>,
}

/// The file of a URL, and how the server sends it. The URL contains it, and the capability covers it.
#[derive(Debug, Serialize, Deserialize)]
struct Link {
    #[serde(rename = "p")]
    path: String,
    #[serde(rename = "t", skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(rename = "i", default, skip_serializing_if = "std::ops::Not::not")]
    inline: bool,
}

/// `POST /boxes/{name}/download-url`.
pub(super) async fn download_url(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<DownloadRequest>,
) -> Result<Response, ApiError> {
    if request.path.is_empty() {
        return Err(Invalid::new("path", "must not be empty").into());
    }
    if request.expires_in_seconds == Some(0) {
        return Err(Invalid::new("expires_in_seconds", "must be at least 1").into());
    }
    if let Some(kind) = &request.content_type
        && HeaderValue::try_from(kind).is_err()
    {
        return Err(Invalid::new("content_type", "must be a media type").into());
    }
    if request.csp_sandbox == Some(false) {
        let rule = "a page from a box must not act as a page of this server; omit it";
        return Err(Invalid::new("csp_sandbox", rule).into());
    }
    refuse_content("csp_sandbox_flags", request.csp_sandbox_flags.as_ref())?;
    refuse_content("csp_source_bundles", request.csp_source_bundles.as_ref())?;
    let inline = match request.content_disposition.as_deref() {
        None | Some("attachment") => false,
        Some("inline") => true,
        Some(_) => {
            let rule = "must be attachment or inline";
            return Err(Invalid::new("content_disposition", rule).into());
        }
    };
    let info = find(&context, &name).await?;
    let link = Link {
        path: request.path,
        content_type: request.content_type,
        inline,
    };
    let link = serde_json::to_vec(&link).unwrap_or_default();
    let link = URL_SAFE_NO_PAD.encode(link);
    let until = request
        .expires_in_seconds
        .map(|seconds| after(UnixMs::now(), seconds));
    let token = context.grant(&info, Scope::Download(&link), until);
    let (url, path) = (&context.url, Context::box_path(&info));
    let body = json!({
        "download_url": format!("{url}{path}~{token}/langsmith/link/{link}"),
        "token": token,
        "expires_at": until.map(|until| until.to_string()),
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// `GET /link/{link}`: the file of a URL.
pub(super) async fn download(
    context: Context,
    InBox(box_id): InBox,
    Path((_, link)): Path<(String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let invalid = || Invalid::new("link", "not a link of this server");
    let decoded = URL_SAFE_NO_PAD.decode(&link).map_err(|_| invalid())?;
    let link: Link = from_json(&decoded).map_err(|_| invalid())?;
    let mut params = FileReadParams::new(box_id, link.path.as_str());
    params.expand = is_relative(&link.path);
    let download = Download {
        params,
        method: &method,
        headers: &headers,
    };
    let response = download.response(&context).await;
    let mut response = response.map_err(|error| operation_error(error, "ReadError"))?;
    let disposition = disposition(&link);
    let headers = response.headers_mut();
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    if let Some(kind) = &link.content_type {
        set(CONTENT_TYPE, kind);
    }
    set(CONTENT_DISPOSITION, &disposition);
    // A page from a box must not act as a page of this server.
    set(CONTENT_SECURITY_POLICY, "sandbox");
    set(X_CONTENT_TYPE_OPTIONS, "nosniff");
    Ok(response)
}

/// Returns how a browser shows a file, and the name under which it saves it.
fn disposition(link: &Link) -> String {
    let kind = if link.inline { "inline" } else { "attachment" };
    let name = link.path.rsplit('/').next().unwrap_or_default();
    let name = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    format!("{kind}; filename*=UTF-8''{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope_of(path: &str) -> Option<Scope<'static>> {
        let request = axum::http::Request::builder().uri(path).body(()).unwrap();
        let parts: &'static Parts = Box::leak(Box::new(request.into_parts().0));
        scope(parts)
    }

    #[test]
    fn capabilities_open_one_port_or_one_file_and_no_command() {
        let port = |number: u16| Some(Scope::Port(NonZeroU16::new(number).unwrap()));
        for (path, scope) in [
            ("/boxes/b/langsmith/port/80", port(80)),
            ("/boxes/b/langsmith/port/80/x/y", port(80)),
            ("/boxes/b/langsmith/port/x", None),
            ("/boxes/b/langsmith/link/abc", Some(Scope::Download("abc"))),
            ("/boxes/b/langsmith/link/abc/d", None),
            ("/boxes/b/langsmith/execute", None),
            ("/boxes/b/langsmith/execute/ws", None),
            ("/boxes/b/langsmith/download", None),
        ] {
            assert_eq!(scope_of(path), scope, "{path}");
        }
    }

    #[test]
    fn a_file_name_is_escaped() {
        let link = Link {
            path: "/a/b \"c\".txt".to_owned(),
            content_type: None,
            inline: true,
        };
        assert_eq!(
            disposition(&link),
            "inline; filename*=UTF-8''b%20%22c%22%2Etxt"
        );
    }
}
