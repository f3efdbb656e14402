//! From a request for a box to its spec.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use box_protocol::actions::CatalogGetParams;
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState};
use box_protocol::{
    BoxError, BoxId, Code, Defaults, Env, HOST_IMAGE, Invalid, ItemRef, Labels, Lifetime,
    LifetimeAction, Network, Note, SpecDraft, UnixMs, VolumeMount,
};
use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;
use super::model::{BoxNote, DEFAULT_TIMEOUT_SEC, TemplateNote};
use super::network::NetworkRequest;
use super::templates::{is_usable, status_of};
use crate::http::context::Context;
use crate::http::preset::Preset;

/// The user of commands, and its home directory.
pub(super) const USER: &str = "user";
pub(super) const HOME: &str = "/home/user";

/// What clients expect in every box.
pub(super) const PRESET: Preset = Preset {
    guest: Some((USER, HOME)),
    dirs: &[],
    env: &[("E2B_SANDBOX", "true")],
    env_file: None,
    cwd: Some(HOME),
};

/// The templates of E2B's own cloud, which are the system directories of this machine.
const BUILT_IN: [&str; 4] = ["", "base", "code-interpreter-v1", "code-interpreter"];

/// A request for a box.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewSandbox {
    #[serde(rename = "templateID", default)]
    template: String,
    timeout: Option<u64>,
    #[serde(default)]
    metadata: Option<Labels>,
    #[serde(default)]
    env_vars: Option<BTreeMap<String, String>>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    #[serde(rename = "allow_internet_access")]
    internet: Option<bool>,
    network: Option<NetworkRequest>,
    volume_mounts: Option<Vec<Mount>>,
    mcp: Option<Value>,
    iam: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct AutoResume {
    #[serde(default)]
    enabled: bool,
}

#[derive(Debug, Deserialize)]
struct Mount {
    name: String,
    path: String,
}

impl NewSandbox {
    /// Returns the spec of the box, and the command that says when the box is ready.
    pub(super) async fn spec(
        self,
        context: &Context,
        id: &BoxId,
    ) -> Result<(SpecDraft, Option<String>), ApiError> {
        for (name, value) in [("mcp", &self.mcp), ("iam", &self.iam)] {
            if value.as_ref().is_some_and(|value| !value.is_null()) {
                let message = format!("{name}: not supported by this server; omit it");
                return Err(ApiError::unsupported(message));
            }
        }
        let mut spec = SpecDraft::new(id.as_str());
        let network = self.network.clone().unwrap_or_default();
        let internet = self.internet.unwrap_or(true);
        let note = BoxNote {
            template: self.template.clone(),
            public: network.allow_public_traffic.unwrap_or(true),
            network: network.kept(internet),
        };
        spec.note = Some(Note::new(&note)?);
        // Rules of later requests apply only to a box that has a network.
        spec.network = Some(Network::On);
        spec.network_policy = Some(Box::new(network.policy(internet)?));
        let (lifetime, persistent) = self.lifetime();
        spec.persistent = Some(persistent);
        spec.lifetime = Some(lifetime);
        spec.labels = self.metadata;
        spec.defaults = Some(Defaults {
            env: env("envVars", self.env_vars.unwrap_or_default())?,
            ..Defaults::default()
        });
        let mounts = self.volume_mounts.unwrap_or_default().into_iter();
        let mounts = mounts.map(|mount| VolumeMount::new(ItemRef::new(mount.name)?, mount.path));
        let mounts: Vec<_> = mounts.collect::<Result<_, Invalid>>()?;
        if !mounts.is_empty() {
            spec.volumes = Some(mounts);
        }
        let ready = set_template(context, &mut spec, &self.template).await?;
        PRESET.apply(&mut spec);
        Ok((spec, ready))
    }

    /// Returns the lifetime, and whether the box stays when it is idle.
    ///
    /// A call to a box with `autoResume` wakes it. It then has no end, and pauses again when it is idle.
    fn lifetime(&self) -> (Lifetime, bool) {
        let timeout = self.timeout.unwrap_or(DEFAULT_TIMEOUT_SEC);
        let wake = self.auto_resume.as_ref().is_some_and(|it| it.enabled);
        let on_expiry = match (self.auto_pause, self.auto_pause_memory) {
            (Some(true), Some(false)) => LifetimeAction::Stop,
            (Some(true), _) => LifetimeAction::Pause,
            _ => LifetimeAction::Delete,
        };
        let lifetime = Lifetime {
            expires_at: Some(end_after(timeout)),
            on_expiry,
            wake,
            idle_ms: wake.then(|| timeout.saturating_mul(1000).max(1000)),
            on_idle: on_expiry,
            ..Lifetime::default()
        };
        (lifetime, !wake)
    }
}

