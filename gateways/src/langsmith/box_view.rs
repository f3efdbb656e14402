//! How responses show a box.

use box_protocol::catalog::CatalogKind;
use box_protocol::{BoxInfo, BoxState, UnixMs};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use super::box_request::{BoxNote, NEVER_MS};
use super::catalog::item;
use super::run_config::RunConfig;
use super::sizes::{bytes, millicores};
use crate::http::context::Context;

/// Returns a box as the SDKs of all versions read it, with the names that its items have now.
pub(super) async fn shown(context: &Context, info: &BoxInfo) -> Value {
    let (status, message) = status(info);
    let lifetime = info.lifetime.clone().unwrap_or_default();
    let cpu = millicores(info.cpus);
    let mut volumes = Vec::new();
    for mount in &info.volumes {
        let text = mount.volume.as_str();
        let volume = item(context, CatalogKind::Volume, text).await.ok();
        let (id, name) = match &volume {
            Some(volume) => (volume.id.as_str(), volume.name.as_str()),
            None => (text, text),
        };
        volumes.push(json!({
            "volume_id": id, "volume_name": name, "mount_path": mount.mount_path,
            "read_only": mount.ro,
        }));
    }
    let expires_at = lifetime.expires_at;
    let note = BoxNote::of(info);
    let idle = lifetime.idle_ms.filter(|idle| *idle < NEVER_MS);
    let stopped_at = (info.state == BoxState::Stopped).then(|| info.since.to_string());
    json!({
        "id": info.box_id,
        "name": name(info),
        "status": status,
        "status_message": message,
        "dataplane_url": dataplane_url(context, info),
        "created_at": info.created_at.to_string(),
        "updated_at": UnixMs(info.since.0.max(info.created_at.0)).to_string(),
        "created_by": Value::Null,
        "template_name": template_name(context, info, &note).await,
        "snapshot_id": info.snapshot,
        "vcpus": cpu.div_ceil(1000),
        "cpu_millicores": cpu,
        "mem_bytes": bytes(info.memory_mb),
        "fs_capacity_bytes": (info.disk_mb > 0).then_some(bytes(info.disk_mb)),
        "ttl_seconds": note.ttl_seconds,
        "expires_at": expires_at.map(|at| at.to_string()),
        "idle_ttl_seconds": idle.map_or(0, |idle| idle / 1000),
        "delete_after_stop_seconds": lifetime.delete_after_stop_ms.map_or(0, |time| time / 1000),
        "stopped_at": stopped_at,
        "run_config": RunConfig::of(info),
        "labels": info.labels,
        "volumes": volumes,
        "persistent": true,
        "preserve_memory_on_stop": false,
    })
}

/// Returns the name of a box; a box without one has its id.
pub(super) fn name(info: &BoxInfo) -> &str {
    match &info.name {
        Some(name) => name.as_str(),
        None => info.box_id.as_str(),
    }
}

/// Returns the status and its reason.
pub(super) fn status(info: &BoxInfo) -> (&'static str, Option<&str>) {
    let status = match info.state {
        BoxState::Starting | BoxState::Unreachable => "provisioning",
        BoxState::Running => "ready",
        BoxState::Paused | BoxState::Stopped => "stopped",
        BoxState::Failed => "failed",
    };
    (status, info.reason.as_deref())
}

/// Returns the name of the template of a box; that of its creation if the template is gone.
async fn template_name(context: &Context, info: &BoxInfo, note: &BoxNote) -> Option<String> {
    let template = info.template.as_ref()?.as_str();
    match item(context, CatalogKind::Template, template).await {
        Ok(found) => Some(found.name.to_string()),
        Err(_) => Some(note.template.as_deref().unwrap_or(template).to_owned()),
    }
}

/// Returns the URL of the inside of a box. It has the id, so it survives a new name.
fn dataplane_url(context: &Context, info: &BoxInfo) -> String {
    let id = utf8_percent_encode(info.box_id.as_str(), NON_ALPHANUMERIC);
    format!("{}/boxes/{id}/langsmith", context.url)
}
