//! Metrics in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use box_protocol::BoxState;
use box_protocol::actions::BoxListParams;
use box_runtime::Caller;
use box_transports::Endpoint;
use box_transports::server::ServerMetrics;
use hyper::StatusCode;

use super::answer::{Answer, text};
use super::shared::Shared;

/// Counters that requests update.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Requests by route and status, which have few values.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Connections closed because of the connection limit.
    full: AtomicU64,
    /// The other listeners.
    listeners: OnceLock<Vec<ServerMetrics>>,
}

impl Counters {
    /// Counts an answered request.
    pub(super) fn answered(&self, door: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((door, status)).or_default() += 1;
    }

    /// Counts a connection that was closed because of the connection limit.
    pub(super) fn found_no_place(&self) {
        self.full.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the other listeners.
    pub(super) fn watch(&self, listeners: Vec<ServerMetrics>) {
        // The server calls this once.
        let _ = self.listeners.set(listeners);
    }
}

/// Returns all metrics.
pub(super) async fn answer(shared: &Shared) -> Answer {
    let mut page = Page::default();
    boxes(&mut page, shared).await;
    connections(&mut page, shared);
    let requests = shared.counters.requests.lock();
    let requests = requests.unwrap_or_else(PoisonError::into_inner).clone();
    page.of(
        "boxd_http_requests_total",
        "counter",
        "HTTP requests answered, by door and status.",
    );
    for ((door, status), count) in requests {
        let status = status.to_string();
        page.one(
            "boxd_http_requests_total",
            &[("door", door), ("status", &status)],
            count,
        );
    }
    process(&mut page, shared.started.elapsed());
    text(StatusCode::OK, "text/plain; version=0.0.4", page.0)
}

async fn boxes(page: &mut Page, shared: &Shared) {
    /// The states of a box, with their names on the wire.
    const STATES: [(BoxState, &str); 6] = [
        (BoxState::Starting, "starting"),
        (BoxState::Running, "running"),
        (BoxState::Paused, "paused"),
        (BoxState::Stopped, "stopped"),
        (BoxState::Failed, "failed"),
        (BoxState::Unreachable, "unreachable"),
    ];
    let mut counts = STATES.map(|(state, name)| (state, name, 0_u64));
    let mut params = BoxListParams::default();
    while let Ok(page) = shared.runtime.list(&Caller::Local, &params).await {
        for (state, _, count) in &mut counts {
            let of_state = page.items.iter().filter(|item| item.state == *state);
            *count += of_state.count() as u64;
        }
        params.after = page.next;
        if params.after.is_none() {
            break;
        }
    }
    page.of("boxd_boxes", "gauge", "Boxes, by state.");
    for (_, name, count) in counts {
        page.one("boxd_boxes", &[("state", name)], count);
    }
    if let Ok(status) = shared.runtime.status(&Caller::Local).await {
        let capacity = status.capacity;
        page.single(
            "boxd_boxes_used",
            "gauge",
            "Boxes that count against the limit.",
            capacity.used,
        );
        page.single(
            "boxd_boxes_limit",
            "gauge",
            "Boxes there may be (runtime.max_boxes).",
            capacity.limit,
        );
        let usable = u8::from(status.backend.available);
        page.single(
            "boxd_backend_available",
            "gauge",
            "Whether boxes can be made.",
            usable,
        );
    }
}

fn connections(page: &mut Page, shared: &Shared) {
    // Only the kind of a listener is published, not its path; listeners of one kind share a metric.
    let mut rpc: BTreeMap<&str, (usize, [u64; 3])> = BTreeMap::new();
    for gauge in shared.counters.listeners.get().into_iter().flatten() {
        let (open, refused) = rpc.entry(kind(gauge.endpoint())).or_default();
        *open += gauge.connections();
        let counts = gauge.refused();
        let counts = [counts.full(), counts.handshake(), counts.other_user()];
        for (sum, count) in refused.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    let http = shared.places.in_use();
    page.of(
        "boxd_connections",
        "gauge",
        "Connections open now, by kind of listener.",
    );
    page.one("boxd_connections", &[("listener", "http")], http);
    for (listener, (open, _)) in &rpc {
        page.one("boxd_connections", &[("listener", listener)], open);
    }
    page.single(
        "boxd_connections_limit",
        "gauge",
        "Connections there may be to each listener (server.max_connections).",
        shared.places.limit(),
    );
    let name = "boxd_connections_refused_total";
    page.of(
        name,
        "counter",
        "Connections turned away, by kind of listener and reason.",
    );
    let full = shared.counters.full.load(Ordering::Relaxed);
    page.one(name, &[("listener", "http"), ("reason", "full")], full);
    for (listener, (_, refused)) in &rpc {
        for (reason, count) in ["full", "handshake", "stranger"].into_iter().zip(refused) {
            page.one(name, &[("listener", listener), ("reason", reason)], count);
        }
    }
    page.single(
        "boxd_http_websockets",
        "gauge",
        "Websockets of the RPC on the HTTP port.",
        shared.sockets.count(),
    );
}

fn kind(endpoint: &Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Unix { .. } => "unix",
        Endpoint::Tcp { tls: false, .. } => "tcp",
        Endpoint::Tcp { tls: true, .. } => "tls",
        Endpoint::WebSocket { tls: false, .. } => "ws",
        Endpoint::WebSocket { tls: true, .. } => "wss",
        _ => "other",
    }
}

fn process(page: &mut Page, uptime: Duration) {
    page.of("boxd_build_info", "gauge", "Which version runs.");
    let version = env!("CARGO_PKG_VERSION");
    let labels = [("version", version), ("commit", env!("BUILT_FROM_COMMIT"))];
    page.one("boxd_build_info", &labels, 1);
    page.single(
        "boxd_uptime_seconds",
        "gauge",
        "How long it has run.",
        uptime.as_secs_f64(),
    );
    let started = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .saturating_sub(uptime);
    page.single(
        "process_start_time_seconds",
        "gauge",
        "When it began, in Unix time.",
        started.as_secs_f64(),
    );
    if let Some(bytes) = resident_bytes() {
        page.single(
            "process_resident_memory_bytes",
            "gauge",
            "Memory in use by boxd itself.",
            bytes,
        );
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        // The count includes the descriptor of this directory.
        page.single(
            "process_open_fds",
            "gauge",
            "Open file descriptors.",
            open.count().saturating_sub(1),
        );
    }
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// The text of all metrics; label values are constants and need no escaping.
#[derive(Debug, Default)]
struct Page(String);

impl Page {
    /// Starts a metric.
    fn of(&mut self, name: &str, kind: &str, about: &str) {
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP {name} {about}\n# TYPE {name} {kind}\n");
    }

    /// Adds one value.
    fn one(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (place, (label, text)) in labels.iter().enumerate() {
            let before = if place == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{label}=\"{text}\"");
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// Adds a metric with one value.
    fn single(&mut self, name: &str, kind: &str, about: &str, value: impl Display) {
        self.of(name, kind, about);
        self.one(name, &[], value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_as_prometheus_reads_them() {
        let mut page = Page::default();
        page.of("a_total", "counter", "All of it.");
        page.one("a_total", &[("door", "rpc"), ("status", "101")], 3);
        page.single("b", "gauge", "One.", 0.5);
        let expected = "# HELP a_total All of it.\n# TYPE a_total counter\na_total{door=\"rpc\",status=\"101\"} 3\n\
                        # HELP b One.\n# TYPE b gauge\nb 0.5\n";
        assert_eq!(page.0, expected);
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(resident_bytes().unwrap() > 1 << 20);
    }
}
