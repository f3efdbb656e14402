//! Rejection of browser requests, by their origin and their host name.
//!
//! A web page must not reach this server, either directly or through DNS rebinding.

use axum::http::header::{HOST, HeaderName, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri};
use box_gateways::http::refusal::{Refusal, RefusalReason};
use box_transports::websocket::is_host;

use super::super::listeners;

/// The header by which browsers, but not programs, state a request's origin.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The host names that requests to this server may use.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    names: Vec<String>,
    /// Whether any host name is allowed.
    any: bool,
}

impl Hosts {
    /// Allows the loopback names, the operator's names and the listening host.
    pub(super) fn new(allowed: &[String], listening: &str) -> Self {
        let names = listeners::names(allowed, listening);
        Self { names, any: false }
    }

    /// Allows any host name.
    pub(super) fn any() -> Self {
        Self {
            names: Vec::new(),
            any: true,
        }
    }

    /// Returns whether a host is allowed, with or without a port.
    fn contains(&self, host: &str) -> bool {
        self.any || self.names.iter().any(|name| is_host(name, host))
    }

    /// Refuses a request that names another host.
    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let mut hosts = headers.get_all(HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok());
        let (Some(host), None) = (host, hosts.next()) else {
            return Err(Refusal::new(
                RefusalReason::Malformed,
                "expected exactly one Host header",
            ));
        };
        // A request target in absolute form also names a host.
        let authority = uri.authority().map(Authority::as_str);
        if !self.contains(host) || !authority.is_none_or(|authority| self.contains(authority)) {
            return Err(Refusal::new(
                RefusalReason::Misdirected,
                "host not allowed; add it to server.allowed_hosts",
            ));
        }
        Ok(())
    }
}

/// Refuses a request that comes from a web page.
pub(super) fn refuse_cross_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let is_cross_site = headers
        .get_all(FETCH_SITE)
        .iter()
        .any(|site| site != "none" && site != "same-origin");
    if headers.contains_key(ORIGIN) || is_cross_site {
        return Err(Refusal::new(
            RefusalReason::Browser,
            "cross-origin browser requests are rejected",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uri: &str, pairs: &[(&'static str, &str)]) -> Result<(), RefusalReason> {
        let hosts = Hosts::new(
            &["Box.Example".to_owned(), "other:8443".to_owned()],
            "10.0.0.1",
        );
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        let checked = hosts.check(&uri.parse().unwrap(), &headers);
        let checked = checked.and_then(|()| refuse_cross_origin(&headers));
        checked.map_err(|refusal| refusal.reason)
    }

    #[test]
    fn only_allowed_host_names_pass() {
        for host in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:7080",
            "[::1]",
            "[::1]:7080",
            "box.example",
            "box.example:443",
            "other:8443",
            "10.0.0.1:7080",
        ] {
            assert_eq!(request("/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "box.example.evil",
            "other",
            "other:1",
            "127.0.0.1.evil:80",
            "::1",
            "0.0.0.0",
            "",
        ] {
            let refused = request("/", &[("host", host)]);
            assert_eq!(refused, Err(RefusalReason::Misdirected), "{host}");
        }
        let twice = [("host", "localhost"), ("host", "localhost")];
        assert_eq!(request("/", &twice), Err(RefusalReason::Malformed));
        assert_eq!(request("/", &[]), Err(RefusalReason::Malformed));
        let whole = request("http://evil.example/", &[("host", "localhost")]);
        assert_eq!(whole, Err(RefusalReason::Misdirected));
        let ours = request("http://localhost/x", &[("host", "localhost")]);
        assert_eq!(ours, Ok(()));
    }

    #[test]
    fn requests_of_browser_pages_are_refused() {
        let host = ("host", "localhost");
        for header in [
            ("origin", "http://localhost"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(
                request("/", &[host, header]),
                Err(RefusalReason::Browser),
                "{header:?}"
            );
        }
        // The user typed the address.
        assert_eq!(request("/", &[host, ("sec-fetch-site", "none")]), Ok(()));
    }
}
