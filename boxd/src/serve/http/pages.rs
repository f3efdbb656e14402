//! Web pages that the operator allows: their origins, preflight requests, and headers of responses to them.
//!
//! A page needs a token like every other caller. The server never allows credentials that a browser adds by itself.

use anyhow::{Result, ensure};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN,
    VARY,
};
use axum::http::request::Parts;
use axum::http::uri::{Authority, Scheme};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};

use super::router::{PageUse, RouteInfo};

/// The key of the configuration.
const KEY: &str = "server.allowed_origins";

/// The ports that a browser omits.
const DEFAULT_PORTS: [(&str, u16); 2] = [("http", 80), ("https", 443)];

/// The origins whose pages may call this server.
#[derive(Debug)]
pub(crate) struct Origins(Vec<HeaderValue>);

impl Origins {
    /// Allows no page.
    pub(super) fn none() -> Self {
        Self(Vec::new())
    }

    /// Allows the pages of these origins.
    ///
    /// Without tokens every page of an origin, also one that runs foreign code, would be a caller.
    pub(crate) fn new(allowed: &[String], has_tokens: bool) -> Result<Self> {
        ensure!(
            allowed.is_empty() || has_tokens,
            "{KEY}: requires tokens; configure them (server.token_file, --token-file or BOXD_TOKENS)"
        );
        let origins = allowed.iter().map(|text| {
            let value = HeaderValue::try_from(text).ok();
            value.filter(|_| is_origin(text)).ok_or_else(|| {
                anyhow::anyhow!(
                    "{KEY}: {text:?} is not an origin; write scheme://host[:port] in lower case, without a path and \
                     without the default port"
                )
            })
        });
        origins.collect::<Result<_>>().map(Self)
    }

    /// Returns the origin of a request from a page that may call this route.
    pub(super) fn page<'a>(
        &self,
        route: &RouteInfo,
        headers: &'a HeaderMap,
    ) -> Option<&'a HeaderValue> {
        let mut origins = headers.get_all(ORIGIN).iter();
        let (Some(origin), None) = (origins.next(), origins.next()) else {
            return None;
        };
        (route.pages != PageUse::None && self.0.contains(origin)).then_some(origin)
    }

    /// Returns whether a browser asks if a page may call this route. Such a request has no token.
    pub(super) fn is_preflight(&self, route: &RouteInfo, request: &Parts) -> bool {
        request.method == Method::OPTIONS
            && request.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
            && self.page(route, &request.headers).is_some()
    }
}

/// Returns whether a text is an origin as browsers send it.
fn is_origin(text: &str) -> bool {
    let Some((scheme, authority)) = text.split_once("://") else {
        return false;
    };
    let Ok(parsed) = authority.parse::<Authority>() else {
        return false;
    };
    let has_default_port = DEFAULT_PORTS
        .iter()
        .any(|(name, port)| *name == scheme && parsed.port_u16() == Some(*port));
    let port = parsed.port_u16().map(|port| format!(":{port}"));
    // The authority may have a user or a malformed port.
    let plain = format!("{}{}", parsed.host(), port.unwrap_or_default());
    scheme.parse::<Scheme>().is_ok()
        && !parsed.host().is_empty()
        && plain == authority
        && !authority.contains('*')
        && !text.contains(char::is_uppercase)
        && !has_default_port
}

/// Returns the response to a preflight request.
pub(super) fn preflight_response() -> Response {
    let headers = [
        (ACCESS_CONTROL_ALLOW_METHODS, "POST"),
        (ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type"),
        (ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// Lets the page of this origin read a response.
pub(super) fn open_to(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let exposed = HeaderValue::from_static("x-request-id");
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    headers.append(VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::http::router::{METRICS, RPC, RPC_CALL};

    fn origins(allowed: &[&str]) -> Result<Origins> {
        let allowed: Vec<_> = allowed.iter().map(|&text| text.to_owned()).collect();
        Origins::new(&allowed, true)
    }

    #[test]
    fn only_origins_as_browsers_send_them_are_accepted() {
        for origin in [
            "https://app.example",
            "http://localhost:3000",
            "https://[::1]:8443",
            "vscode-webview://0abc",
        ] {
            assert!(origins(&[origin]).is_ok(), "{origin}");
        }
        for other in [
            "*",
            "null",
            "app.example",
            "https://",
            "https://*.example",
            "https://App.example",
            "https://app.example/",
            "https://app.example:443",
            "https://app.example:",
            "https://me@app.example",
            "https://app.example?q",
            "https://app.example https://b.example",
        ] {
            let error = origins(&[other]).unwrap_err().to_string();
            assert!(error.starts_with("server.allowed_origins: "), "{error}");
        }
        let error = Origins::new(&["https://app.example".to_owned()], false);
        assert!(error.unwrap_err().to_string().contains("requires tokens"));
        assert!(Origins::new(&[], false).is_ok());
    }

    #[test]
    fn a_page_is_known_by_its_exact_origin_on_routes_for_pages() {
        let origins = origins(&["https://app.example"]).unwrap();
        let allows = |route: &RouteInfo, values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(ORIGIN, HeaderValue::from_static(value));
            }
            origins.page(route, &headers).is_some()
        };
        let app = "https://app.example";
        assert!(allows(&RPC, &[app]) && allows(&RPC_CALL, &[app]));
        assert!(!allows(&METRICS, &[app]));
        assert!(!allows(&RPC, &[app, app]) && !allows(&RPC, &[]));
        for other in [
            "http://app.example",
            "https://app.example:8443",
            "https://app.example.evil",
            "https://evil.app.example",
            "null",
        ] {
            assert!(!allows(&RPC, &[other]), "{other}");
        }
    }
}
