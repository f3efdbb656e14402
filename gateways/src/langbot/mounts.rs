//! Which host paths LangBot may name.
//!
//! LangBot applies its own policy first. The gateway refuses blocked paths even if LangBot allows them.

use std::fs;
use std::path::{Component, Path, PathBuf};

use box_protocol::{BoxError, BoxMountSpec, DEFAULT_MOUNT_PATH, HostPathMode, Invalid, SpecDraft};
use box_service::blocked::is_blocked;
use box_service::blocking;
use box_service::paths::real_path;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::Installation;

/// The root of all content-addressed mounts.
const ARTIFACT_ROOT: &str = "/opt/langbot-artifacts";

/// Returns whether the mount is content-addressed and below the artifact root.
pub(super) fn is_artifact(mount: &BoxMountSpec) -> bool {
    mount.is_content_addressed() && Path::new(&mount.mount_path).starts_with(ARTIFACT_ROOT)
}

/// Refuses other mounts below the artifact root.
pub(super) fn check_artifacts(mounts: &[BoxMountSpec]) -> Result<(), Invalid> {
    let reserved = |mount: &BoxMountSpec| {
        Path::new(&mount.mount_path).starts_with(ARTIFACT_ROOT) && !is_artifact(mount)
    };
    if mounts.iter().any(reserved) {
        let rule =
            "reserved: Artifact paths require a read-only digest-addressed mount and manifest";
        return Err(Invalid::new("mount_path", rule));
    }
    Ok(())
}

/// The host paths that an installation may use.
#[derive(Debug, Clone, Default)]
pub(super) struct MountPolicy {
    /// Paths that the operator allows, even if they are blocked by default.
    pub(super) allowed: Vec<PathBuf>,
    /// Whether all other paths that are not blocked are allowed.
    pub(super) allow_unlisted: bool,
    /// The server's private paths.
    pub(super) private: Vec<PathBuf>,
}

impl MountPolicy {
    /// Returns whether this resolved path is refused.
    pub(super) fn refuses(&self, real: &Path) -> bool {
        let allowed = self.allowed.iter().any(|root| real.starts_with(root));
        is_blocked(real, &self.allowed, &self.private) || !(allowed || self.allow_unlisted)
    }
}

impl Installation {
    /// Resolves the host paths of a spec and creates a missing workspace.
    pub(super) async fn resolve_mounts(&self, draft: &mut SpecDraft) -> Result<(), BoxError> {
        let mounts = draft.extra_mounts.take().unwrap_or_default();
        if draft.host_path.is_none() && mounts.is_empty() {
            draft.extra_mounts = Some(mounts);
            return Ok(());
        }
        let host_path = draft.host_path.take();
        let create = draft.host_path_mode.unwrap_or_default() != HostPathMode::None;
        let mount_policy = self.mount_policy.clone();
        let target = draft.mount_path.clone();
        let target = target.unwrap_or_else(|| DEFAULT_MOUNT_PATH.to_owned());
        let found = blocking(move || {
            let host_path = match host_path {
                Some(path) => Some(resolve_path(
                    "host_path",
                    path.trim(),
                    &mount_policy,
                    create,
                )?),
                None => None,
            };
            let mounts = mounts
                .into_iter()
                .map(|mount| resolve_mount(mount, &mount_policy));
            let mounts = mounts.collect::<Result<Vec<_>, _>>()?;
            if let Some(workspace) = host_path.as_deref().filter(|_| create) {
                create_mount_points(Path::new(workspace), &target, &mounts)?;
            }
            Ok((host_path, mounts))
        });
        let (host_path, mounts) = found.await?;
        draft.host_path = host_path;
        draft.extra_mounts = Some(mounts);
        Ok(())
    }
}

fn resolve_mount(
    mut mount: BoxMountSpec,
    mount_policy: &MountPolicy,
) -> Result<BoxMountSpec, BoxError> {
    mount.host_path = resolve_path(
        "extra_mounts.host_path",
        &mount.host_path,
        mount_policy,
        false,
    )?;
    if let Some(manifest) = &mount.manifest_path {
        let field = "extra_mounts.manifest_path";
        mount.manifest_path = Some(resolve_path(field, manifest, mount_policy, false)?);
    }
    Ok(mount)
}

