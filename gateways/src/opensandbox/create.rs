//! `POST /sandboxes`.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{CatalogDeleteParams, CatalogGetParams, CatalogPutParams};
use box_protocol::catalog::{CatalogKind, DEFAULT_VOLUME_MB, ItemDraft, VolumeDraft};
use box_protocol::{
    BoxId, BoxMountSpec, Code, Defaults, Env, HOST_IMAGE, HostPathMode, Invalid, ItemId, ItemRef,
    Lifetime, Main, Name, Network, Note, Prepare, Program, SpecDraft, UnixMs, VolumeMount,
};

use super::error::Error;
use super::model::{self, Claim, CreateRequest, Hook, SandboxNote, Volume, WAITING};
use super::{GATEWAY, policy};
use crate::http::body::Json;
use crate::http::context::Context;
use crate::http::creation::Creation;
use crate::http::preset::Preset;
use crate::http::quantity::{megabytes, quantity, quantity_or_zero};
use crate::http::refusal::json_response;

/// The file of variables that `set_env` of the clients appends to.
const ENV_FILE: &str = "/tmp/.opensandbox/env";

/// The variable with the name of that file.
const ENV_FILE_VARIABLE: &str = "EXECD_ENVS";

/// The settings of all sandboxes.
const PRESET: Preset = Preset {
    guest: None,
    dirs: &[],
    env: &[(ENV_FILE_VARIABLE, ENV_FILE)],
    env_file: Some(ENV_FILE),
    cwd: None,
};

/// The maximum number of processes; the reference has more than the default of boxes, too.
const PIDS: u64 = 1024;

/// How long a response waits for a sandbox to be ready. Clients give up after 30 seconds.
const READY_WAIT: Duration = Duration::from_secs(5);

/// Creates a sandbox, and answers when it is ready, or with a pending one.
///
/// Clients ask execd whether a sandbox is ready.
pub(super) async fn create(
    context: Context,
    Json(request): Json<CreateRequest>,
) -> Result<Response, Error> {
    let id = BoxId::fresh();
    let mut spec = spec(&id, &request)?;
    let volumes = volumes(&request.volumes)?;
    spec.volumes = (!volumes.is_empty()).then_some(volumes);
    let made = make_volumes(&context, &request.volumes).await?;
    let mut creation = Creation::start(context.clone(), GATEWAY, id, spec);
    let info = match creation.ready_or_visible(READY_WAIT).await {
        Ok(info) => info,
        Err(error) => {
            delete_volumes(&context, made).await;
            return Err(error.into());
        }
    };
    creation.answered();
    let sandbox = model::sandbox(&info);
    Ok(json_response(StatusCode::ACCEPTED, &sandbox))
}

/// Returns the spec of a request, without its volumes.
fn spec(id: &BoxId, request: &CreateRequest) -> Result<SpecDraft, Error> {
    refuse_unserved(request)?;
    let mut spec = SpecDraft::new(id.as_str());
    match (&request.image, &request.snapshot_id) {
        (Some(image), None) => {
            let uri = image.uri.trim();
            if uri.is_empty() {
                let message = "image.uri: must not be blank; name an image, or host";
                return Err(Error::invalid(message));
            }
            spec.image = (uri != HOST_IMAGE).then(|| uri.to_owned());
        }
        (None, Some(snapshot)) => spec.snapshot = Some(ItemRef::new(snapshot)?),
        _ => {
            let message = "image: exactly one of image and snapshotId is required";
            return Err(Error::invalid(message));
        }
    }
    for (name, value) in &request.resource_limits {
        match name.as_str() {
            "cpu" => spec.cpus = Some(quantity("resourceLimits.cpu", value)?),
            "memory" => spec.memory_mb = Some(megabytes("resourceLimits.memory", value)?),
            "ephemeral-storage" | "disk" => {
                spec.disk_mb = Some(megabytes("resourceLimits.disk", value)?);
            }
            // Other resources are of no use to a box.
            _ => {}
        }
    }
    spec.pids_limit = Some(PIDS);
    spec.persistent = Some(true);
    spec.read_only_rootfs = Some(false);
    spec.labels.clone_from(&request.metadata);
    if let Some(seconds) = request.timeout {
        spec.lifetime = Some(Lifetime {
            expires_at: Some(expiry(seconds)?),
            ..Lifetime::default()
        });
    }
    let mut env = Env::new();
    for (name, value) in request.env.iter().flatten() {
        env.insert(name, value.as_deref().unwrap_or_default())?;
    }
    // `set_env` of the clients appends to the file that this variable names.
    let env_file = env.get(ENV_FILE_VARIABLE).cloned();
    spec.defaults = Some(Defaults {
        env,
        env_file: env_file.filter(|path| !path.is_empty()),
        ..Defaults::default()
    });
    PRESET.apply(&mut spec);
    // A sandbox of the reference has a network; a machine that cannot give one says so in the record.
    spec.network = Some(Network::On);
    spec.best_effort = Some(vec!["network".to_owned()]);
    if let Some(policy) = &request.network_policy {
        spec.network_policy = Some(Box::new(policy::from_request(policy)?));
    }
    let hooks = request.lifecycle.as_ref();
    let hook = hooks.and_then(|hooks| hooks.pre_start.as_ref());
    spec.prepare = hook.map(prepare).transpose()?;
    spec.extra_mounts = Some(host_mounts(&request.volumes)?);
    let entrypoint = request.entrypoint.clone().unwrap_or_default();
    if !entrypoint.is_empty() && entrypoint != WAITING {
        spec.main = Some(Main {
            argv: entrypoint.clone(),
            ends_box: false,
        });
    }
    let extensions = request.extensions.clone().unwrap_or_default();
    if let Some(pool) = extensions.get("poolRef") {
        spec.pool = Some(ItemRef::new(pool)?);
    }
    let kept = SandboxNote {
        entrypoint,
        extensions,
    };
    spec.note = Some(Note::new(&kept)?);
    Ok(spec)
}

