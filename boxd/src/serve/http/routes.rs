//! The routes of the HTTP port; they match whole segments, never string prefixes.

/// The route of a path; `dispatch` has one handler for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Route {
    /// Liveness.
    Healthz,
    /// Readiness.
    Readyz,
    /// Liveness under the name that other clients use.
    Health,
    /// The version.
    Version,
    /// Metrics for Prometheus.
    Metrics,
    /// The RPC over a websocket.
    Rpc,
    /// LangBot's relay of a managed process.
    Relay,
    /// A port of one box.
    BoxPort,
}

impl Route {
    /// Returns the name of the route in metrics and logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Readyz => "readyz",
            Self::Health => "health",
            Self::Version => "version",
            Self::Metrics => "metrics",
            Self::Rpc => "rpc",
            Self::Relay => "langbot_relay",
            Self::BoxPort => "box_port",
        }
    }
}

/// All routes.
///
/// `{…}` matches one segment; `**`, at the end, matches any number of segments, including none.
pub(super) const ROUTES: &[(&str, Route)] = &[
    ("/healthz", Route::Healthz),
    ("/readyz", Route::Readyz),
    ("/health", Route::Health),
    ("/version", Route::Version),
    ("/metrics", Route::Metrics),
    ("/rpc/ws", Route::Rpc),
    (
        "/v1/sessions/{session}/managed-process/{process}/ws",
        Route::Relay,
    ),
    ("/v1/sessions/{session}/managed-process/ws", Route::Relay),
    ("/boxes/{box}/port/{port}/**", Route::BoxPort),
];

/// Returns the message for a path without a route; it names the most similar route.
pub(super) fn no_such_path(path: &str) -> String {
    match nearest(&segments(path)) {
        Some(route) => format!("unknown path; the closest is {route}"),
        None => "unknown path; the routes are in docs/wire.md".to_owned(),
    }
}

/// Returns the route of a path, without its query.
///
/// The path is matched as sent: encoded characters match no route.
pub(super) fn find(path: &str) -> Option<Route> {
    let segments: Vec<&str> = segments(path);
    // Refuse these segments before a handler sees them.
    if segments
        .iter()
        .any(|segment| matches!(*segment, "." | ".."))
    {
        return None;
    }
    let known = ROUTES
        .iter()
        .find(|(pattern, _)| matches(pattern, &segments));
    known.map(|(_, route)| *route)
}

/// Returns the segments of a path; a trailing slash adds none.
fn segments(path: &str) -> Vec<&str> {
    let path = path.strip_prefix('/').unwrap_or(path);
    path.strip_suffix('/').unwrap_or(path).split('/').collect()
}

fn matches(pattern: &str, path: &[&str]) -> bool {
    let mut path = path.iter();
    for part in segments(pattern) {
        if part == "**" {
            return true;
        }
        match path.next() {
            Some(segment) if part.starts_with('{') && !segment.is_empty() => {}
            Some(segment) if *segment == part => {}
            _ => return false,
        }
    }
    path.next().is_none()
}

/// Returns the most similar route, if one is similar enough.
fn nearest(path: &[&str]) -> Option<&'static str> {
    /// The minimum similarity.
    const MIN_SIMILARITY: f64 = 0.55;
    ROUTES
        .iter()
        .map(|(pattern, _)| (similarity(pattern, path), *pattern))
        .filter(|(similarity, _)| *similarity > MIN_SIMILARITY)
        // Prefer the first of equal routes.
        .rev()
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, pattern)| pattern.strip_suffix("/**").unwrap_or(pattern))
}

/// Returns the similarity of a route and the start of a path.
///
/// A `{…}` matches any segment.
fn similarity(pattern: &str, path: &[&str]) -> f64 {
    let parts = segments(pattern);
    let open = parts.last() == Some(&"**");
    let named = &parts[..parts.len() - usize::from(open)];
    let length = if open {
        path.len().min(named.len())
    } else {
        path.len()
    };
    let filled: Vec<&str> = named
        .iter()
        .enumerate()
        .map(|(index, part)| match path.get(index) {
            Some(segment) if part.starts_with('{') => *segment,
            _ => *part,
        })
        .collect();
    // A matching first segment weighs more.
    let first = if named.first() == path.first() {
        0.1
    } else {
        0.0
    };
    first + strsim::normalized_damerau_levenshtein(&filled.join("/"), &path[..length].join("/"))
}

