//! Resolution of host paths.
//!
//! This is the only part of the decision that accesses a file system.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use box_protocol::{BoxError, Invalid};

use crate::blocked;
use crate::policy::{HostPath, PathKind, PolicyInputs};

/// Resolves each path on this machine.
pub fn resolve(paths: impl IntoIterator<Item = String>) -> PolicyInputs {
    let paths = paths.into_iter().map(|path| {
        let found = resolve_one(Path::new(&path));
        (path, found)
    });
    PolicyInputs {
        host_paths: paths.collect(),
        ..PolicyInputs::default()
    }
}

/// Normalizes paths of another machine, without a lookup.
pub fn normalize_remote(paths: impl IntoIterator<Item = String>) -> PolicyInputs {
    let found = paths.into_iter().map(|path| {
        let written = Path::new(&path);
        let found = HostPath {
            real: written.is_absolute().then(|| normalize(written)),
            kind: PathKind::Unknown,
            readable: true,
        };
        (path, found)
    });
    PolicyInputs {
        host_paths: found.collect::<BTreeMap<_, _>>(),
        ..PolicyInputs::default()
    }
}

fn resolve_one(path: &Path) -> HostPath {
    if !path.is_absolute() {
        return HostPath {
            real: None,
            kind: PathKind::Missing,
            readable: false,
        };
    }
    let Ok(real) = fs::canonicalize(path) else {
        // The decision still distinguishes whether the path would lie inside a root.
        return HostPath {
            real: real_path(path).ok(),
            kind: PathKind::Missing,
            readable: false,
        };
    };
    let kind = match fs::symlink_metadata(&real) {
        Ok(metadata) if metadata.is_dir() => PathKind::Directory,
        Ok(metadata) if metadata.is_file() => PathKind::File,
        Ok(_) => PathKind::Other,
        Err(_) => PathKind::Missing,
    };
    // Does not wait for the other end of a pipe or similar file.
    let readable = match kind {
        PathKind::Directory => fs::read_dir(&real).is_ok(),
        PathKind::File => fs::File::open(&real).is_ok(),
        _ => false,
    };
    let real = Some(real);
    HostPath {
        real,
        kind,
        readable,
    }
}

/// Resolves a path, following every symbolic link.
/// Components that do not exist yet are kept as written.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let mut existing = path;
    let mut rest = Vec::new();
    loop {
        match fs::canonicalize(existing) {
            Ok(mut real) => {
                for component in rest.into_iter().rev() {
                    push_component(&mut real, component);
                }
                return Ok(real);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut components = existing.components();
                let Some(last) = components.next_back() else {
                    return Err(error);
                };
                rest.push(last);
                existing = components.as_path();
            }
            Err(error) => return Err(error),
        }
    }
}

/// Removes `.` and `..` without following symbolic links.
fn normalize(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        push_component(&mut normal, component);
    }
    normal
}

fn push_component(path: &mut PathBuf, component: Component<'_>) {
    match component {
        Component::CurDir => {}
        Component::ParentDir => {
            path.pop();
        }
        other => path.push(other),
    }
}

/// Returns a configured directory in the form used for comparison.
pub(crate) fn resolve_configured(
    field: &'static str,
    path: &Path,
    shared_filesystem: bool,
) -> Result<PathBuf, BoxError> {
    if !path.is_absolute() {
        return Err(Invalid::new(field, "must be an absolute host path").into());
    }
    if !shared_filesystem {
        return Ok(normalize(path));
    }
    real_path(path).map_err(|_| Invalid::new(field, "cannot be resolved").into())
}

/// Creates the default workspace if it is missing, and returns its path.
/// It must lie under one of the roots, before and after the creation.
pub(crate) fn create_workspace(
    workspace: &Path,
    roots: &[PathBuf],
    private: &[PathBuf],
) -> Result<PathBuf, BoxError> {
    let inside = |path: &Path| roots.iter().any(|root| path.starts_with(root));
    let refused = |rule| BoxError::from(Invalid::new("default_host_workspace", rule));
    if !inside(workspace) {
        return Err(refused(
            "outside allowed_host_mount_roots; add its directory there",
        ));
    }
    if blocked::is_blocked(workspace, roots, private) {
        return Err(refused("blocked for security; choose another directory"));
    }
    fs::create_dir_all(workspace).map_err(|error| refused_by_os("cannot be created", &error))?;
    let real =
        fs::canonicalize(workspace).map_err(|error| refused_by_os("cannot be resolved", &error))?;
    if !inside(&real) {
        return Err(refused(
            "outside allowed_host_mount_roots; add its directory there",
        ));
    }
    Ok(real)
}

fn refused_by_os(rule: &str, error: &io::Error) -> BoxError {
    Invalid::new(
        "default_host_workspace",
        format!("{rule}: {}", error.kind()),
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn existing_links_are_followed_and_missing_components_kept() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("a/b")).unwrap();
        symlink(top.join("a"), top.join("link")).unwrap();
        for (written, real) in [
            ("a/b", "a/b"),
            ("link/b", "a/b"),
            ("link/b/..", "a"),
            ("link/new/deeper", "a/new/deeper"),
            ("link/new/../other", "a/other"),
            ("a/./b/", "a/b"),
        ] {
            assert_eq!(
                real_path(&top.join(written)).unwrap(),
                top.join(real),
                "{written}"
            );
        }
    }

    #[test]
    fn kinds_of_files_are_distinguished() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        fs::create_dir(top.join("d")).unwrap();
        fs::write(top.join("f"), "").unwrap();
        symlink("nowhere", top.join("dangling")).unwrap();
        symlink("loop", top.join("loop")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(top.join("s")).unwrap();
        let text = |name: &str| top.join(name).to_str().unwrap().to_owned();
        let inputs = resolve(["d", "f", "s", "dangling", "missing", "loop"].map(text));
        let kind = |name: &str| inputs.host_paths[&text(name)].kind;
        assert_eq!(kind("d"), PathKind::Directory);
        assert_eq!(kind("f"), PathKind::File);
        assert_eq!(kind("s"), PathKind::Other);
        assert_eq!(kind("missing"), PathKind::Missing);
        assert_eq!(inputs.host_paths[&text("loop")].real, None);
        assert_eq!(kind("dangling"), PathKind::Missing);
        assert_eq!(
            resolve(["relative".to_owned()]).host_paths["relative"].real,
            None
        );
    }

    #[test]
    fn a_workspace_is_made_only_below_a_root() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let root = top.join("root");
        let roots = [root.clone()];
        let made = create_workspace(&root.join("x/default"), &roots, &[]).unwrap();
        assert!(made.is_dir());
        let beside = top.join("rootless");
        let error = create_workspace(&beside, &roots, &[]).unwrap_err();
        assert_eq!(
            error.message(),
            "default_host_workspace: outside allowed_host_mount_roots; add its directory there"
        );
        assert!(!beside.exists());
    }

    #[test]
    fn paths_of_another_machine_are_normalized_without_lookup() {
        let inputs = normalize_remote(["/srv/../data//x".to_owned(), "x".to_owned()]);
        let found = &inputs.host_paths["/srv/../data//x"];
        assert_eq!(found.real.as_deref(), Some(Path::new("/data/x")));
        assert_eq!(found.kind, PathKind::Unknown);
        assert_eq!(inputs.host_paths["x"].real, None);
    }
}
