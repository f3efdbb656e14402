//! Decision about a request: the resulting spec, or a refusal.
//!
//! It is pure: all values that need a lookup come in as [`Facts`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use box_protocol::error::Detail;
use box_protocol::{
    Adjusted, BoxError, BoxMountSpec, BoxProfile, BoxSpec, HostPathMode, Invalid, Lockable,
    SpecDraft,
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
pub struct Facts {
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
        Some(asked) if !profile.locks(Lockable::HostPathMode) => asked,
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
    let asked = draft.host_path.as_deref().map(str::trim);
    match asked {
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
pub fn decide(policy: &Policy, mut draft: SpecDraft, facts: &Facts) -> Result<Decision, BoxError> {
    let profile = &policy.profile;
    if profile.strict && !facts.missing.is_empty() {
        return Err(BoxError::unavailable(format!(
            "profile {} needs what this machine does not grant: {}",
            profile.name,
            facts.missing.join(", ")
        ))
        .with_detail(&Detail::lasting()));
    }
    let mut adjusted = profile.apply(&mut draft);
    if let Some(asked) = draft.timeout_sec {
        let given = asked.min(profile.max_timeout_sec);
        if given != asked {
            adjusted.push(Adjusted::new("timeout_sec", &asked, &given));
        }
        draft.timeout_sec = Some(given);
    }
    if draft.host_path_mode != Some(HostPathMode::None)
        && let Some(path) = workspace(policy, &draft)
    {
        draft.host_path = Some(path);
    }
    let mut spec = draft.build()?;
    if spec.mounts_host_path()
        && let Some(path) = &spec.host_path
    {
        let real = allowed(policy, facts, "host_path", path, PathKind::Directory)?;
        spec.host_path = Some(real);
    }
    adjusted.extend(decide_mounts(policy, &mut spec.extra_mounts, facts)?);
    Ok(Decision { spec, adjusted })
}

/// Decides the timeout of a command or of a run in a shell.
/// This is the requested time within the limits of the profile.
pub fn decide_time(policy: &Policy, asked_ms: Option<u64>) -> (Option<u64>, Option<Adjusted>) {
    let profile = &policy.profile;
    let most = (profile.max_command_sec > 0).then(|| profile.max_command_sec.saturating_mul(1000));
    let given = if profile.locks(Lockable::TimeoutSec) {
        Some(profile.timeout_sec.saturating_mul(1000))
    } else {
        asked_ms.into_iter().chain(most).min()
    };
    let adjusted = asked_ms.zip(given).filter(|(asked, given)| asked != given);
    let adjusted = adjusted.map(|(asked, given)| Adjusted::new("timeout_ms", &asked, &given));
    (given, adjusted)
}

/// Decides about a new network policy for an existing box.
pub fn decide_network(policy: &Policy) -> Result<(), BoxError> {
    if policy.profile.locks(Lockable::NetworkPolicy) {
        return Err(Invalid::new("network_policy", "is locked by the profile").into());
    }
    Ok(())
}

/// Decides about additional mounts and returns the adjustments.
/// A lock on the mode of the workspace also applies to them.
pub fn decide_mounts(
    policy: &Policy,
    mounts: &mut [BoxMountSpec],
    facts: &Facts,
) -> Result<Vec<Adjusted>, BoxError> {
    let profile = &policy.profile;
    let mut adjusted = Vec::new();
    for mount in mounts {
        if profile.locks(Lockable::HostPathMode) {
            let given = narrower(mount.mode, profile.host_path_mode);
            if given != mount.mode {
                adjusted.push(Adjusted::new("extra_mounts.mode", &mount.mode, &given));
            }
            mount.mode = given;
        }
        if mount.mode == HostPathMode::None {
            continue;
        }
        mount.host_path = allowed(
            policy,
            facts,
            "host_path",
            &mount.host_path,
            PathKind::Directory,
        )?;
        if let Some(manifest) = &mount.manifest_path {
            let real = allowed(policy, facts, "manifest_path", manifest, PathKind::File)?;
            mount.manifest_path = Some(real);
        }
    }
    Ok(adjusted)
}

fn narrower(one: HostPathMode, other: HostPathMode) -> HostPathMode {
    use HostPathMode::{None, Ro, Rw};
    match (one, other) {
        (None, _) | (_, None) => None,
        (Ro, _) | (_, Ro) => Ro,
        (Rw, Rw) => Rw,
    }
}

/// Returns the resolved path if it may be mounted.
/// A path outside the roots gets the same refusal whether it exists or not.
fn allowed(
    policy: &Policy,
    facts: &Facts,
    field: &'static str,
    path: &str,
    wanted: PathKind,
) -> Result<String, BoxError> {
    let refused = |rule: &'static str| BoxError::from(Invalid::new(field, rule));
    let roots = &policy.allowed_host_mount_roots;
    if roots.is_empty() && !policy.owner_mounts {
        let rule = "mounting is disabled because no allowed_host_mount_roots are configured";
        return Err(refused_with_remedy(policy, field, rule, "one"));
    }
    let found = facts
        .host_paths
        .get(path)
        .ok_or_else(|| BoxError::internal(format!("{field} was not looked up")))?;
    let outside = || {
        let rule = "is outside allowed_host_mount_roots";
        refused_with_remedy(policy, field, rule, "one more")
    };
    let real = found.real.as_deref().ok_or_else(outside)?;
    let named = roots.iter().any(|root| real.starts_with(root));
    if !named && !policy.owner_mounts {
        return Err(outside());
    }
    let of_owner = policy.owner_mounts && blocked::is_in_home_of_root(real);
    if blocked::is_blocked(real, roots, &[]) && !of_owner {
        return Err(refused(
            "is blocked for security; allowed_host_mount_roots opens it if it names it",
        ));
    }
    if blocked::reaches_private(real, roots, &policy.private) {
        let problem = "the directory holds files of the server, or is one of them";
        let remedy = "name a directory without its state directory, token file and key";
        let error = BoxError::validation(format!("{field}: {problem}; {remedy}"));
        return Err(error.with_detail(&Detail::of_field(field)));
    }
    if !named && !found.readable {
        return Err(refused("must be readable by the user of the server"));
    }
    if found.kind != wanted && found.kind != PathKind::Unknown {
        return Err(refused(match wanted {
            PathKind::File => "must point to an existing file on the host",
            _ => "must point to an existing directory on the host",
        }));
    }
    real.to_str()
        .map(str::to_owned)
        .ok_or_else(|| refused("must lead to a path in UTF-8"))
}

/// Creates a refusal that names the setting with which the operator allows `more`.
fn refused_with_remedy(policy: &Policy, field: &'static str, rule: &str, more: &str) -> BoxError {
    let remedy = match &policy.table {
        Some(table) => format!("{table}.allowed_host_mount_roots allows {more}"),
        None => format!("boxd serve --allow-mount DIR allows {more}"),
    };
    Invalid::new(field, format!("{rule}; {remedy}")).into()
}

#[cfg(test)]
mod tests;
