//! Images made of programs of the host.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::PROBE_PROGRAM;

const DIRECTORIES: &[(&str, u32)] = &[
    ("", 0o755),
    ("bin", 0o755),
    ("etc", 0o755),
    ("mnt", 0o755),
    ("root", 0o700),
    ("srv/app", 0o755),
    ("tmp", 0o1777),
    ("usr/share", 0o755),
    ("var/tmp", 0o1777),
];

const FILES: &[(&str, u32, &str)] = &[
    (
        "etc/passwd",
        0o644,
        "root:x:0:0:root:/root:/bin/sh\napp:x:1234:2345::/srv/app:/bin/sh\n",
    ),
    ("etc/group", 0o644, "root:x:0:\napps:x:2345:\n"),
    ("etc/secret", 0o600, "secret\n"),
    ("etc/list", 0o644, "list\n"),
    ("usr/share/marker", 0o644, "marker\n"),
    ("srv/app/kept", 0o644, "kept\n"),
];

const PROGRAMS: &[&str] = &[
    "cat", "chgrp", "chmod", "chown", "chroot", "cp", "cut", "find", "grep", "head", "hostname",
    "id", "ln", "ls", "mkdir", "mknod", "mount", "mv", "readlink", "rm", "sh", "sleep", "sort",
    "stat", "su", "tail", "taskset", "tr", "true", "touch", "wc", "whoami",
];

/// Makes the root of a small system that a user owns.
pub(crate) fn make(uid: u32) -> TempDir {
    let image = tempfile::tempdir().unwrap();
    let root = image.path();
    for (name, mode) in DIRECTORIES {
        let path = root.join(name);
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(*mode)).unwrap();
    }
    for (name, mode, content) in FILES {
        let path = root.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(*mode)).unwrap();
    }
    let programs = PROGRAMS.iter().map(|name| find(name));
    let programs: Vec<String> = programs.collect();
    for program in &programs {
        let name = Path::new(program).file_name().unwrap();
        fs::copy(program, root.join("bin").join(name)).unwrap();
    }
    for library in libraries(programs.iter().map(String::as_str).chain([PROBE_PROGRAM])) {
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
fn libraries<'a>(programs: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
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

fn give(path: &Path, uid: u32) {
    lchown(path, Some(uid), Some(uid)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path(), uid);
        }
    }
}