fn refuse_unserved(request: &CreateRequest) -> Result<(), Error> {
    let unsupported = |message: &str| Err(Error::unsupported(message));
    if request.template_id.is_some() {
        return unsupported("templateId: this server has no templates; use an image");
    }
    if request
        .credential_proxy
        .as_ref()
        .is_some_and(|proxy| proxy.enabled)
    {
        return unsupported("credentialProxy: not supported by this server; omit it");
    }
    if request
        .image
        .as_ref()
        .is_some_and(|image| image.auth.is_some())
    {
        return unsupported("image.auth: not supported by this server; use boxd image login");
    }
    if request.volumes.iter().any(|volume| volume.ossfs.is_some()) {
        return unsupported("volumes.ossfs: not supported by this server; use host or pvc");
    }
    for (field, resources) in [
        ("resourceLimits", &request.resource_limits),
        ("resourceRequests", &request.resource_requests),
    ] {
        for (name, value) in resources {
            let is_gpu = name == "gpu" || name.ends_with("/gpu");
            if is_gpu && quantity_or_zero(field, value)? > 0.0 {
                return unsupported(&format!("{field}.{name}: this server has no GPUs"));
            }
        }
    }
    let periodic = request.lifecycle.as_ref().map(|hooks| &hooks.periodic);
    if periodic.is_some_and(|periodic| !periodic.is_empty()) {
        return unsupported("lifecycle.periodic: not supported by this server; omit it");
    }
    if let Some(platform) = &request.platform {
        let is_other =
            |asked: &Option<String>, own: &str| asked.as_deref().is_some_and(|asked| asked != own);
        if is_other(&platform.os, "linux") || is_other(&platform.arch, model::arch()) {
            let arch = model::arch();
            return unsupported(&format!("platform: this server has only linux/{arch}"));
        }
    }
    Ok(())
}

fn expiry(seconds: u64) -> Result<UnixMs, Error> {
    if seconds == 0 {
        return Err(Error::invalid_expiry("timeout: must be greater than 0"));
    }
    let milliseconds = seconds.checked_mul(1000);
    let at = milliseconds.and_then(|time| UnixMs::now().0.checked_add(time));
    let at = at.ok_or_else(|| Error::invalid_expiry("timeout: too large"))?;
    Ok(UnixMs(at))
}

fn prepare(hook: &Hook) -> Result<Prepare, Error> {
    let mut prepare = Prepare::new(vec![Program::argv(hook.command.iter().cloned())?]);
    if let Some(seconds) = hook.timeout_seconds {
        prepare.timeout_sec = seconds.max(1);
    }
    Ok(prepare)
}

fn host_mounts(volumes: &[Volume]) -> Result<Vec<BoxMountSpec>, Error> {
    let mut mounts = Vec::new();
    for volume in volumes {
        let Some(host) = &volume.host else {
            continue;
        };
        let mode = if volume.read_only {
            HostPathMode::Ro
        } else {
            HostPathMode::Rw
        };
        let path = match &volume.sub_path {
            Some(below) if is_inside(below) => format!("{}/{below}", host.path),
            Some(_) => {
                let message = "volumes.subPath: must be a relative path without ..";
                return Err(Error::invalid(message));
            }
            None => host.path.clone(),
        };
        mounts.push(BoxMountSpec::new(path, &volume.mount_path, mode)?);
    }
    Ok(mounts)
}

