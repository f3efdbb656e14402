//! Requests for boxes, and the specs that they become.

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::actions::BoxUpdateParams;
use box_protocol::catalog::CatalogKind;
use box_protocol::{
    BoxId, BoxInfo, Defaults, Env, Invalid, Labels, Lifetime, LifetimeAction, LifetimeChange,
    MAX_NOTE_BYTES, Name, Network, Note, SpecDraft, UnixMs, VolumeMount,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::PRESET;
use super::catalog::resolve;
use super::errors::ApiError;
use super::run_config::{ENV_VARS, RunConfig};
use super::sizes::{
    MAX_DISK_MB, MAX_MEMORY_MB, check_cpus, check_megabytes, check_millicores, mebibytes,
    millicores,
};
use super::snapshots;
use crate::http::context::Context;

/// The time for a box to become ready if the request sets none.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest time for which a request waits.
const MAX_READY_TIMEOUT: Duration = Duration::from_hours(1);

/// The idle time after which a box stops if the request sets none.
const IDLE_SECONDS: u64 = 600;

/// An idle time that never passes: a century.
pub(super) const NEVER_MS: u64 = 100 * 365 * 24 * 3_600_000;

/// A volume of a new box.
#[derive(Debug, Deserialize)]
pub(super) struct VolumeRequest {
    /// The id or the name.
    #[serde(alias = "volume_id", alias = "volume_name")]
    volume: String,
    mount_path: String,
    #[serde(default)]
    read_only: bool,
}

impl VolumeRequest {
    /// Returns the mount.
    async fn mount(self, context: &Context) -> Result<VolumeMount, ApiError> {
        let (volume, _) = resolve(context, CatalogKind::Volume, "volume", &self.volume).await?;
        let mut mount = VolumeMount::new(volume, self.mount_path)?;
        mount.ro = self.read_only;
        Ok(mount)
    }
}

/// A request for a box. Its members come from all versions of the SDKs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CreateBox {
    name: Option<String>,
    template_name: Option<String>,
    snapshot_id: Option<String>,
    snapshot: Option<String>,
    snapshot_name: Option<String>,
    wait_for_ready: Option<bool>,
    timeout: Option<f64>,
    ttl_seconds: Option<u64>,
    idle_ttl_seconds: Option<u64>,
    delete_after_stop_seconds: Option<u64>,
    vcpus: Option<f64>,
    cpu_millicores: Option<u64>,
    mem_bytes: Option<u64>,
    fs_capacity_bytes: Option<u64>,
    run_config: Option<RunConfig>,
    env_vars: Option<BTreeMap<String, String>>,
    labels: Option<Labels>,
    volumes: Option<Vec<VolumeRequest>>,
    persistent: Option<bool>,
    preserve_memory_on_stop: Option<bool>,
    restore_memory: Option<bool>,
    proxy_config: Option<Value>,
    mount_config: Option<Value>,
    access_delegation: Option<Value>,
    tag_value_ids: Option<Value>,
}

impl CreateBox {
    /// Returns how long the request waits for the box; `None` if it does not wait.
    pub(super) fn ready_timeout(&self) -> Result<Option<Duration>, Invalid> {
        if self.wait_for_ready == Some(false) {
            return Ok(None);
        }
        let Some(seconds) = self.timeout else {
            return Ok(Some(READY_TIMEOUT));
        };
        let timeout = Duration::try_from_secs_f64(seconds);
        let timeout = timeout.map_err(|_| Invalid::new("timeout", "must be 0 or more"))?;
        Ok(Some(timeout.min(MAX_READY_TIMEOUT)))
    }

