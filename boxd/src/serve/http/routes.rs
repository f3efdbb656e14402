//! Which door a path leads to. Whole segments are compared, never the beginnings of strings, so that `/v1/sandbox` and
//! `/v1/sandboxes` are two doors and not one with a crack.

/// What a path is for. One door is served by one function (`dispatch`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Door {
    /// Whether the process is alive.
    Healthz,
    /// Whether boxes can be had.
    Readyz,
    /// The same as `Healthz`, where other worlds look for it.
    Health,
    /// Which version this is.
    Version,
    /// Figures for Prometheus.
    Metrics,
    /// The RPC, as a websocket.
    Rpc,
    /// LangBot's relay of a managed process.
    Relay,
    /// OpenSandbox's lifecycle.
    OpenSandbox,
    /// LangSmith's control plane.
    LangSmith,
    /// deer-flow's provisioner.
    DeerFlow,
    /// The default box of AIO's clients.
    Aio,
    /// OpenSandbox's commands and files of one box.
    BoxExecd,
    /// OpenSandbox's network policy of one box.
    BoxEgress,
    /// LangSmith's data plane of one box.
    BoxLangSmith,
    /// AIO's API of one box.
    BoxAio,
    /// A port of one box.
    BoxPort,
}

impl Door {
    /// Its name in figures and in the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Readyz => "readyz",
            Self::Health => "health",
            Self::Version => "version",
            Self::Metrics => "metrics",
            Self::Rpc => "rpc",
            Self::Relay => "langbot_relay",
            Self::OpenSandbox => "opensandbox",
            Self::LangSmith => "langsmith",
            Self::DeerFlow => "deer_flow",
            Self::Aio => "aio",
            Self::BoxExecd => "box_execd",
            Self::BoxEgress => "box_egress",
            Self::BoxLangSmith => "box_langsmith",
            Self::BoxAio => "box_aio",
            Self::BoxPort => "box_port",
        }
    }
}

/// Every route. `{…}` is any one segment; `**`, at the end, is any number of them, none included.
pub(super) const ROUTES: &[(&str, Door)] = &[
    ("/healthz", Door::Healthz),
    ("/readyz", Door::Readyz),
    ("/health", Door::Health),
    ("/version", Door::Version),
    ("/metrics", Door::Metrics),
    ("/rpc/ws", Door::Rpc),
    (
        "/v1/sessions/{session}/managed-process/{process}/ws",
        Door::Relay,
    ),
    ("/v1/sessions/{session}/managed-process/ws", Door::Relay),
    ("/v1/sandboxes/**", Door::OpenSandbox),
    ("/v1/snapshots/**", Door::OpenSandbox),
    ("/v1/templates/**", Door::OpenSandbox),
    ("/v1/pools/**", Door::OpenSandbox),
    ("/v1/metrics/events", Door::OpenSandbox),
    ("/v2/sandboxes/**", Door::LangSmith),
    ("/api/v2/sandboxes/**", Door::LangSmith),
    ("/api/sandboxes/**", Door::DeerFlow),
    ("/api/capabilities", Door::DeerFlow),
    ("/v1/sandbox/**", Door::Aio),
    ("/v1/shell/**", Door::Aio),
    ("/v1/bash/**", Door::Aio),
    ("/v1/file/**", Door::Aio),
    ("/v1/code/**", Door::Aio),
    ("/v1/jupyter/**", Door::Aio),
    ("/v1/nodejs/**", Door::Aio),
    ("/v1/mcp/**", Door::Aio),
    ("/v1/browser/**", Door::Aio),
    ("/v1/display/**", Door::Aio),
    ("/v1/record/**", Door::Aio),
    ("/v1/proxy/**", Door::Aio),
    ("/v1/skills/**", Door::Aio),
    ("/v1/util/**", Door::Aio),
    ("/mcp/**", Door::Aio),
    ("/tickets/**", Door::Aio),
    ("/auth/**", Door::Aio),
    ("/terminal/**", Door::Aio),
    ("/boxes/{box}/execd/**", Door::BoxExecd),
    ("/boxes/{box}/egress/**", Door::BoxEgress),
    ("/boxes/{box}/langsmith/**", Door::BoxLangSmith),
    ("/boxes/{box}/aio/**", Door::BoxAio),
    ("/boxes/{box}/port/{port}/**", Door::BoxPort),
];

