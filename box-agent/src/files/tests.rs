//! Steps on a directory of this machine, which stands in for a box's root.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use box_protocol::actions::FileWriteParams;
use box_protocol::{BoxError, Code};
use box_sys::Guest;
use serde_json::{Value, json};

use super::ground::{Ground, Step};
use super::pool::Wanted;
use super::{Files, change, list, replace, write};

pub(super) fn ground(root: &Path) -> Files {
    let me = rustix::process::geteuid().as_raw();
    let guest = Guest {
        id: me,
        ..Guest::default()
    };
    Files::below(root.to_str().unwrap(), guest, None).unwrap()
}

pub(super) fn step<T>(
    ground: &Ground,
    run: impl FnOnce(&Step<'_>) -> Result<T, BoxError>,
) -> Result<T, BoxError> {
    let wanted = Wanted::default();
    run(&Step {
        ground,
        wanted: &wanted,
    })
}

fn params<T: serde::de::DeserializeOwned>(mut more: Value) -> T {
    more["session_id"] = json!("s");
    serde_json::from_value(more).unwrap()
}

fn put(files: &Files, path: &str, text: &str) -> Result<(), BoxError> {
    let params: FileWriteParams = FileWriteParams {
        data: text.as_bytes().to_vec().into(),
        ..params(json!({"path": path, "data": ""}))
    };
    step(&files.ground, |step| write::write(step, &params)).map(drop)
}

#[test]
fn absolute_links_stay_below_the_root() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(outside.path(), root.path().join("out")).unwrap();
    symlink("/inner", root.path().join("in")).unwrap();
    std::fs::create_dir(root.path().join("inner")).unwrap();
    let files = ground(root.path());
    put(&files, "/in/file", "x").unwrap();
    assert_eq!(std::fs::read(root.path().join("inner/file")).unwrap(), b"x");
    let refused = put(&files, "/out/file", "x").unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    put(&files, "/../../../../above", "x").unwrap();
    assert!(root.path().join("above").is_file());
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn a_write_follows_a_link_and_keeps_the_mode() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "old").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", root.path().join("link")).unwrap();
    symlink("loop", root.path().join("loop")).unwrap();
    let files = ground(root.path());
    put(&files, "/link", "new").unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), b"new");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    assert!(root.path().join("link").is_symlink());
    let refused = put(&files, "/loop", "x").unwrap_err();
    assert_eq!(refused.code(), Code::Validation);
    assert_eq!(
        std::fs::read_dir(root.path()).unwrap().count(),
        3,
        "no draft is left"
    );
}

#[test]
fn a_deep_tree_is_removed_with_few_descriptors() {
    let root = tempfile::tempdir().unwrap();
    let mut dir = rustix::fs::open(
        root.path(),
        rustix::fs::OFlags::PATH,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    for _ in 0..3000 {
        dir = super::ground::make_dir(&dir, "d", 0o755).unwrap().0;
    }
    drop(dir);
    symlink("/", root.path().join("d/link")).unwrap();
    let files = ground(root.path());
    let asked = || params(json!({"paths": ["/d"], "recursive": true}));
    step(&files.ground, |step| change::remove(step, &asked())).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    let again = step(&files.ground, |step| change::remove(step, &asked()));
    assert_eq!(again.unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_withdrawn_walk_stops() {
    let root = tempfile::tempdir().unwrap();
    let files = ground(root.path());
    put(&files, "/a", "x").unwrap();
    let wanted = Wanted::default();
    wanted.withdraw();
    let step = Step {
        ground: &files.ground,
        wanted: &wanted,
    };
    let listed = list::list(&step, &params(json!({"path": "/"})));
    assert_eq!(listed.unwrap_err().code(), Code::Cancelled);
}

#[test]
fn a_copy_into_itself_ends() {
    let root = tempfile::tempdir().unwrap();
    let files = ground(root.path());
    std::fs::create_dir_all(root.path().join("a/b")).unwrap();
    put(&files, "/a/b/file", "x").unwrap();
    let asked = params(json!({"src": "/a", "dest": "/a/b/copy", "keep_source": true}));
    step(&files.ground, |step| change::transfer(step, &asked)).unwrap();
    let copied = root.path().join("a/b/copy/b");
    let names: Vec<_> = std::fs::read_dir(copied).unwrap().flatten().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn nothing_is_replaced_that_has_changed_meanwhile() {
    let root = tempfile::tempdir().unwrap();
    let files = ground(root.path());
    put(&files, "/f", "one").unwrap();
    let asked = params(json!({"path": "/f", "old": "one", "new": "two"}));
    let done = step(&files.ground, |step| replace::replace(step, &asked)).unwrap();
    assert_eq!(done.count, 1);
    let stale: FileWriteParams = FileWriteParams {
        if_match: Some("stale".into()),
        ..params(json!({"path": "/f", "data": "eA=="}))
    };
    let refused = step(&files.ground, |step| write::write(step, &stale));
    assert_eq!(refused.unwrap_err().code(), Code::Conflict);
    assert_eq!(std::fs::read(root.path().join("f")).unwrap(), b"two");
}

#[test]
fn a_directory_of_very_many_is_removed() {
    let root = tempfile::tempdir().unwrap();
    for dir in ["d/one", "d/two"] {
        std::fs::create_dir_all(root.path().join(dir)).unwrap();
        for number in 0..5000 {
            std::fs::write(root.path().join(format!("{dir}/{number}")), "").unwrap();
        }
    }
    let files = ground(root.path());
    let asked = params(json!({"paths": ["/d"], "recursive": true}));
    step(&files.ground, |step| change::remove(step, &asked)).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_tree_of_long_paths_is_refused_before_it_takes_the_memory() {
    let root = tempfile::tempdir().unwrap();
    let mut dir = rustix::fs::open(
        root.path(),
        rustix::fs::OFlags::PATH,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    for _ in 0..100 {
        dir = super::ground::make_dir(&dir, &"d".repeat(250), 0o755)
            .unwrap()
            .0;
    }
    for number in 0..2000 {
        let name = format!("{number:0>250}");
        super::ground::make_dir(&dir, &name, 0o755).unwrap();
    }
    let files = ground(root.path());
    let asked = params(json!({"path": "/"}));
    let refused = step(&files.ground, |step| {
        super::pack::Packing::open(step, &asked)
    });
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::TooLarge);
    let detail: box_protocol::error::Detail = refused.detail().unwrap();
    assert_eq!(detail.limit.as_deref(), Some("paths_bytes"));
}