    /// Returns the spec of the box.
    pub(super) async fn into_spec(self, context: &Context) -> Result<SpecDraft, ApiError> {
        self.check_supported()?;
        let id = BoxId::fresh();
        let name = match self.name {
            Some(name) => name,
            None => format!("sandbox-{}", &id.as_str()[20..]),
        };
        let mut spec = SpecDraft::new(id.as_str());
        spec.name = Some(Name::new(name)?);
        let mut defaults = Defaults::default();
        let mut note = BoxNote {
            ttl_seconds: self.ttl_seconds.unwrap_or_default(),
            ..BoxNote::default()
        };
        if let Some(template) = &self.template_name {
            let kind = CatalogKind::Template;
            let (template, item) = resolve(context, kind, "template_name", template).await?;
            spec.template = Some(template);
            note.template = Some(item.name.to_string());
        } else {
            apply_base(&mut spec);
        }
        let snapshot = self.snapshot_id.or(self.snapshot).or(self.snapshot_name);
        if let Some(snapshot) = snapshot {
            let item = snapshots::find(context, &snapshot).await?;
            snapshots::apply(&item, &mut spec, &mut defaults)?;
        }
        if let Some(config) = self.run_config {
            config.apply(&mut spec, &mut defaults)?;
        }
        let own = Env::try_from(self.env_vars.unwrap_or_default());
        let own = own.map_err(|error| named("env_vars", &error))?;
        let mut below = defaults.env.clone().into_map();
        let shadowed = own.names().into_iter();
        note.shadowed = shadowed
            .map(|name| {
                let value = below.remove(&name);
                (name, value)
            })
            .collect();
        defaults.env.extend(own);
        if defaults != Defaults::default() {
            spec.defaults = Some(defaults);
        }
        check_cpus("vcpus", self.vcpus)?;
        let cpus = check_millicores("cpu_millicores", self.cpu_millicores)?;
        spec.cpus = cpus.or(self.vcpus).or(spec.cpus);
        let memory_mb = self.mem_bytes.map(mebibytes);
        check_megabytes("mem_bytes", memory_mb, MAX_MEMORY_MB)?;
        spec.memory_mb = memory_mb.or(spec.memory_mb);
        let disk_mb = self.fs_capacity_bytes.map(mebibytes);
        check_megabytes("fs_capacity_bytes", disk_mb, MAX_DISK_MB)?;
        spec.disk_mb = disk_mb.or(spec.disk_mb);
        if let Some(labels) = self.labels {
            spec.labels.get_or_insert_default().extend(labels);
        }
        if let Some(volumes) = self.volumes.filter(|volumes| !volumes.is_empty()) {
            let mut mounts = Vec::new();
            for volume in volumes {
                mounts.push(volume.mount(context).await?);
            }
            spec.volumes = Some(mounts);
        }
        spec.note = note.kept()?;
        spec.lifetime = Some(lifetime(
            self.ttl_seconds,
            self.idle_ttl_seconds,
            self.delete_after_stop_seconds,
            note.template.is_some(),
        ));
        Ok(spec)
    }

    /// Refuses what boxes of this server do not have.
    fn check_supported(&self) -> Result<(), Invalid> {
        for (field, value) in [
            ("proxy_config", &self.proxy_config),
            ("mount_config", &self.mount_config),
            ("access_delegation", &self.access_delegation),
            ("tag_value_ids", &self.tag_value_ids),
        ] {
            refuse_content(field, value.as_ref())?;
        }
        for (field, flag, refused) in [
            (
                "preserve_memory_on_stop",
                self.preserve_memory_on_stop,
                true,
            ),
            ("restore_memory", self.restore_memory, true),
            ("persistent", self.persistent, false),
        ] {
            if flag == Some(refused) {
                let rule = format!("{refused} is not supported by this server; omit it");
                return Err(Invalid::new(field, rule));
            }
        }
        Ok(())
    }
}

/// Refuses a member with content.
pub(super) fn refuse_content(field: &'static str, value: Option<&Value>) -> Result<(), Invalid> {
    let is_empty = match value {
        None | Some(Value::Null) => true,
        Some(Value::Object(members)) => members.is_empty(),
        Some(Value::Array(items)) => items.is_empty(),
        Some(_) => false,
    };
    if is_empty {
        return Ok(());
    }
    Err(Invalid::new(field, "not supported by this server; omit it"))
}

/// Sets what every box of this protocol has, unless a template says otherwise.
pub(super) fn apply_base(spec: &mut SpecDraft) {
    PRESET.apply(spec);
    spec.network = Some(Network::On);
    spec.read_only_rootfs = Some(false);
    // A machine without networks for boxes still serves them, offline.
    spec.best_effort = Some(vec!["network".to_owned()]);
}