/// Returns the end of a box that lives this long from now.
pub(super) fn end_after(seconds: u64) -> UnixMs {
    /// A hundred years, so that the end is a date.
    const MAX_SECONDS: u64 = 100 * 365 * 24 * 3600;
    UnixMs(UnixMs::now().0 + seconds.min(MAX_SECONDS) * 1000)
}

/// Returns environment variables as a command has them.
pub(super) fn env(field: &'static str, values: BTreeMap<String, String>) -> Result<Env, Invalid> {
    let mut env = Env::new();
    for (name, value) in values {
        let inserted = env.insert(name, value);
        inserted.map_err(|invalid| Invalid::new(field, invalid.rule().to_owned()))?;
    }
    Ok(env)
}

/// Returns whether a template exists without being built.
pub(super) fn is_built_in(template: &str) -> bool {
    let (name, _) = template.split_once(':').unwrap_or((template, ""));
    BUILT_IN.contains(&name)
}

/// Makes a box on an image run as root of the image, which owns the files of the image.
///
/// A box has one user. That one must be able to change the files that the build of its template made.
pub(super) fn run_as_root(spec: &mut SpecDraft) {
    spec.user = Some("root".to_owned());
    spec.read_only_rootfs = Some(false);
    spec.dirs.get_or_insert_default().push(HOME.to_owned());
    let defaults = spec.defaults.get_or_insert_default();
    let mut env = Env::new();
    // The name is a constant that follows the rules.
    let _ = env.insert("HOME", HOME);
    env.extend(std::mem::take(&mut defaults.env));
    defaults.env = env;
}

/// Returns whether the files of a template or snapshot lie on an image.
async fn is_on_image(context: &Context, item: &CatalogItem) -> Result<bool, BoxError> {
    let snapshot = match &item.content {
        ItemContent::Snapshot(files) => return Ok(files.image.is_some()),
        ItemContent::Template(template) => {
            let image = template.spec.image.as_deref();
            if image.is_some_and(|image| image != HOST_IMAGE) {
                return Ok(true);
            }
            template.spec.snapshot.clone()
        }
        _ => None,
    };
    let Some(item) = snapshot else {
        return Ok(false);
    };
    let kind = CatalogKind::Snapshot;
    let params = CatalogGetParams { kind, item };
    let found = context.runtime().item(&context.caller, params).await?;
    Ok(matches!(&found.content, ItemContent::Snapshot(files) if files.image.is_some()))
}

/// Sets the files that a box begins with: those of a snapshot, of a template, or the machine's. Returns the command
/// that says when the box is ready.
pub(super) async fn set_template(
    context: &Context,
    spec: &mut SpecDraft,
    template: &str,
) -> Result<Option<String>, ApiError> {
    let item = ItemRef::new(if template.is_empty() {
        "base"
    } else {
        template
    });
    let item = item.map_err(|invalid| Invalid::new("templateID", invalid.rule().to_owned()))?;
    for kind in [CatalogKind::Template, CatalogKind::Snapshot] {
        let params = CatalogGetParams {
            kind,
            item: item.clone(),
        };
        match context.runtime().item(&context.caller, params).await {
            Ok(found) if found.state == ItemState::Building => {
                let message = format!("snapshot {template:?} is not complete; try again later");
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
            }
            Ok(found) if found.state == ItemState::Failed => {
                let message = format!("snapshot {template:?} failed; create it again");
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
            }
            Ok(found) if !is_usable(&found) => {
                let message = format!("template {template:?} is not built: {}", status_of(&found));
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
            }
            Ok(found) => {
                let mut ready = None;
                if let ItemContent::Template(content) = &found.content {
                    let note = content.spec.note.as_ref();
                    let note = note.and_then(Note::read::<TemplateNote>);
                    ready = note.map(|note| note.ready);
                    // The directory of a request wins, and every request has one.
                    let kept = content.spec.defaults.as_ref();
                    let cwd = kept.and_then(|defaults| defaults.cwd.clone());
                    spec.defaults.get_or_insert_default().cwd = cwd;
                }
                if is_on_image(context, &found).await? {
                    run_as_root(spec);
                }
                let found = ItemRef::new(found.id.as_str())?;
                match kind {
                    CatalogKind::Template => spec.template = Some(found),
                    _ => spec.snapshot = Some(found),
                }
                return Ok(ready);
            }
            // A runtime without a catalog has only the built-in templates.
            Err(error) if matches!(error.code(), Code::NotFound | Code::Unsupported) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if is_built_in(template) {
        return Ok(None);
    }
    let message = format!("template {template:?} not found; build it, or use \"base\"");
    Err(ApiError::new(StatusCode::NOT_FOUND, message))
}
