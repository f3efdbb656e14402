//! Places of the host that are never mounted, or only where a root says so expressly.

use std::path::{Path, PathBuf};

/// Never, whatever the roots say: what is below speaks for the kernel.
const NEVER: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Only below a root that itself lies here: a wider root is not meant to include them.
const UNLESS_NAMED: [&str; 5] = ["/etc", "/root", "/boot", "/run", "/var/run"];

/// Sockets whose owner obeys whoever reaches them.
const CONTROL_SOCKETS: [&str; 5] = [
    "docker.sock",
    "containerd.sock",
    "podman.sock",
    "crio.sock",
    "buildkitd.sock",
];

/// Directories in which such sockets are kept.
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

/// Whether this real path must not be mounted, where these roots are allowed and these paths are the server's own.
pub fn is_blocked(real: &Path, roots: &[PathBuf], private: &[PathBuf]) -> bool {
    NEVER.iter().any(|place| real.starts_with(place))
        || reaches_private(real, roots, private)
        || reaches_control_socket(real)
        || UNLESS_NAMED.iter().any(|place| {
            real.starts_with(place)
                && !roots
                    .iter()
                    .any(|root| root.starts_with(place) && real.starts_with(root))
        })
}

/// Whether it holds one of the server's own paths, or lies inside of one and below no root that does, too.
///
/// A guest may have the same user id as the server, whose keys and sockets are there.
pub(crate) fn reaches_private(real: &Path, roots: &[PathBuf], private: &[PathBuf]) -> bool {
    private.iter().any(|own| {
        let named = |root: &PathBuf| root != own && root.starts_with(own) && real.starts_with(root);
        own.starts_with(real) || (real.starts_with(own) && !roots.iter().any(named))
    })
}

/// Whether it is inside of the home directory of root, which only root can read. The directory itself is not.
pub(crate) fn is_in_home_of_root(real: &Path) -> bool {
    let inside = real.strip_prefix("/root");
    inside.is_ok_and(|inside| inside.components().next().is_some()) && !reaches_control_socket(real)
}

/// Whether it is a control socket, or a directory in or above which one is usually kept. `/` is above
/// them all.
fn reaches_control_socket(real: &Path) -> bool {
    let named = real
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| CONTROL_SOCKETS.contains(&name));
    named
        || SOCKET_DIRECTORIES
            .iter()
            .any(|directory| Path::new(directory).starts_with(real))
        || is_user_run_directory(real)
}

/// `/run/user/<number>`, where a user's own podman and docker listen, and what is right above.
fn is_user_run_directory(real: &Path) -> bool {
    let Ok(below) = real.strip_prefix("/run/user") else {
        return false;
    };
    let mut parts = below.components();
    let (user, place) = (parts.next(), parts.next());
    let is_socket_place = place.is_none_or(|place| place.as_os_str() == "podman");
    let ends_there = parts.next().is_none();
    user.is_none() || (is_socket_place && ends_there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(path: &str, roots: &[&str]) -> bool {
        let roots: Vec<PathBuf> = roots.iter().map(PathBuf::from).collect();
        is_blocked(Path::new(path), &roots, &[])
    }

    #[test]
    fn the_servers_own_paths_are_not_mounted_nor_what_holds_them() {
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
    fn some_places_are_never_mounted() {
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
    fn a_wide_root_does_not_include_the_systems_own_places() {
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
    fn a_root_that_names_such_a_place_opens_it() {
        assert!(!blocked("/etc/box", &["/etc/box"]));
        assert!(!blocked("/root/jobs/a", &["/root/jobs"]));
        assert!(!blocked("/run/user/1000/box", &["/run/user/1000/box"]));
        // Of two roots, the one that names it must also hold it.
        assert!(blocked("/etc/ssh", &["/", "/etc/box"]));
    }

    #[test]
    fn control_sockets_and_their_directories_stay_closed() {
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