/// What LangSmith's tracing asks for, if its endpoint was set to this server by mistake.
const TRACING: &[&str] = &["/runs/**", "/info", "/api/v1/**"];

/// A path that leads nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Miss {
    /// LangSmith's tracing, which has come to the wrong server.
    Tracing,
    /// Nothing that is known; the route that is most like it, if one is.
    Unknown(Option<&'static str>),
}

impl Miss {
    /// What to do instead.
    pub(super) fn message(self) -> String {
        match self {
            Self::Tracing => "this is no tracing server: LANGSMITH_ENDPOINT points here, which also sends traces here; \
                 give the sandbox client its address as api_endpoint= instead"
                .to_owned(),
            Self::Unknown(Some(route)) => format!("no such path; the nearest is {route}"),
            Self::Unknown(None) => "no such path; the routes are in docs/wire.md".to_owned(),
        }
    }
}

/// The door a path leads to. The path is taken as it was sent, without its query: what is encoded is not a route.
pub(super) fn find(path: &str) -> Result<Door, Miss> {
    let segments: Vec<&str> = segments(path);
    // Whoever serves what is behind a door should never meet them.
    if segments
        .iter()
        .any(|segment| matches!(*segment, "." | ".."))
    {
        return Err(Miss::Unknown(None));
    }
    let known = ROUTES.iter().find(|(route, _)| matches(route, &segments));
    if let Some((_, door)) = known {
        return Ok(*door);
    }
    if TRACING.iter().any(|route| matches(route, &segments)) {
        return Err(Miss::Tracing);
    }
    Err(Miss::Unknown(nearest(&segments)))
}

/// The segments of a path; a slash at its end adds none.
fn segments(path: &str) -> Vec<&str> {
    let path = path.strip_prefix('/').unwrap_or(path);
    path.strip_suffix('/').unwrap_or(path).split('/').collect()
}

fn matches(route: &str, path: &[&str]) -> bool {
    let mut path = path.iter();
    for part in segments(route) {
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

/// The route that is most like a path, if one is like it at all.
fn nearest(path: &[&str]) -> Option<&'static str> {
    /// How alike the two must be to be taken for each other.
    const ALIKE: f64 = 0.55;
    /// Who leaves out the version may mean a route with one, a little less likely.
    const UNVERSIONED: f64 = 0.9;
    ROUTES
        .iter()
        .map(|(route, _)| {
            let unversioned = route
                .strip_prefix("/v1")
                .map_or(0.0, |rest| likeness(rest, path));
            let alike = likeness(route, path).max(unversioned * UNVERSIONED);
            (alike, *route)
        })
        .filter(|(alike, _)| *alike > ALIKE)
        // The first of equals.
        .rev()
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, route)| route.strip_suffix("/**").unwrap_or(route))
}

/// How alike a route and the beginning of a path are; any segment is like a `{…}`.
fn likeness(route: &str, path: &[&str]) -> f64 {
    let parts = segments(route);
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
        .map(|(place, part)| match path.get(place) {
            Some(segment) if part.starts_with('{') => *segment,
            _ => *part,
        })
        .collect();
    // Whose first segment is right is in the right world.
    let world = if named.first() == path.first() {
        0.1
    } else {
        0.0
    };
    world + strsim::normalized_damerau_levenshtein(&filled.join("/"), &path[..length].join("/"))
}