fn is_inside(path: &str) -> bool {
    !path.starts_with('/')
        && path
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Returns the mounts of named volumes.
fn volumes(volumes: &[Volume]) -> Result<Vec<VolumeMount>, Error> {
    let mut mounts = Vec::new();
    for volume in volumes {
        let sources = [
            volume.host.is_some(),
            volume.pvc.is_some(),
            volume.ossfs.is_some(),
        ];
        if sources.into_iter().filter(|given| *given).count() != 1 {
            let name = &volume.name;
            let message = format!("volumes: {name:?} must have exactly one of host, pvc and ossfs");
            return Err(Error::invalid(message));
        }
        let Some(claim) = &volume.pvc else {
            continue;
        };
        if claim.delete_on_sandbox_termination {
            let message = "volumes.pvc.deleteOnSandboxTermination: not supported by this server; delete the volume yourself";
            return Err(Error::unsupported(message));
        }
        let mut mount = VolumeMount::new(ItemRef::new(&claim.volume)?, &volume.mount_path)?;
        mount.ro = volume.read_only;
        if let Some(below) = &volume.sub_path {
            if !is_inside(below) {
                let rule = "must be a relative path without ..";
                return Err(Invalid::new("volumes.subPath", rule).into());
            }
            mount.sub_path = Some(below.clone());
        }
        mounts.push(mount);
    }
    Ok(mounts)
}

/// Creates the volumes that are missing and may be created; returns their ids.
async fn make_volumes(context: &Context, volumes: &[Volume]) -> Result<Vec<ItemId>, Error> {
    // A request for a volume that cannot be had creates no other one.
    let mut missing = Vec::new();
    for claim in volumes.iter().filter_map(|volume| volume.pvc.as_ref()) {
        missing.extend(missing_volume(context, claim).await?);
    }
    let mut made = Vec::new();
    for params in missing {
        match context.runtime().put_item(&context.caller, params).await {
            Ok(item) => made.push(item.id),
            // Another request may have created it.
            Err(error) if error.code() == Code::Conflict => {}
            Err(error) => {
                delete_volumes(context, made).await;
                return Err(error.into());
            }
        }
    }
    Ok(made)
}

/// Returns how to create the volume of a claim; `None` if it exists.
async fn missing_volume(
    context: &Context,
    claim: &Claim,
) -> Result<Option<CatalogPutParams>, Error> {
    let known = CatalogGetParams {
        kind: CatalogKind::Volume,
        item: ItemRef::new(&claim.volume)?,
    };
    match context.runtime().item(&context.caller, known).await {
        Ok(_) => return Ok(None),
        Err(error) if error.code() == Code::NotFound && claim.create_if_not_exists => {}
        Err(error) => return Err(error.into()),
    }
    let storage = claim.storage.as_deref();
    let size = storage.map(|storage| megabytes("volumes.pvc.storage", storage));
    let draft = ItemDraft::Volume(VolumeDraft {
        size_mb: size.transpose()?.unwrap_or(DEFAULT_VOLUME_MB),
        shared: true,
    });
    let name = Name::new(&claim.volume)?;
    Ok(Some(CatalogPutParams::new(name, draft)))
}

/// Deletes the volumes of a sandbox that was not created. One that another sandbox uses stays.
async fn delete_volumes(context: &Context, volumes: Vec<ItemId>) {
    for id in volumes {
        let Ok(item) = ItemRef::new(&id) else {
            continue;
        };
        let params = CatalogDeleteParams {
            kind: CatalogKind::Volume,
            item,
        };
        let deleted = context.runtime().delete_item(&context.caller, params).await;
        if let Err(error) = deleted {
            tracing::debug!(%error, "a new volume of a refused sandbox stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_for_no_gpus_is_served() {
        let refused = |resource: &str, amount: &str| {
            let body = json!({"image": {"uri": HOST_IMAGE}, "resourceLimits": {resource: amount}});
            let request: CreateRequest = serde_json::from_value(body).unwrap();
            refuse_unserved(&request).is_err()
        };
        for resource in ["gpu", "nvidia.com/gpu"] {
            assert!(!refused(resource, "0"));
            assert!(refused(resource, "1") && refused(resource, "all"));
        }
    }
}
