//! Filters for the headers that a box's response may send to a browser.
//!
//! All boxes share one host, so a box may not set headers that apply to the whole host.

use axum::http::HeaderMap;
use axum::http::header::{
    CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, LOCATION, REFERRER_POLICY, SET_COOKIE,
};

/// A policy that gives a page no origin.
///
/// The page can read neither the pages nor the cookies of other boxes.
const SANDBOX: HeaderValue = HeaderValue::from_static(
    "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
);

/// Headers that apply to the whole host.
const HOST_WIDE: [&str; 6] = [
    "alt-svc",
    "clear-site-data",
    "nel",
    "report-to",
    "service-worker-allowed",
    "strict-transport-security",
];

/// Restricts a response to the path prefix of its box.
pub(super) fn confine(headers: &mut HeaderMap, prefix: &str) {
    for name in HOST_WIDE {
        headers.remove(HeaderName::from_static(name));
    }
    // Without a prefix, the box has its own host and therefore its own origin.
    if !prefix.is_empty() {
        headers.append(CONTENT_SECURITY_POLICY, SANDBOX);
    }
    // The address may contain a credential, which links must not disclose.
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    let cookies: Vec<HeaderValue> = headers.get_all(SET_COOKIE).iter().cloned().collect();
    headers.remove(SET_COOKIE);
    for cookie in cookies {
        if cookie.to_str().is_ok_and(|text| is_scoped_to(text, prefix)) {
            headers.append(SET_COOKIE, cookie);
        }
    }
    let location = headers
        .get(LOCATION)
        .and_then(|location| location.to_str().ok());
    // A path from the root of the box's server; two slashes would name another host.
    let from_root =
        location.filter(|location| location.starts_with('/') && !location.starts_with("//"));
    if let Some(Ok(location)) =
        from_root.map(|location| HeaderValue::try_from(format!("{prefix}{location}")))
    {
        headers.insert(LOCATION, location);
    }
}

/// Returns whether a cookie applies only to the box.
fn is_scoped_to(cookie: &str, prefix: &str) -> bool {
    let mut attributes = cookie.split(';').skip(1).map(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        (name.trim().to_ascii_lowercase(), value.trim())
    });
    attributes.all(|(name, value)| match name.as_str() {
        "domain" => false,
        "path" => {
            let below = value.strip_prefix(prefix);
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_confined_to_its_box() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("set-cookie", "a=1"),
            ("set-cookie", "b=1; Path=/boxes/b/port/80/x; HttpOnly"),
            ("set-cookie", "c=1; Path=/"),
            ("set-cookie", "d=1; path=/boxes/b/port/8000"),
            ("set-cookie", "e=1; Domain=localhost"),
            ("clear-site-data", "\"*\""),
            ("strict-transport-security", "max-age=1"),
            ("content-security-policy", "default-src 'self'"),
            ("location", "/login?x=1"),
            ("content-type", "text/html"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        confine(&mut headers, "/boxes/b/port/80");
        let all = |name: &str| -> Vec<&str> {
            let values = headers.get_all(name).into_iter();
            values.map(|value| value.to_str().unwrap()).collect()
        };
        assert_eq!(
            all("set-cookie"),
            ["a=1", "b=1; Path=/boxes/b/port/80/x; HttpOnly"]
        );
        assert!(all("clear-site-data").is_empty() && all("strict-transport-security").is_empty());
        let policies = all("content-security-policy");
        assert_eq!(policies[0], "default-src 'self'");
        assert!(policies[1].starts_with("sandbox ") && !policies[1].contains("same-origin"));
        assert_eq!(all("location"), ["/boxes/b/port/80/login?x=1"]);
        assert_eq!(all("content-type"), ["text/html"]);
    }

    #[test]
    fn redirects_to_other_hosts_are_kept() {
        for location in ["https://elsewhere.example/", "//elsewhere.example/", "next"] {
            let mut headers = HeaderMap::new();
            headers.insert("location", location.parse().unwrap());
            confine(&mut headers, "/boxes/b/port/80");
            assert_eq!(headers["location"], location);
        }
    }
}