/// A path as it may be logged: without the part of a box's name that is a credential, and not endless.
pub(super) fn redacted(path: &str) -> String {
    /// The longest path in a log.
    const LONGEST: usize = 200;
    let mut shown = String::new();
    for (place, segment) in path.split('/').enumerate() {
        if place > 0 {
            shown.push('/');
        }
        // Written plainly, or encoded.
        let lower = segment.to_ascii_lowercase();
        match segment.find('~').into_iter().chain(lower.find("%7e")).min() {
            Some(begins) => shown.extend([&segment[..begins], "~…"]),
            None => shown.push_str(segment),
        }
    }
    shown.truncate(shown.floor_char_boundary(LONGEST));
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths of a route: its placeholders filled, and what is open left so, ended by a slash, and gone further into.
    fn paths(route: &str) -> Vec<String> {
        let fill = |word: &str| {
            let parts = route.strip_suffix("/**").unwrap_or(route).split('/');
            let parts = parts.map(|part| if part.starts_with('{') { word } else { part });
            parts.collect::<Vec<_>>().join("/")
        };
        let mut all = Vec::new();
        // Words that are segments of other routes, which must not make a difference.
        for word in ["x", "v1", "v2", "sandboxes", "ws", "execd", "id~cap"] {
            let path = fill(word);
            all.push(format!("{path}/"));
            if route.ends_with("/**") {
                all.push(format!("{path}/v1/sandboxes"));
                all.push(format!("{path}/ws"));
            }
            all.push(path);
        }
        all
    }

    #[test]
    fn every_route_leads_to_its_door_and_no_path_to_two() {
        for (route, door) in ROUTES {
            for path in paths(route) {
                let found: Vec<_> = ROUTES
                    .iter()
                    .filter(|(route, _)| matches(route, &segments(&path)))
                    .collect();
                assert_eq!(found, [&(*route, *door)], "{path}");
                assert_eq!(find(&path), Ok(*door), "{path}");
            }
        }
        for route in TRACING {
            assert!(
                paths(route)
                    .iter()
                    .all(|path| find(path) == Err(Miss::Tracing))
            );
        }
    }

    #[test]
    fn segments_are_compared_whole() {
        for (path, door) in [
            ("/v1/sandbox", Door::Aio),
            ("/v1/sandboxes", Door::OpenSandbox),
            ("/api/sandboxes/v2", Door::DeerFlow),
            ("/api/v2/sandboxes/boxes", Door::LangSmith),
            ("/v1/shell/sessions", Door::Aio),
            ("/v1/sandboxes/b/proxy/44772/metrics", Door::OpenSandbox),
            ("/boxes/b/execd/metrics", Door::BoxExecd),
            ("/boxes/b~cap/port/80/v1/sandboxes", Door::BoxPort),
        ] {
            assert_eq!(find(path), Ok(door), "{path}");
        }
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
            "/boxes//execd",
            "/boxes/b/port",
            "/boxes/b/port/80/../../../../metrics",
            "/v1/sandboxes/../../metrics",
        ] {
            assert!(matches!(find(path), Err(Miss::Unknown(_))), "{path}");
        }
    }

    #[test]
    fn a_wrong_door_names_the_right_one() {
        for (path, route) in [
            ("/v1/sandboxs", "/v1/sandboxes"),
            ("/v1/sandboxess/abc/pause", "/v1/sandboxes"),
            ("/sandboxes", "/v1/sandboxes"),
            ("/sandboxes/abc", "/v1/sandboxes"),
            ("/v2/sandbox", "/v2/sandboxes"),
            ("/v1/shel/exec", "/v1/shell"),
            ("/rpc", "/rpc/ws"),
            ("/helthz", "/healthz"),
            ("/ready", "/readyz"),
            ("/boxes/b/exec/ping", "/boxes/{box}/execd"),
            ("/api/capability", "/api/capabilities"),
        ] {
            let found = find(path);
            assert_eq!(found, Err(Miss::Unknown(Some(route))), "{path}");
            assert!(found.unwrap_err().message().ends_with(route));
        }
        assert_eq!(find("/favicon.ico"), Err(Miss::Unknown(None)));
        let tracing = find("/runs/batch").unwrap_err().message();
        assert!(tracing.contains("api_endpoint="), "{tracing}");
    }

    #[test]
    fn a_logged_path_has_no_credential() {
        for (path, shown) in [
            ("/boxes/b~secret/port/80/x", "/boxes/b~…/port/80/x"),
            ("/boxes/b%7Esecret/aio", "/boxes/b~…/aio"),
            ("/boxes/b%7esecret~secret/aio", "/boxes/b~…/aio"),
            ("/v1/sandboxes", "/v1/sandboxes"),
        ] {
            assert_eq!(redacted(path), shown);
        }
        assert_eq!(redacted(&"ä".repeat(500)).chars().count(), 100);
    }
}
