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

use super::Host;

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
            "is reserved: Artifact paths require a read-only digest-addressed mount and manifest";
        return Err(Invalid::new("mount_path", rule));
    }
    Ok(())
}

/// The host paths that an installation may use.
#[derive(Debug, Clone, Default)]
pub(super) struct Places {
    /// Paths that the operator allows, even if they are blocked by default.
    pub(super) opened: Vec<PathBuf>,
    /// Whether all other paths that are not blocked are allowed.
    pub(super) others: bool,
    /// The server's private paths.
    pub(super) private: Vec<PathBuf>,
}

impl Places {
    /// Returns whether this resolved path is refused.
    pub(super) fn are_closed_to(&self, real: &Path) -> bool {
        let opened = self.opened.iter().any(|root| real.starts_with(root));
        is_blocked(real, &self.opened, &self.private) || !(opened || self.others)
    }
}

impl Host {
    /// Resolves the host paths of a spec and creates a missing workspace.
    pub(super) async fn open_mounts(&self, draft: &mut SpecDraft) -> Result<(), BoxError> {
        let mounts = draft.extra_mounts.take().unwrap_or_default();
        if draft.host_path.is_none() && mounts.is_empty() {
            draft.extra_mounts = Some(mounts);
            return Ok(());
        }
        let host_path = draft.host_path.take();
        let make = draft.host_path_mode.unwrap_or_default() != HostPathMode::None;
        let places = self.places.clone();
        let place = draft.mount_path.clone();
        let place = place.unwrap_or_else(|| DEFAULT_MOUNT_PATH.to_owned());
        let found = blocking(move || {
            let host_path = match host_path {
                Some(path) => Some(opened_path("host_path", path.trim(), &places, make)?),
                None => None,
            };
            let mounts = mounts.into_iter().map(|mount| opened_mount(mount, &places));
            let mounts = mounts.collect::<Result<Vec<_>, _>>()?;
            if let Some(workspace) = host_path.as_deref().filter(|_| make) {
                make_points(Path::new(workspace), &place, &mounts)?;
            }
            Ok((host_path, mounts))
        });
        let (host_path, mounts) = found.await?;
        draft.host_path = host_path;
        draft.extra_mounts = Some(mounts);
        Ok(())
    }
}

fn opened_mount(mut mount: BoxMountSpec, places: &Places) -> Result<BoxMountSpec, BoxError> {
    mount.host_path = opened_path("extra_mounts.host_path", &mount.host_path, places, false)?;
    if let Some(manifest) = &mount.manifest_path {
        let field = "extra_mounts.manifest_path";
        mount.manifest_path = Some(opened_path(field, manifest, places, false)?);
    }
    Ok(mount)
}

/// Creates mount points in a workspace for other mounts, as container engines do.
///
/// The mount points get the owner of the workspace.
pub(super) fn make_points(
    workspace: &Path,
    place: &str,
    mounts: &[BoxMountSpec],
) -> Result<(), BoxError> {
    let unusable = |_| BoxError::from(Invalid::new("extra_mounts.mount_path", "cannot be made"));
    for mount in mounts {
        let inside = Path::new(&mount.mount_path).strip_prefix(place);
        let Ok(inside) = inside.map(Path::to_owned) else {
            continue;
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = rustix::fs::open(workspace, flags, Mode::empty()).map_err(unusable)?;
        let owner = rustix::fs::fstat(&at).map_err(unusable)?;
        for part in inside.components() {
            let Component::Normal(part) = part else {
                return Err(unusable(Errno::INVAL));
            };
            match rustix::fs::mkdirat(&at, part, Mode::from_raw_mode(0o755)) {
                Ok(()) => {
                    let (user, group) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
                    let (user, group) = (Some(user), Some(group));
                    // An unprivileged user already owns the directories that it creates.
                    let _ = rustix::fs::chownat(&at, part, user, group, AtFlags::SYMLINK_NOFOLLOW);
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(unusable(error)),
            }
            // A process that writes to the workspace may have put a link here.
            let flags = flags | OFlags::NOFOLLOW;
            at = rustix::fs::openat(&at, part, flags, Mode::empty()).map_err(unusable)?;
        }
    }
    Ok(())
}

/// Resolves a path and checks that it may be mounted.
fn opened_path(
    field: &'static str,
    path: &str,
    places: &Places,
    make: bool,
) -> Result<String, BoxError> {
    let blocked = || BoxError::validation(format!("{field} {path} is blocked for security"));
    let unusable = |rule: &'static str| BoxError::from(Invalid::new(field, rule));
    let look = || real_path(Path::new(path)).map_err(|_| unusable("cannot be looked up"));
    let mut real = look()?;
    if places.are_closed_to(&real) {
        return Err(blocked());
    }
    if make && !real.is_dir() {
        fs::create_dir_all(&real)
            .map_err(|_| unusable("is no directory and cannot be made one"))?;
        // Another process may have put a link here since the check.
        real = look()?;
        if places.are_closed_to(&real) {
            return Err(blocked());
        }
    }
    real.into_os_string()
        .into_string()
        .map_err(|_| unusable("is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn everywhere() -> Places {
        Places {
            others: true,
            ..Places::default()
        }
    }

    fn text(path: &Path) -> &str {
        path.to_str().unwrap()
    }

    #[test]
    fn artifact_paths_need_digest_manifest_and_read_only() {
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
    fn the_root_and_what_speaks_for_the_machine_are_blocked() {
        for path in [
            "/", "/etc", "/etc/ssh", "/proc", "/sys", "/dev", "/root", "/boot", "/run", "/var/run",
        ] {
            let refused = opened_path("host_path", path, &everywhere(), true).unwrap_err();
            assert_eq!(
                refused.message(),
                format!("host_path {path} is blocked for security")
            );
        }
    }

    #[test]
    fn a_link_to_such_a_place_is_blocked_too() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        symlink("/etc", &link).unwrap();
        let refused = opened_path("host_path", text(&link), &everywhere(), true).unwrap_err();
        assert!(refused.message().ends_with("is blocked for security"));
        let deeper = link.join("new/directory");
        assert!(opened_path("host_path", text(&deeper), &everywhere(), true).is_err());
        assert!(!deeper.exists());
    }

    #[test]
    fn places_of_other_mounts_are_made_in_a_workspace_and_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let workspace = place.path().join("workspace");
        fs::create_dir(&workspace).unwrap();
        let at = |path: &str| BoxMountSpec::new("/srv", path, HostPathMode::Ro).unwrap();
        make_points(
            &workspace,
            "/workspace",
            &[at("/workspace/.skills/a"), at("/mnt/b")],
        )
        .unwrap();
        assert!(workspace.join(".skills/a").is_dir() && !workspace.join("b").exists());
        symlink(place.path(), workspace.join("link")).unwrap();
        let refused = make_points(&workspace, "/workspace", &[at("/workspace/link/out")]);
        assert!(refused.is_err() && !place.path().join("out").exists());
    }

    #[test]
    fn a_workspace_is_made_and_links_are_followed() {
        let place = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(place.path()).unwrap();
        let link = place.path().join("link");
        symlink(&real, &link).unwrap();
        let asked = link.join("tenants/ws-1");
        let found = opened_path("host_path", text(&asked), &everywhere(), true).unwrap();
        assert_eq!(Path::new(&found), real.join("tenants/ws-1"));
        assert!(Path::new(&found).is_dir());
        let missing = opened_path(
            "extra_mounts.host_path",
            text(&place.path().join("no")),
            &everywhere(),
            false,
        );
        assert!(!Path::new(&missing.unwrap()).exists());
    }
}