/// Returns a path for the log: shortened, and without signatures.
pub(super) fn redacted(path: &str) -> String {
    /// The maximum length of a logged path.
    const MAX_PATH_BYTES: usize = 200;
    let mut redacted_path = String::new();
    for (index, segment) in path.split('/').enumerate() {
        if index > 0 {
            redacted_path.push('/');
        }
        // The separator may be plain or percent-encoded.
        let lower = segment.to_ascii_lowercase();
        match segment.find('~').into_iter().chain(lower.find("%7e")).min() {
            Some(begins) => redacted_path.extend([&segment[..begins], "~…"]),
            None => redacted_path.push_str(segment),
        }
    }
    redacted_path.truncate(redacted_path.floor_char_boundary(MAX_PATH_BYTES));
    redacted_path
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns paths of a route: with filled placeholders, and with open ends extended.
    fn paths(pattern: &str) -> Vec<String> {
        let fill = |word: &str| {
            let parts = pattern.strip_suffix("/**").unwrap_or(pattern).split('/');
            let parts = parts.map(|part| if part.starts_with('{') { word } else { part });
            parts.collect::<Vec<_>>().join("/")
        };
        let mut all = Vec::new();
        // Words that are also segments of other routes; they must not change the result.
        for word in ["x", "v1", "ws", "port", "id~cap"] {
            let path = fill(word);
            all.push(format!("{path}/"));
            if pattern.ends_with("/**") {
                all.push(format!("{path}/rpc/ws"));
                all.push(format!("{path}/ws"));
            }
            all.push(path);
        }
        all
    }

    #[test]
    fn every_path_matches_exactly_one_route() {
        for (pattern, route) in ROUTES {
            for path in paths(pattern) {
                let found: Vec<_> = ROUTES
                    .iter()
                    .filter(|(pattern, _)| matches(pattern, &segments(&path)))
                    .collect();
                assert_eq!(found, [&(*pattern, *route)], "{path}");
                assert_eq!(find(&path), Some(*route), "{path}");
            }
        }
    }

    #[test]
    fn segments_are_compared_whole() {
        let port = find("/boxes/b~cap/port/80/rpc/ws");
        assert_eq!(port, Some(Route::BoxPort));
        for path in [
            "/",
            "",
            "/healthzz",
            "/healthz/x",
            "/HEALTHZ",
            "//healthz",
            "/%68ealthz",
            "/rpc",
            "/rpc/ws/x",
            "/v1",
            "/v1/metrics",
            "/v1/sessions/a/ws",
            "/boxes/b",
            "/boxes//port/80",
            "/boxes/b/port",
            "/boxes/b/port/80/../../../../metrics",
            "/rpc/../metrics",
        ] {
            assert_eq!(find(path), None, "{path}");
        }
    }

    #[test]
    fn an_unknown_path_suggests_a_route() {
        for (path, route) in [
            ("/rpc", "/rpc/ws"),
            ("/helthz", "/healthz"),
            ("/ready", "/readyz"),
            ("/boxes/b/ports/80", "/boxes/{box}/port/{port}"),
        ] {
            assert_eq!(find(path), None, "{path}");
            let message = no_such_path(path);
            assert!(message.ends_with(route), "{path}: {message}");
        }
        assert!(no_such_path("/favicon.ico").ends_with("docs/wire.md"));
    }

    #[test]
    fn a_logged_path_has_no_credential() {
        for (path, redacted_path) in [
            ("/boxes/b~secret/port/80/x", "/boxes/b~…/port/80/x"),
            ("/boxes/b%7Esecret/x", "/boxes/b~…/x"),
            ("/boxes/b%7esecret~secret/x", "/boxes/b~…/x"),
            ("/rpc/ws", "/rpc/ws"),
        ] {
            assert_eq!(redacted(path), redacted_path);
        }
        assert_eq!(redacted(&"ä".repeat(500)).chars().count(), 100);
    }
}
