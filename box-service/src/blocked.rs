//! Host paths that are never mounted, or only if a root names them.

use std::path::{Path, PathBuf};

/// Always blocked, whatever the roots: these paths control the kernel.
const ALWAYS_BLOCKED: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Blocked unless a root lies inside: a wider root is not meant to include them.
const BLOCKED_UNLESS_LISTED: [&str; 5] = ["/etc", "/root", "/boot", "/run", "/var/run"];

/// Control sockets: their servers obey every process that can connect.
const CONTROL_SOCKETS: [&str; 5] = [
    "docker.sock",
    "containerd.sock",
    "podman.sock",
    "crio.sock",
    "buildkitd.sock",
];

/// Directories that contain such sockets.
const SOCKET_DIRECTORIES: [&str; 8] = [
    "/run",
    "/run/containerd",
    "/run/podman",
    "/run/crio",
    "/run/buildkit",
    "/var/run",
    "/var/run/containerd",
    "/var/run/podman",
];

/// Whether this resolved path must not be mounted.
/// `roots` are the allowed roots; `private` are the paths of the server itself.
pub fn is_blocked(real: &Path, roots: &[PathBuf], private: &[PathBuf]) -> bool {
    ALWAYS_BLOCKED.iter().any(|path| real.starts_with(path))
        || reaches_private(real, roots, private)
        || reaches_control_socket(real)
        || BLOCKED_UNLESS_LISTED.iter().any(|path| {
            let is_listed = |root: &PathBuf| root.starts_with(path) && real.starts_with(root);
            real.starts_with(path) && !roots.iter().any(is_listed)
        })
}

/// Whether it contains a private path of the server, or lies inside one.
/// A path inside is allowed below a root that also lies inside.
///
/// A guest may have the same user id as the server, and these paths contain keys and sockets.
pub(crate) fn reaches_private(real: &Path, roots: &[PathBuf], private: &[PathBuf]) -> bool {
    private.iter().any(|path| {
        let is_listed =
            |root: &PathBuf| root != path && root.starts_with(path) && real.starts_with(root);
        path.starts_with(real) || (real.starts_with(path) && !roots.iter().any(is_listed))
    })
}

/// Whether it lies inside the home directory of root, which only root can read.
/// The directory itself does not count.
pub(crate) fn is_in_home_of_root(real: &Path) -> bool {
    let inside = real.strip_prefix("/root");
    inside.is_ok_and(|inside| inside.components().next().is_some()) && !reaches_control_socket(real)
}

/// Whether it is a control socket, or a directory that usually contains one.
/// Directories above count as well, so `/` always does.
fn reaches_control_socket(real: &Path) -> bool {
    let is_socket = real
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| CONTROL_SOCKETS.contains(&name));
    is_socket
        || SOCKET_DIRECTORIES
            .iter()
            .any(|directory| Path::new(directory).starts_with(real))
        || is_user_run_directory(real)
}

/// Whether it is `/run/user`, `/run/user/<number>` or `podman` inside of that.
/// The rootless podman and docker of a user listen there.
fn is_user_run_directory(real: &Path) -> bool {
    let Ok(below) = real.strip_prefix("/run/user") else {
        return false;
    };
    let mut parts = below.components();
    let (user, directory) = (parts.next(), parts.next());
    let has_socket = directory.is_none_or(|directory| directory.as_os_str() == "podman");
    let is_last = parts.next().is_none();
    user.is_none() || (has_socket && is_last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(path: &str, roots: &[&str]) -> bool {
        let roots: Vec<PathBuf> = roots.iter().map(PathBuf::from).collect();
        is_blocked(Path::new(path), &roots, &[])
    }

    #[test]
    fn private_paths_of_the_server_and_their_parents_are_blocked() {
        let private = ["/srv/boxd", "/srv/keys/tokens"].map(PathBuf::from);
        let blocked = |path: &str, roots: &[&str]| {
            let roots: Vec<PathBuf> = roots.iter().map(PathBuf::from).collect();
            is_blocked(Path::new(path), &roots, &private)
        };
        for path in ["/srv", "/srv/boxd", "/srv/keys"] {
            assert!(blocked(path, &[path]), "{path}, although a root names it");
            assert!(!is_blocked(Path::new(path), &[path.into()], &[]), "{path}");
        }
        for path in ["/srv/boxd/boxes", "/srv/boxd/boxes/a"] {
            assert!(blocked(path, &["/srv", "/srv/boxd"]), "{path}");
        }
        assert!(!blocked("/srv/boxd/shared/a", &["/srv/boxd/shared"]));
        for beside in ["/srv/boxdata", "/srv/keys/other", "/srv/work"] {
            assert!(!blocked(beside, &["/srv"]), "{beside}");
        }
    }

    #[test]
    fn kernel_directories_are_always_blocked() {
        for path in [
            "/",
            "/proc",
            "/proc/1/root",
            "/sys/kernel",
            "/dev",
            "/dev/shm",
        ] {
            assert!(blocked(path, &[path]), "{path}");
            assert!(blocked(path, &["/"]), "{path}");
        }
        for near in ["/process", "/system", "/devel", "/data/proc"] {
            assert!(!blocked(near, &["/"]), "{near}");
        }
    }

    #[test]
    fn a_wide_root_does_not_include_system_directories() {
        for path in [
            "/etc",
            "/etc/ssh",
            "/root",
            "/boot/x",
            "/run/x",
            "/var/run/x",
        ] {
            assert!(blocked(path, &["/"]), "{path}");
            assert!(!blocked("/srv/data", &["/"]));
        }
        assert!(blocked("/var/run/x", &["/var"]));
    }

    #[test]
    fn a_root_inside_a_system_directory_allows_it() {
        assert!(!blocked("/etc/box", &["/etc/box"]));
        assert!(!blocked("/root/jobs/a", &["/root/jobs"]));
        assert!(!blocked("/run/user/1000/box", &["/run/user/1000/box"]));
        // Of two roots, the one that names the path must also contain it.
        assert!(blocked("/etc/ssh", &["/", "/etc/box"]));
    }

    #[test]
    fn control_sockets_and_their_directories_are_always_blocked() {
        for path in [
            "/run/docker.sock",
            "/data/docker.sock",
            "/run/podman",
            "/run/containerd",
            "/run/user",
            "/run/user/1000",
            "/run/user/1000/podman",
            "/run",
            "/var",
        ] {
            assert!(blocked(path, &[path]), "{path}");
        }
        assert!(!blocked("/data/docker.socks", &["/data"]));
    }
}
