//! Images made of programs of the host.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, lchown};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

const DIRECTORIES: &[(&str, u32)] = &[
    ("", 0o755),
    ("etc", 0o755),
    ("root", 0o700),
    ("srv/app", 0o755),
    ("tmp", 0o1777),
    ("usr/bin", 0o755),
    ("var/tmp", 0o1777),
];

const FILES: &[(&str, &str)] = &[
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\napp:x:1234:2345::/srv/app:/bin/sh\n",
    ),
    ("etc/group", "root:x:0:\napps:x:2345:\nstaff:x:50:\n"),
];

/// Makes the root of a small system with these programs, as the user that unpacks images.
///
/// It has the users `root` and `app` (1234:2345) and the group `staff` (50).
pub fn image(uid: u32, programs: &[&str]) -> TempDir {
    let image = tempfile::tempdir().unwrap();
    let root = image.path();
    for (name, mode) in DIRECTORIES {
        let path = root.join(name);
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(*mode)).unwrap();
    }
    for (name, content) in FILES {
        fs::write(root.join(name), content).unwrap();
    }
    for name in ["bin", "sbin"] {
        std::os::unix::fs::symlink("usr/bin", root.join(name)).unwrap();
    }
    let programs: Vec<String> = programs.iter().map(|name| find(name)).collect();
    for program in &programs {
        let name = Path::new(program).file_name().unwrap();
        fs::copy(program, root.join("usr/bin").join(name)).unwrap();
    }
    for library in libraries(&programs) {
        let target = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(library, target).unwrap();
    }
    give(root, uid);
    image
}

/// The path of a program of the host.
fn find(name: &str) -> String {
    let found = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .map(|directory| format!("{directory}/{name}"))
        .into_iter()
        .find(|path| Path::new(path).exists());
    found.unwrap_or_else(|| panic!("{name} is not installed"))
}

/// The libraries of programs, as the host's loader finds them.
fn libraries(programs: &[String]) -> BTreeSet<String> {
    let listed = Command::new("ldd").args(programs).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let paths = listed.lines().filter_map(|line| {
        // A line without an indent names a program.
        let line = line.strip_prefix('\t')?;
        let path = line.split("=> ").last()?.split_whitespace().next()?;
        path.starts_with('/').then(|| path.to_owned())
    });
    paths.collect()
}

/// Gives a tree to a user.
pub fn give(path: &Path, uid: u32) {
    lchown(path, Some(uid), Some(uid)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path(), uid);
        }
    }
}
