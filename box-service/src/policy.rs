//! Decision about a request: the resulting spec, or a refusal.
//!
//! # Steps
//! 1. The service fills in unset fields from the template of the request, if it names one.
//! 2. The service collects the host paths of the request ([`host_paths`]) and resolves them
//!    ([`paths`](crate::paths)). For a strict profile it also asks the runtime for missing protections.
//! 3. [`decide`] refuses a strict profile on a machine that lacks a protection.
//! 4. The profile fills in unset fields, overwrites locked ones and limits the times. Each change of a requested
//!    value becomes an [`Adjusted`].
//! 5. The rules of a spec apply.
//! 6. Every host path must resolve to a place under an allowed root that is neither blocked nor private to the
//!    server. The resulting spec contains the resolved paths.
//!
//! The decision is pure: all values that need a lookup come in as [`PolicyInputs`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use box_protocol::error::Detail;
use box_protocol::{
    Adjusted, BoxError, BoxMountSpec, BoxProfile, BoxSpec, GatewayName, HostPathMode, Invalid,
    Lockable, SpecDraft,
};

use crate::blocked;

/// Rules for requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Defaults, locks and the maximum timeout.
    pub profile: BoxProfile,
    /// Directory that contains everything shared, if configured.
    pub shared_host_root: Option<PathBuf>,
    /// Resolved paths below which host paths may be mounted.
    pub allowed_host_mount_roots: Vec<PathBuf>,
    /// Workspace of a box that names none.
    pub default_host_workspace: Option<PathBuf>,
    /// Whether host paths mean the same here and at the runtime.
    pub shared_filesystem: bool,
    /// Configuration table of the caller, if it has one: `policy.tokens.ann`.
    pub table: Option<String>,
    /// Whether the caller may mount all directories that this process can read.
    /// This applies to the user of the process. Blocked paths stay excluded.
    pub owner_mounts: bool,
    /// Resolved private paths of the server, which no box may see.
    pub private: Vec<PathBuf>,
}

/// Values looked up for one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyInputs {
    /// Host paths of the request as written, and their targets.
    pub host_paths: BTreeMap<String, HostPath>,
    /// Protections that the machine of the runtime does not provide.
    pub missing: Vec<String>,
}

/// Target of a host path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPath {
    /// Resolved path; `None` if it cannot be determined.
    pub real: Option<PathBuf>,
    /// Kind of the file.
    pub kind: PathKind,
    /// Whether this process can read it.
    pub readable: bool,
}

/// Kind of the file at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// Another kind, such as a socket or a device.
    Other,
    /// No file exists.
    Missing,
    /// The path is on another machine.
    Unknown,
}

/// An accepted request.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The spec to send to the runtime.
    pub spec: BoxSpec,
    /// Settings of the caller that the profile locked or limited.
    pub adjusted: Vec<Adjusted>,
}

/// Returns the host paths that [`decide`] needs for this request.
pub fn host_paths(policy: &Policy, draft: &SpecDraft) -> Vec<String> {
    let profile = &policy.profile;
    let mode = match draft.host_path_mode {
        Some(requested) if !profile.locks(Lockable::HostPathMode) => requested,
        _ => profile.host_path_mode,
    };
    let mut paths = Vec::new();
    if mode != HostPathMode::None {
        paths.extend(workspace(policy, draft));
    }
    paths.extend(mount_paths(draft.extra_mounts.iter().flatten()));
    paths
}

/// Returns the host paths of mounts.
pub fn mount_paths<'a>(
    mounts: impl IntoIterator<Item = &'a BoxMountSpec>,
) -> impl Iterator<Item = String> {
    mounts
        .into_iter()
        .filter(|mount| mount.mode != HostPathMode::None)
        .flat_map(|mount| [Some(mount.host_path.clone()), mount.manifest_path.clone()])
        .flatten()
}

/// Returns the workspace of this request, trimmed as in the spec.
fn workspace(policy: &Policy, draft: &SpecDraft) -> Option<String> {
    let requested = draft.host_path.as_deref().map(str::trim);
    match requested {
        Some(path) if !path.is_empty() => Some(path.to_owned()),
        _ => policy
            .default_host_workspace
            .as_deref()
            .and_then(Path::to_str)
            .map(str::to_owned),
    }
}

