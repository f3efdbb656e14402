//! Checks of specs where grants are required, and the location of workspaces.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use box_protocol::{BoxError, BoxMountSpec, HostPathMode, Network, SpecDraft};

use crate::langbot::Installation;
use crate::langbot::config::Config;
use crate::langbot::context::Placement;
use crate::langbot::errors::{admission, readiness};
use crate::langbot::exec::IMAGE;
use crate::langbot::mounts::is_artifact;
use box_service::blocking;

/// The maximum number of mounts besides the workspace.
const MAX_MOUNTS: usize = 256;

/// The path of the workspace inside a box.
const WORKSPACE: &str = box_protocol::DEFAULT_MOUNT_PATH;

impl Installation {
    /// Applies the policy to a spec and checks the fields that a caller may still set.
    pub(in crate::langbot) async fn admit_spec(
        &self,
        placement: &Placement,
        draft: &mut SpecDraft,
    ) -> Result<(), BoxError> {
        let Some(policy) = self.admission.required() else {
            return Ok(());
        };
        if draft.network == Some(Network::On) {
            return Err(admission("Managed sandbox network access is disabled"));
        }
        if draft.mount_path.as_deref().unwrap_or(WORKSPACE) != WORKSPACE {
            return Err(admission("Managed sandbox mount_path is runtime-owned"));
        }
        let workdir = draft.workdir.as_deref().unwrap_or(WORKSPACE);
        if !Path::new(workdir).starts_with(WORKSPACE) {
            return Err(admission(
                "Managed sandbox workdir must stay under /workspace",
            ));
        }
        let config = self.config();
        let namespace = placement.namespace.clone();
        let request = (
            draft.host_path.take(),
            draft.extra_mounts.take().unwrap_or_default(),
        );
        let found = blocking(move || {
            let root = managed_root(&config)?;
            let cannot_create = |_| readiness("Managed sandbox workspace cannot be created");
            std::fs::create_dir_all(root.join("tenants")).map_err(cannot_create)?;
            let tenants = tenants(&root)?;
            let workspace = real(&tenants.join(&namespace));
            if !workspace.starts_with(&tenants) {
                return Err(admission(
                    "Managed sandbox Workspace path escapes its tenant directory",
                ));
            }
            std::fs::create_dir_all(&workspace).map_err(cannot_create)?;
            if request
                .0
                .is_some_and(|path| real(Path::new(path.trim())) != workspace)
            {
                return Err(admission("Managed sandbox host_path is runtime-owned"));
            }
            check_mounts(&request.1, &config.allowed_roots())?;
            Ok((workspace, request.1))
        });
        let (workspace, mounts) = found.await?;
        // A workspace has exactly one box, regardless of the requested name.
        draft.box_id = Some(policy.logical_session_id.clone());
        draft.host_path = Some(workspace.to_string_lossy().into_owned());
        draft.extra_mounts = Some(mounts);
        draft.image = Some(IMAGE.to_owned());
        draft.host_path_mode = Some(HostPathMode::Rw);
        draft.persistent = Some(true);
        draft.timeout_sec = Some(draft.timeout_sec.unwrap_or(30).min(policy.max_timeout_sec));
        draft.cpus = Some(policy.cpus);
        draft.memory_mb = Some(policy.memory_mb);
        draft.pids_limit = Some(policy.pids_limit);
        draft.read_only_rootfs = Some(policy.read_only_rootfs);
        draft.workspace_quota_mb = Some(policy.workspace_quota_mb);
        Ok(())
    }
}

/// Returns the root of all tenants' workspaces.
pub(in crate::langbot) fn managed_root(config: &Config) -> Result<PathBuf, BoxError> {
    let Some(root) = config.default_workspace() else {
        return Err(readiness(
            "Managed sandbox admission requires box.local.default_workspace",
        ));
    };
    if !config
        .allowed_roots()
        .iter()
        .any(|allowed| root.starts_with(allowed))
    {
        return Err(readiness(
            "Managed sandbox workspace is outside box.local.allowed_mount_roots",
        ));
    }
    if !root.is_dir() {
        return Err(readiness(
            "Managed sandbox workspace path is not a directory",
        ));
    }
    let access =
        rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    if rustix::fs::access(&root, access).is_err() {
        return Err(readiness("Managed sandbox workspace path is not writable"));
    }
    Ok(root)
}

/// Returns the directory of tenants below the workspaces; refuses a symbolic link.
pub(in crate::langbot) fn tenants(root: &Path) -> Result<PathBuf, BoxError> {
    let tenants = real(&root.join("tenants"));
    if tenants.starts_with(root) {
        return Ok(tenants);
    }
    Err(admission(
        "Managed sandbox tenant directory escapes the configured workspace",
    ))
}

fn real(path: &Path) -> PathBuf {
    box_service::paths::real_path(path).unwrap_or_else(|_| path.to_owned())
}

fn check_mounts(mounts: &[BoxMountSpec], roots: &[PathBuf]) -> Result<(), BoxError> {
    let refusal = |reason: &str| Err(admission(reason));
    if mounts.len() > MAX_MOUNTS {
        return refusal("Managed sandbox accepts at most 256 read-only mounts");
    }
    if !mounts.is_empty() && roots.is_empty() {
        return refusal("Managed sandbox read-only mounts require allowed_mount_roots");
    }
    let mut targets = HashSet::new();
    for mount in mounts {
        if mount.mode != HostPathMode::Ro {
            return refusal("Managed sandbox additional mounts must be read-only");
        }
        let real = std::fs::canonicalize(&mount.host_path);
        let Some(real) = real.ok().filter(|real| real.is_dir()) else {
            return refusal("Managed sandbox read-only mount source is unavailable");
        };
        if !roots.iter().any(|root| real.starts_with(root)) {
            return refusal(
                "Managed sandbox read-only mount source is outside allowed_mount_roots",
            );
        }
        if let Some(manifest) = &mount.manifest_path {
            if mount.content_digest.is_none() {
                return refusal("Managed sandbox mount manifests require content_digest");
            }
            let real = std::fs::canonicalize(manifest);
            let Some(real) = real.ok().filter(|real| real.is_file()) else {
                return refusal("Managed sandbox read-only mount manifest is unavailable");
            };
            if !roots.iter().any(|root| real.starts_with(root)) {
                return refusal(
                    "Managed sandbox read-only mount manifest is outside allowed_mount_roots",
                );
            }
        }
        let inside = mount
            .mount_path
            .strip_prefix(WORKSPACE)
            .is_some_and(|rest| rest.starts_with('/'));
        if !is_artifact(mount) && !inside {
            return refusal("Managed sandbox additional mount targets must stay under /workspace");
        }
        if !targets.insert(&mount.mount_path) {
            return refusal("Managed sandbox additional mount targets must be unique");
        }
    }
    Ok(())
}