/// What the gateway keeps with a box.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct BoxNote {
    /// The requested lifetime in seconds; the time of the expiry alone would be inexact.
    pub(super) ttl_seconds: u64,
    /// The name of the template at the creation; the spec has its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) template: Option<String>,
    /// The variables of `env_vars`, which lie above `run_config`, with their values there.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) shadowed: BTreeMap<String, Option<String>>,
}

impl BoxNote {
    /// Returns the note of a box.
    pub(super) fn of(info: &BoxInfo) -> Self {
        info.note.as_ref().and_then(Note::read).unwrap_or_default()
    }

    fn kept(&self) -> Result<Option<Note>, Invalid> {
        let is_empty = *self == Self::default();
        (!is_empty).then(|| self.stored("env_vars")).transpose()
    }

    /// Returns the note to store; `field` is the member of the request that may be too long for it.
    fn stored(&self, field: &'static str) -> Result<Note, Invalid> {
        Note::new(self).map_err(|_| {
            let rule = format!(
                "names of env_vars, and their values in run_config, must have less than {MAX_NOTE_BYTES} bytes in total"
            );
            Invalid::new(field, rule)
        })
    }
}

/// Returns the lifetime of a new box.
///
/// Boxes of templates come from an older API, where an idle box is deleted and has no default idle time.
fn lifetime(
    ttl: Option<u64>,
    idle: Option<u64>,
    delete_after_stop: Option<u64>,
    is_of_template: bool,
) -> Lifetime {
    let idle = idle.unwrap_or(if is_of_template { 0 } else { IDLE_SECONDS });
    Lifetime {
        expires_at: ttl
            .filter(|ttl| *ttl > 0)
            .map(|ttl| after(UnixMs::now(), ttl)),
        idle_ms: Some(idle_ms(idle)),
        on_idle: if is_of_template {
            LifetimeAction::Delete
        } else {
            LifetimeAction::Stop
        },
        delete_after_stop_ms: delete_after_stop
            .filter(|time| *time > 0)
            .map(|time| time.saturating_mul(1000)),
        wake: true,
        ..Lifetime::default()
    }
}

fn idle_ms(seconds: u64) -> u64 {
    match seconds {
        0 => NEVER_MS,
        _ => seconds.saturating_mul(1000).min(NEVER_MS),
    }
}

/// Returns the moment this many seconds after another.
pub(super) fn after(start: UnixMs, seconds: u64) -> UnixMs {
    UnixMs(start.0.saturating_add(seconds.saturating_mul(1000)))
}

/// Returns an error with the name that a field has in this API.
pub(super) fn named(field: &'static str, error: &Invalid) -> Invalid {
    Invalid::new(field, error.rule().to_owned())
}

/// Changes of a box.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UpdateBox {
    name: Option<String>,
    ttl_seconds: Option<u64>,
    idle_ttl_seconds: Option<u64>,
    delete_after_stop_seconds: Option<u64>,
    run_config: Option<RunConfig>,
    proxy_config: Option<Value>,
    tag_value_ids: Option<Value>,
    vcpus: Option<f64>,
    cpu_millicores: Option<u64>,
    mem_bytes: Option<u64>,
    fs_capacity_bytes: Option<u64>,
}