/// Decides about a request.
///
/// It fills in the profile, overwrites locked fields, limits the timeout and applies the rules of a spec. It checks
/// every host path by its resolved target, and the resulting spec contains resolved paths.
pub fn decide(
    policy: &Policy,
    mut draft: SpecDraft,
    inputs: &PolicyInputs,
) -> Result<Decision, BoxError> {
    let profile = &policy.profile;
    if profile.strict && !inputs.missing.is_empty() {
        return Err(BoxError::unavailable(format!(
            "profile {} requires protections that this machine does not provide: {}",
            profile.name,
            inputs.missing.join(", ")
        ))
        .with_detail(&Detail::lasting()));
    }
    let has_snapshot = draft.snapshot.is_some();
    if has_snapshot && profile.locks(Lockable::Image) {
        let rule = "the profile locks the image; omit it";
        return Err(Invalid::new("snapshot", rule).into());
    }
    let asked_image = draft.image.clone();
    let mut adjusted = profile.apply(&mut draft);
    if has_snapshot {
        // A snapshot has its own image, so the image of the profile does not apply.
        draft.image = asked_image;
    }
    if let Some(requested) = draft.timeout_sec {
        let granted = requested.min(profile.max_timeout_sec);
        if granted != requested {
            adjusted.push(Adjusted::new("timeout_sec", &requested, &granted));
        }
        draft.timeout_sec = Some(granted);
    }
    if draft.host_path_mode != Some(HostPathMode::None)
        && let Some(path) = workspace(policy, &draft)
    {
        draft.host_path = Some(path);
    }
    let mut spec = draft.build()?;
    if let Some(prepare) = &mut spec.prepare
        && profile.max_command_sec > 0
        && prepare.timeout_sec > profile.max_command_sec
    {
        let (asked, given) = (prepare.timeout_sec, profile.max_command_sec);
        adjusted.push(Adjusted::new("prepare.timeout_sec", &asked, &given));
        prepare.timeout_sec = given;
    }
    if spec.mounts_host_path()
        && let Some(path) = &spec.host_path
    {
        let real = allowed(policy, inputs, "host_path", path, PathKind::Directory)?;
        spec.host_path = Some(real);
    }
    adjusted.extend(decide_mounts(policy, &mut spec.extra_mounts, inputs)?);
    Ok(Decision { spec, adjusted })
}

/// Decides the timeout of a command or of a run in a shell.
/// This is the requested time within the limits of the profile.
pub fn decide_timeout(
    policy: &Policy,
    requested_ms: Option<u64>,
) -> (Option<u64>, Option<Adjusted>) {
    let profile = &policy.profile;
    let max = (profile.max_command_sec > 0).then(|| profile.max_command_sec.saturating_mul(1000));
    let granted = if profile.locks(Lockable::TimeoutSec) {
        Some(profile.timeout_sec.saturating_mul(1000))
    } else {
        requested_ms.into_iter().chain(max).min()
    };
    let changed = requested_ms
        .zip(granted)
        .filter(|(requested, granted)| requested != granted);
    let adjusted =
        changed.map(|(requested, granted)| Adjusted::new("timeout_ms", &requested, &granted));
    (granted, adjusted)
}

/// Refuses a box in the name of a gateway.
///
/// A gateway looks for its boxes among those of all callers, so only the gateway itself may name it.
pub(crate) fn check_native(spec: &BoxSpec) -> Result<(), BoxError> {
    match &spec.gateway {
        Some(gateway) if *gateway != GatewayName::NATIVE => {
            Err(Invalid::new("gateway", "set by the server; omit it").into())
        }
        _ => Ok(()),
    }
}

/// Decides about a new network policy for an existing box.
pub fn decide_network(policy: &Policy) -> Result<(), BoxError> {
    if policy.profile.locks(Lockable::NetworkPolicy) {
        return Err(Invalid::new("network_policy", "locked by the profile").into());
    }
    Ok(())
}

/// Decides whether a caller may write to the host directory of a workspace.
///
/// An overlay needs no right to write, but an apply does.
pub fn decide_apply(
    policy: &Policy,
    host_path: &str,
    inputs: &PolicyInputs,
) -> Result<(), BoxError> {
    let profile = &policy.profile;
    if profile.locks(Lockable::HostPathMode) && profile.host_path_mode != HostPathMode::Rw {
        return Err(BoxError::denied(format!(
            "host_path_mode: the profile {} locks it to {}, so this caller may not apply changes; ask the operator",
            profile.name,
            profile.host_path_mode.as_str()
        ))
        .with_detail(&Detail::of_field("host_path_mode")));
    }
    allowed(policy, inputs, "host_path", host_path, PathKind::Directory).map(drop)
}

