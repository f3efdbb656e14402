//! Metrics in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use box_gateways::http::refusal::text_response;
use box_protocol::BoxState;
use box_runtime::Caller;
use box_transports::Endpoint;
use box_transports::server::ServerMetrics;

use super::state::HttpState;

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
    /// Counts a response.
    pub(super) fn count_request(&self, route: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, status)).or_default() += 1;
    }

    /// Counts a connection that was closed because of the connection limit.
    pub(super) fn count_rejected_connection(&self) {
        self.full.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the other listeners.
    pub(super) fn set_listeners(&self, listeners: Vec<ServerMetrics>) {
        // The server calls this once.
        let _ = self.listeners.set(listeners);
    }
}

/// Returns all metrics.
pub(super) async fn response(State(state): State<Arc<HttpState>>) -> Response {
    let mut metrics = MetricsText::default();
    boxes(&mut metrics, &state).await;
    connections(&mut metrics, &state);
    let requests = state.counters.requests.lock();
    let requests = requests.unwrap_or_else(PoisonError::into_inner).clone();
    metrics.declare(
        "boxd_http_requests_total",
        "counter",
        "HTTP responses, by route and status.",
    );
    for ((route, status), count) in requests {
        let status = status.to_string();
        metrics.sample(
            "boxd_http_requests_total",
            &[("route", route), ("status", &status)],
            count,
        );
    }
    process(&mut metrics, state.started.elapsed());
    text_response(StatusCode::OK, "text/plain; version=0.0.4", metrics.0)
}

async fn boxes(metrics: &mut MetricsText, state: &HttpState) {
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
    for of_box in state.runtime.states().await {
        for (state, _, count) in &mut counts {
            *count += u64::from(*state == of_box);
        }
    }
    metrics.declare("boxd_boxes", "gauge", "Boxes, by state.");
    for (_, name, count) in counts {
        metrics.sample("boxd_boxes", &[("state", name)], count);
    }
    if let Ok(status) = state.runtime.status(&Caller::Local).await {
        let capacity = status.capacity;
        metrics.single(
            "boxd_boxes_used",
            "gauge",
            "Boxes that count against the limit.",
            capacity.used,
        );
        metrics.single(
            "boxd_boxes_limit",
            "gauge",
            "Maximum number of boxes (runtime.max_boxes).",
            capacity.limit,
        );
        let usable = u8::from(status.backend.available);
        metrics.single(
            "boxd_backend_available",
            "gauge",
            "Whether the backend can create boxes.",
            usable,
        );
    }
}

fn connections(metrics: &mut MetricsText, state: &HttpState) {
    // Only the kind of a listener is published, not its path; listeners of one kind share a metric.
    let mut rpc: BTreeMap<&str, (usize, [u64; 3])> = BTreeMap::new();
    for gauge in state.counters.listeners.get().into_iter().flatten() {
        let (open, refused) = rpc.entry(kind(gauge.endpoint())).or_default();
        *open += gauge.connections();
        let counts = gauge.refused();
        let counts = [counts.full(), counts.handshake(), counts.other_user()];
        for (sum, count) in refused.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    let http = state.permits.in_use();
    metrics.declare(
        "boxd_connections",
        "gauge",
        "Open connections, by kind of listener.",
    );
    metrics.sample("boxd_connections", &[("listener", "http")], http);
    for (listener, (open, _)) in &rpc {
        metrics.sample("boxd_connections", &[("listener", listener)], open);
    }
    metrics.single(
        "boxd_connections_limit",
        "gauge",
        "Maximum number of connections per listener (server.max_connections).",
        state.permits.limit(),
    );
    let name = "boxd_connections_refused_total";
    metrics.declare(
        name,
        "counter",
        "Rejected connections, by kind of listener and reason.",
    );
    let full = state.counters.full.load(Ordering::Relaxed);
    metrics.sample(name, &[("listener", "http"), ("reason", "full")], full);
    for (listener, (_, refused)) in &rpc {
        for (reason, count) in ["full", "handshake", "other_user"].into_iter().zip(refused) {
            metrics.sample(name, &[("listener", listener), ("reason", reason)], count);
        }
    }
    metrics.single(
        "boxd_http_websockets",
        "gauge",
        "Open RPC websockets on the HTTP port.",
        state.sockets.count(),
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

fn process(metrics: &mut MetricsText, uptime: Duration) {
    metrics.declare(
        "boxd_build_info",
        "gauge",
        "Version and commit of the server.",
    );
    let version = env!("CARGO_PKG_VERSION");
    let labels = [("version", version), ("commit", env!("BUILT_FROM_COMMIT"))];
    metrics.sample("boxd_build_info", &labels, 1);
    metrics.single(
        "boxd_uptime_seconds",
        "gauge",
        "Seconds since the server started.",
        uptime.as_secs_f64(),
    );
    let started = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .saturating_sub(uptime);
    metrics.single(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process, in Unix time.",
        started.as_secs_f64(),
    );
    if let Some(bytes) = resident_bytes() {
        metrics.single(
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory of the server process.",
            bytes,
        );
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        // The count includes the descriptor of this directory.
        metrics.single(
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
struct MetricsText(String);

impl MetricsText {
    /// Starts a metric.
    fn declare(&mut self, name: &str, kind: &str, about: &str) {
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP {name} {about}\n# TYPE {name} {kind}\n");
    }

    /// Adds one value.
    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{label}=\"{text}\"");
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// Adds a metric with one value.
    fn single(&mut self, name: &str, kind: &str, about: &str, value: impl Display) {
        self.declare(name, kind, about);
        self.sample(name, &[], value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_use_the_prometheus_format() {
        let mut metrics = MetricsText::default();
        metrics.declare("a_total", "counter", "All of it.");
        metrics.sample("a_total", &[("route", "rpc"), ("status", "101")], 3);
        metrics.single("b", "gauge", "One.", 0.5);
        let expected = "# HELP a_total All of it.\n# TYPE a_total counter\na_total{route=\"rpc\",status=\"101\"} 3\n\
                        # HELP b One.\n# TYPE b gauge\nb 0.5\n";
        assert_eq!(metrics.0, expected);
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(resident_bytes().unwrap() > 1 << 20);
    }
}