impl UpdateBox {
    /// Returns the changes of a box.
    pub(super) fn into_params(self, info: &BoxInfo) -> Result<BoxUpdateParams, Invalid> {
        refuse_content("proxy_config", self.proxy_config.as_ref())?;
        refuse_content("tag_value_ids", self.tag_value_ids.as_ref())?;
        let millicores = millicores(info.cpus);
        for (field, changes) in [
            (
                // The view rounds to whole ones.
                "vcpus",
                self.vcpus.is_some_and(|cpus| {
                    cpus.to_bits() != info.cpus.to_bits()
                        && cpus.to_bits() != info.cpus.ceil().to_bits()
                }),
            ),
            (
                "cpu_millicores",
                self.cpu_millicores.is_some_and(|cpu| cpu != millicores),
            ),
            (
                "mem_bytes",
                self.mem_bytes
                    .is_some_and(|bytes| mebibytes(bytes) != info.memory_mb),
            ),
            (
                "fs_capacity_bytes",
                self.fs_capacity_bytes
                    .is_some_and(|bytes| mebibytes(bytes) != info.disk_mb),
            ),
        ] {
            if changes {
                let rule = "cannot change in an existing box; create another one";
                return Err(Invalid::new(field, rule));
            }
        }
        let mut params = BoxUpdateParams::of(info.box_id.clone());
        params.name = self.name.map(Name::new).transpose()?;
        let mut note = BoxNote::of(info);
        note.ttl_seconds = self.ttl_seconds.unwrap_or(note.ttl_seconds);
        let change = LifetimeChange {
            // The time counts from the creation.
            expires_at: self
                .ttl_seconds
                .map(|ttl| (ttl > 0).then(|| after(info.created_at, ttl))),
            idle_ms: self.idle_ttl_seconds.map(|idle| Some(idle_ms(idle))),
            delete_after_stop_ms: self
                .delete_after_stop_seconds
                .map(|time| (time > 0).then(|| time.saturating_mul(1000))),
            ..LifetimeChange::default()
        };
        params.lifetime = (change != LifetimeChange::default()).then_some(change);
        if let Some(config) = self.run_config {
            let mut change = config.into_change(info)?;
            for (name, value) in &mut note.shadowed {
                if let Some(new) = change.env.remove(name) {
                    *value = new;
                }
            }
            params.defaults = Some(change);
        }
        if note != BoxNote::of(info) {
            params.note = Some(note.stored(ENV_VARS)?);
        }
        Ok(params)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn idle_boxes_stop_and_those_of_templates_are_deleted() {
        let newest = lifetime(None, None, None, false);
        assert_eq!(
            (newest.idle_ms, newest.on_idle),
            (Some(600_000), LifetimeAction::Stop)
        );
        let seed = lifetime(Some(120), None, None, true);
        assert_eq!(
            (seed.idle_ms, seed.on_idle),
            (Some(NEVER_MS), LifetimeAction::Delete)
        );
        assert!(seed.expires_at.is_some() && seed.wake);
        assert_eq!(lifetime(Some(0), Some(0), Some(0), false).expires_at, None);
    }

    #[test]
    fn features_that_boxes_lack_are_refused_by_name() {
        for (request, field) in [
            (json!({"proxy_config": {"rules": [1]}}), "proxy_config"),
            (json!({"mount_config": {"mounts": [1]}}), "mount_config"),
            (
                json!({"access_delegation": {"mode": "INHERIT"}}),
                "access_delegation",
            ),
            (
                json!({"preserve_memory_on_stop": true}),
                "preserve_memory_on_stop",
            ),
            (json!({"restore_memory": true}), "restore_memory"),
            (json!({"persistent": false}), "persistent"),
        ] {
            let request: CreateBox = from_value(request).unwrap();
            assert_eq!(request.check_supported().unwrap_err().field(), field);
        }
        let request: CreateBox = from_value(json!({
            "proxy_config": {}, "mount_config": null, "restore_memory": false, "persistent": true,
            "some_new_member": 1,
        }))
        .unwrap();
        assert_eq!(request.check_supported(), Ok(()));
    }

    #[test]
    fn variables_that_the_note_cannot_hold_are_refused_by_name() {
        let note = BoxNote {
            shadowed: BTreeMap::from([("A".repeat(MAX_NOTE_BYTES), None)]),
            ..BoxNote::default()
        };
        assert_eq!(note.kept().unwrap_err().field(), "env_vars");
    }

    #[test]
    fn a_request_waits_for_a_bounded_time() {
        let timeout = |request| from_value::<CreateBox>(request).unwrap().ready_timeout();
        assert_eq!(timeout(json!({})), Ok(Some(READY_TIMEOUT)));
        assert_eq!(timeout(json!({"wait_for_ready": false})), Ok(None));
        assert_eq!(
            timeout(json!({"timeout": 5})),
            Ok(Some(Duration::from_secs(5)))
        );
        assert_eq!(
            timeout(json!({"timeout": 1e18})),
            Ok(Some(MAX_READY_TIMEOUT))
        );
        assert!(timeout(json!({"timeout": -1})).is_err());
    }
}