/// Decides about additional mounts and returns the adjustments.
/// A lock on the mode of the workspace also applies to them.
pub fn decide_mounts(
    policy: &Policy,
    mounts: &mut [BoxMountSpec],
    inputs: &PolicyInputs,
) -> Result<Vec<Adjusted>, BoxError> {
    let profile = &policy.profile;
    let mut adjusted = Vec::new();
    for mount in mounts {
        if profile.locks(Lockable::HostPathMode) {
            let granted = narrower(mount.mode, profile.host_path_mode);
            if granted != mount.mode {
                adjusted.push(Adjusted::new("extra_mounts.mode", &mount.mode, &granted));
            }
            mount.mode = granted;
        }
        if mount.mode == HostPathMode::None {
            continue;
        }
        mount.host_path = allowed(
            policy,
            inputs,
            "host_path",
            &mount.host_path,
            PathKind::Directory,
        )?;
        if let Some(manifest) = &mount.manifest_path {
            let real = allowed(policy, inputs, "manifest_path", manifest, PathKind::File)?;
            mount.manifest_path = Some(real);
        }
    }
    Ok(adjusted)
}

fn narrower(one: HostPathMode, other: HostPathMode) -> HostPathMode {
    use HostPathMode::{None, Overlay, Ro, Rw};
    match (one, other) {
        (None, _) | (_, None) => None,
        // Other mounts than the workspace have no overlay, so the host stays as it is.
        (Ro | Overlay, _) | (_, Ro | Overlay) => Ro,
        (Rw, Rw) => Rw,
    }
}

/// Returns the resolved path if it may be mounted.
/// A path outside the roots gets the same refusal whether it exists or not.
fn allowed(
    policy: &Policy,
    inputs: &PolicyInputs,
    field: &'static str,
    path: &str,
    expected: PathKind,
) -> Result<String, BoxError> {
    let refused = |rule: &'static str| BoxError::from(Invalid::new(field, rule));
    let roots = &policy.allowed_host_mount_roots;
    if roots.is_empty() && !policy.owner_mounts {
        let rule = "mounting is disabled, because allowed_host_mount_roots is empty";
        return Err(refusal_with_remedy(policy, field, rule));
    }
    let found = inputs
        .host_paths
        .get(path)
        .ok_or_else(|| BoxError::internal(format!("{field}: not resolved")))?;
    let outside = || {
        let rule = "outside allowed_host_mount_roots";
        refusal_with_remedy(policy, field, rule)
    };
    let real = found.real.as_deref().ok_or_else(outside)?;
    let is_under_root = roots.iter().any(|root| real.starts_with(root));
    if !is_under_root && !policy.owner_mounts {
        return Err(outside());
    }
    let in_owner_home = policy.owner_mounts && blocked::is_in_home_of_root(real);
    if blocked::is_blocked(real, roots, &[]) && !in_owner_home {
        return Err(refused(
            "blocked for security; below /etc, /root, /boot and /run, allowed_host_mount_roots must list the directory itself",
        ));
    }
    if blocked::reaches_private(real, roots, &policy.private) {
        let problem = "the directory contains private files of the server";
        let remedy = "name a directory without the server's state directory, token file and key";
        let error = BoxError::validation(format!("{field}: {problem}; {remedy}"));
        return Err(error.with_detail(&Detail::of_field(field)));
    }
    if !is_under_root && !found.readable {
        return Err(refused("must be readable by the user of the server"));
    }
    if found.kind != expected && found.kind != PathKind::Unknown {
        return Err(refused(match expected {
            PathKind::File => "must point to an existing file on the host",
            _ => "must point to an existing directory on the host",
        }));
    }
    real.to_str()
        .map(str::to_owned)
        .ok_or_else(|| refused("must resolve to a UTF-8 path"))
}

/// Creates a refusal that names the setting with which the operator allows the path.
fn refusal_with_remedy(policy: &Policy, field: &'static str, rule: &str) -> BoxError {
    let remedy = match &policy.table {
        Some(table) => format!("add it to {table}.allowed_host_mount_roots"),
        None => "allow it with boxd serve --allow-mount DIR".to_owned(),
    };
    Invalid::new(field, format!("{rule}; {remedy}")).into()
}

#[cfg(test)]
mod tests;