/// Creates mount points in a workspace for other mounts, as container engines do.
///
/// The mount points get the owner of the workspace.
pub(super) fn create_mount_points(
    workspace: &Path,
    target: &str,
    mounts: &[BoxMountSpec],
) -> Result<(), BoxError> {
    let invalid = |_| BoxError::from(Invalid::new("extra_mounts.mount_path", "cannot be created"));
    for mount in mounts {
        let inside = Path::new(&mount.mount_path).strip_prefix(target);
        let Ok(inside) = inside.map(Path::to_owned) else {
            continue;
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut directory = rustix::fs::open(workspace, flags, Mode::empty()).map_err(invalid)?;
        let owner = rustix::fs::fstat(&directory).map_err(invalid)?;
        for part in inside.components() {
            let Component::Normal(part) = part else {
                return Err(invalid(Errno::INVAL));
            };
            match rustix::fs::mkdirat(&directory, part, Mode::from_raw_mode(0o755)) {
                Ok(()) => {
                    let (user, group) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
                    let (user, group) = (Some(user), Some(group));
                    // An unprivileged user already owns the directories that it creates.
                    let _ = rustix::fs::chownat(
                        &directory,
                        part,
                        user,
                        group,
                        AtFlags::SYMLINK_NOFOLLOW,
                    );
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(invalid(error)),
            }
            // A process that writes to the workspace may have put a link here.
            let flags = flags | OFlags::NOFOLLOW;
            directory =
                rustix::fs::openat(&directory, part, flags, Mode::empty()).map_err(invalid)?;
        }
    }
    Ok(())
}

/// Resolves a path and checks that it may be mounted.
fn resolve_path(
    field: &'static str,
    path: &str,
    mount_policy: &MountPolicy,
    create: bool,
) -> Result<String, BoxError> {
    let blocked = || BoxError::validation(format!("{field} {path} is blocked for security"));
    let invalid = |rule: &'static str| BoxError::from(Invalid::new(field, rule));
    let resolve = || real_path(Path::new(path)).map_err(|_| invalid("cannot be resolved"));
    let mut real = resolve()?;
    if mount_policy.refuses(&real) {
        return Err(blocked());
    }
    if create && !real.is_dir() {
        fs::create_dir_all(&real).map_err(|_| invalid("not a directory and cannot be created"))?;
        // Another process may have put a link here since the check.
        real = resolve()?;
        if mount_policy.refuses(&real) {
            return Err(blocked());
        }
    }
    real.into_os_string()
        .into_string()
        .map_err(|_| invalid("not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn any_path() -> MountPolicy {
        MountPolicy {
            allow_unlisted: true,
            ..MountPolicy::default()
        }
    }

    fn text(path: &Path) -> &str {
        path.to_str().unwrap()
    }

    #[test]
    fn artifact_mounts_need_digest_manifest_and_read_only_mode() {
        let hex = "0123456789abcdef".repeat(4);
        let digest = format!("sha256:{hex}");
        let good = BoxMountSpec::content_addressed("/c", ARTIFACT_ROOT, digest, "/m.json").unwrap();
        assert!(is_artifact(&good));
        check_artifacts(std::slice::from_ref(&good)).unwrap();
        let mut writable = good.clone();
        writable.mode = HostPathMode::Rw;
        let mut unknown = good.clone();
        unknown.content_digest = None;
        let mut without_manifest = good.clone();
        without_manifest.manifest_path = None;
        let mut elsewhere = good;
        elsewhere.mount_path = format!("{ARTIFACT_ROOT}/other");
        for bad in [writable, unknown, without_manifest, elsewhere] {
            let refused = check_artifacts(&[bad]).unwrap_err().to_string();
            assert!(
                refused.contains("Artifact paths require a read-only"),
                "{refused}"
            );
        }
        let beside = BoxMountSpec::new("/c", "/opt/langbot-artifacts2", HostPathMode::Rw);
        check_artifacts(&[beside.unwrap()]).unwrap();
    }

    #[test]
    fn system_directories_are_blocked() {
        for path in [
            "/", "/etc", "/etc/ssh", "/proc", "/sys", "/dev", "/root", "/boot", "/run", "/var/run",
        ] {
            let refused = resolve_path("host_path", path, &any_path(), true).unwrap_err();
            assert_eq!(
                refused.message(),
                format!("host_path {path} is blocked for security")
            );
        }
    }

    #[test]
    fn a_link_to_a_blocked_path_is_blocked() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink("/etc", &link).unwrap();
        let refused = resolve_path("host_path", text(&link), &any_path(), true).unwrap_err();
        assert!(refused.message().ends_with("is blocked for security"));
        let deeper = link.join("new/directory");
        assert!(resolve_path("host_path", text(&deeper), &any_path(), true).is_err());
        assert!(!deeper.exists());
    }

    #[test]
    fn mount_points_are_created_inside_the_workspace_only() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = dir.path().join("workspace");
        fs::create_dir(&workspace).unwrap();
        let mount_at = |path: &str| BoxMountSpec::new("/srv", path, HostPathMode::Ro).unwrap();
        create_mount_points(
            &workspace,
            "/workspace",
            &[mount_at("/workspace/.skills/a"), mount_at("/mnt/b")],
        )
        .unwrap();
        assert!(workspace.join(".skills/a").is_dir() && !workspace.join("b").exists());
        symlink(dir.path(), workspace.join("link")).unwrap();
        let refused =
            create_mount_points(&workspace, "/workspace", &[mount_at("/workspace/link/out")]);
        assert!(refused.is_err() && !dir.path().join("out").exists());
    }

    #[test]
    fn a_workspace_is_created_and_links_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        let link = dir.path().join("link");
        symlink(&real, &link).unwrap();
        let requested = link.join("tenants/ws-1");
        let found = resolve_path("host_path", text(&requested), &any_path(), true).unwrap();
        assert_eq!(Path::new(&found), real.join("tenants/ws-1"));
        assert!(Path::new(&found).is_dir());
        let missing = resolve_path(
            "extra_mounts.host_path",
            text(&dir.path().join("no")),
            &any_path(),
            false,
        );
        assert!(!Path::new(&missing.unwrap()).exists());
    }
}
