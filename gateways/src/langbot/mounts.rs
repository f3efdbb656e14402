//! Which host paths LangBot may name. LangBot has decided by then; what is never mounted is not, whatever it decided.

use std::fs;
use std::path::{Path, PathBuf};

use box_protocol::{BoxError, BoxMountSpec, HostPathMode, Invalid, SpecDraft};
use box_service::blocked::is_blocked;
use box_service::paths::real_path;

use super::Host;

/// The places of this machine that an installation may use.
#[derive(Debug, Clone, Default)]
pub(super) struct Places {
    /// What the operator has opened, also where that is usually blocked.
    pub(super) opened: Vec<PathBuf>,
    /// And everything else that is not blocked.
    pub(super) others: bool,
}

impl Places {
    /// Whether this real path is out of reach.
    pub(super) fn are_closed_to(&self, real: &Path) -> bool {
        let opened = self.opened.iter().any(|root| real.starts_with(root));
        is_blocked(real, &self.opened) || !(opened || self.others)
    }
}

impl Host {
    /// Puts real paths in the place of those a spec names, and makes the workspace if it is not there yet.
    pub(super) async fn open_mounts(&self, draft: &mut SpecDraft) -> Result<(), BoxError> {
        let mounts = draft.extra_mounts.take().unwrap_or_default();
        if draft.host_path.is_none() && mounts.is_empty() {
            draft.extra_mounts = Some(mounts);
            return Ok(());
        }
        let host_path = draft.host_path.take();
        let make = draft.host_path_mode.unwrap_or_default() != HostPathMode::None;
        let places = self.places.clone();
        let found = blocking(move || {
            let host_path = match host_path {
                Some(path) => Some(opened_path("host_path", path.trim(), &places, make)?),
                None => None,
            };
            let mounts = mounts.into_iter().map(|mount| opened_mount(mount, &places));
            Ok((host_path, mounts.collect::<Result<Vec<_>, _>>()?))
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

/// Where a path really leads, if it may be mounted.
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
        // Somebody may have put a link there meanwhile.
        real = look()?;
        if places.are_closed_to(&real) {
            return Err(blocked());
        }
    }
    real.into_os_string()
        .into_string()
        .map_err(|_| unusable("is not UTF-8"))
}

/// Runs what waits for a file system where waiting is allowed.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BoxError> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("looking at the file system failed")))
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
