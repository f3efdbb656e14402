//! Boxes as clients of the API see them.

use box_protocol::{BoxInfo, BoxState, ExecStatus, LifetimeAction, Note, UnixMs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{access, hosts};
use crate::http::context::Context;

/// The version of E2B's agent whose features this server has. Clients switch features by it.
pub(super) const ENVD_VERSION: &str = "0.6.4";

/// The time that a box lives if a request does not say otherwise, in seconds.
pub(super) const DEFAULT_TIMEOUT_SEC: u64 = 300;

/// The end of a box without an end: clients require one.
const NO_END: UnixMs = UnixMs(253_402_300_799_000);

/// What this gateway stores with a box.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct BoxNote {
    /// The template or snapshot of the request.
    pub(super) template: String,
    /// Whether ports need no token.
    #[serde(default = "yes")]
    pub(super) public: bool,
    /// The network rules of the request.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub(super) network: Map<String, Value>,
}

fn yes() -> bool {
    true
}

impl BoxNote {
    pub(super) fn of(info: &BoxInfo) -> Self {
        let note = info.note.as_ref().and_then(Note::read);
        note.unwrap_or_default()
    }
}

/// What this gateway stores with a template that it built.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TemplateNote {
    /// The command that succeeds when a box of the template is ready.
    pub(super) ready: String,
}

/// A state of a box in this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Running,
    Paused,
}

impl State {
    /// Returns the state of a box; `None` for a box that ends or has failed, which clients do not see.
    pub(super) fn of(info: &BoxInfo) -> Option<Self> {
        if info.status == ExecStatus::Closing {
            return None;
        }
        match info.state {
            BoxState::Starting | BoxState::Running | BoxState::Unreachable => Some(Self::Running),
            BoxState::Paused | BoxState::Stopped => Some(Self::Paused),
            BoxState::Failed => None,
        }
    }
}

/// Returns what a client needs to use a box.
pub(super) fn sandbox(context: &Context, info: &BoxInfo) -> Value {
    let mut body = json!({
        "templateID": BoxNote::of(info).template,
        "sandboxID": info.box_id,
        "clientID": "boxd",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": access::access_token(context, info),
        "trafficAccessToken": access::traffic_token(context, info),
    });
    if let Some(domain) = hosts::domain(context) {
        body["domain"] = json!(domain);
    }
    body
}

/// Returns the record of a box in lists.
pub(super) fn listed(info: &BoxInfo) -> Value {
    let note = BoxNote::of(info);
    let lifetime = info.lifetime.clone().unwrap_or_default();
    // A paused box has no end of its own.
    let end = lifetime.expires_at.unwrap_or(NO_END);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small number of CPUs"
    )]
    let cpus = info.cpus.ceil().max(1.0) as u64;
    let volumes: Vec<Value> = info
        .volumes
        .iter()
        .map(|mount| json!({"name": mount.volume, "path": mount.mount_path}))
        .collect();
    json!({
        "templateID": note.template,
        "sandboxID": info.box_id,
        "clientID": "boxd",
        "startedAt": info.created_at.to_string(),
        "endAt": end.to_string(),
        "cpuCount": cpus,
        "memoryMB": info.memory_mb,
        "diskSizeMB": info.disk_mb,
        "state": State::of(info).unwrap_or(State::Running),
        "metadata": info.labels,
        "envdVersion": ENVD_VERSION,
        "volumeMounts": volumes,
    })
}

/// Returns the full record of a box.
pub(super) fn detail(context: &Context, info: &BoxInfo) -> Value {
    let note = BoxNote::of(info);
    let lifetime = info.lifetime.clone().unwrap_or_default();
    let mut body = listed(info);
    body["envdAccessToken"] = json!(access::access_token(context, info));
    let on_timeout = match lifetime.on_expiry {
        LifetimeAction::Delete => "kill",
        LifetimeAction::Pause | LifetimeAction::Stop => "pause",
    };
    body["lifecycle"] = json!({"autoResume": lifetime.wake, "onTimeout": on_timeout});
    let mut network = note.network;
    body["allowInternetAccess"] =
        json!(network.remove("allowInternetAccess").unwrap_or(json!(true)));
    network.insert("allowPublicTraffic".to_owned(), json!(note.public));
    body["network"] = network.into();
    if let Some(domain) = hosts::domain(context) {
        body["domain"] = json!(domain);
    }
    body
}
