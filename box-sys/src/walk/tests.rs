#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

fn size(path: &Path) -> io::Result<Size> {
    let mut size = Size::default();
    size.add(open(path)?, &[], |_| true).map(|()| size)
}

#[test]
fn size_counts_files_and_follows_no_links() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("a/b");
    fs::create_dir_all(&inner).unwrap();
    fs::write(inner.join("f"), vec![1; 1 << 20]).unwrap();
    symlink("/", inner.join("everything")).unwrap();
    let found = size(dir.path()).unwrap();
    assert!((1 << 20..1 << 21).contains(&found.bytes), "{found:?}");
    assert_eq!(found.entries, 4);
    symlink(dir.path(), dir.path().join("link")).unwrap();
    assert!(open(dir.path().join("link")).is_err());
    assert!(open(dir.path().join("link/a")).is_err());
}

#[test]
fn counting_stops_above_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    for name in 0..100 {
        fs::write(dir.path().join(name.to_string()), "").unwrap();
    }
    let mut size = Size::default();
    let few = |size: &Size| size.entries <= 10;
    size.add(open(dir.path()).unwrap(), &[], few).unwrap();
    assert_eq!(size.entries, 11);
}

#[test]
fn unreadable_and_too_deep_directories_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("d/".repeat(DEPTH_MAX - 1));
    fs::create_dir_all(&deep).unwrap();
    assert_eq!(size(dir.path()).unwrap().entries, DEPTH_MAX as u64 - 1);
    fs::create_dir(deep.join("d")).unwrap();
    assert!(size(dir.path()).is_err());
    let dir = tempfile::tempdir().unwrap();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    // Root can read it.
    assert_eq!(
        size(dir.path()).is_ok(),
        rustix::process::geteuid().is_root()
    );
}

#[test]
fn a_directory_that_becomes_a_link_is_not_entered() {
    let (dir, secret) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in 0..50 {
        fs::write(secret.path().join(name.to_string()), "secret").unwrap();
    }
    fs::create_dir(dir.path().join("d")).unwrap();
    symlink(secret.path(), dir.path().join("l")).unwrap();
    let (root, over) = (open(dir.path()).unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            while !over.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(&root, "d", &root, "l", exchange).unwrap();
            }
        });
        let (mut entered, mut most) = (0, 0);
        for _ in 0..20_000 {
            let mut found = Size::default();
            let counted = found.add(&root, &[], |_| true);
            most = most.max(counted.map_or(u64::MAX, |()| found.entries));
            entered += found.entries;
        }
        over.store(true, Ordering::Relaxed);
        assert!(
            most <= 2 && entered > 20_000,
            "{most} at once, {entered} in all"
        );
    });
}

#[test]
fn a_tree_is_removed_however_deep_and_locked_it_is() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    std::fs::write(&outside, "stays").unwrap();
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
    std::fs::create_dir(tree.join(".removed-1")).unwrap();
    std::fs::write(tree.join(".removed-1/file"), "a name that is taken").unwrap();
    // Deeper than any path can name.
    let mut at = open(&tree).unwrap();
    for _ in 0..2000 {
        rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
        at = open_in(&at, c"d").unwrap();
        rustix::fs::mkdirat(&at, "beside", Mode::RWXU).unwrap();
    }
    drop(at);
    let locked = tree.join("locked/inner");
    std::fs::create_dir_all(&locked).unwrap();
    std::fs::write(locked.join("file"), "x").unwrap();
    for path in [&locked, &tree.join("locked")] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o000)).unwrap();
    }
    remove_all(&tree).unwrap();
    assert!(!tree.exists());
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "stays");
    remove_all(&outside).unwrap();
    assert!(!outside.exists());
    remove_all(&outside).unwrap();
}

#[test]
fn skipped_names_of_the_root_do_not_count() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["kept/one/work", "one/a/b", "two/c"] {
        std::fs::create_dir_all(directory.path().join(name)).unwrap();
    }
    let root = open(directory.path().canonicalize().unwrap()).unwrap();
    let count = |skipped: &[&CStr]| {
        let mut size = Size::default();
        size.add(&root, skipped, |_| true).unwrap();
        size.entries
    };
    assert_eq!(count(&[]), 8);
    assert_eq!(count(&[c"one", c"two"]), 3);
    assert_eq!(count(&[c"work", c"a"]), 8, "only the root's");
}
