//! Steps on a directory of the test machine in place of a box's root.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use box_protocol::actions::{FileOutcome, FileWriteParams};
use box_protocol::{BoxError, Code};
use box_sys::Guest;
use serde_json::{Value, json};

use super::guest_root::{GuestRoot, Step};
use super::pool::CancelFlag;
use super::{Files, change, list, replace, stat, write};

pub(super) fn files_in(root: &Path) -> Files {
    let uid = rustix::process::geteuid().as_raw();
    let guest = Guest {
        id: uid,
        group: uid,
        ..Guest::default()
    };
    Files::with_root(root.to_str().unwrap(), guest, None).unwrap()
}

pub(super) fn step<T>(
    guest_root: &GuestRoot,
    run: impl FnOnce(&Step<'_>) -> Result<T, BoxError>,
) -> Result<T, BoxError> {
    let cancel = CancelFlag::default();
    run(&Step {
        guest_root,
        cancel: &cancel,
    })
}

fn open_dir(path: &Path) -> OwnedFd {
    rustix::fs::open(path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap()
}

fn params<T: serde::de::DeserializeOwned>(mut more: Value) -> T {
    more["box_id"] = json!("s");
    serde_json::from_value(more).unwrap()
}

fn write_text(files: &Files, path: &str, text: &str) -> Result<(), BoxError> {
    let params: FileWriteParams = FileWriteParams {
        data: text.as_bytes().to_vec().into(),
        ..params(json!({"path": path, "data": ""}))
    };
    step(&files.guest_root, |step| write::write(step, &params)).map(drop)
}

#[test]
fn absolute_links_stay_below_the_root() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(outside.path(), root.path().join("out")).unwrap();
    symlink("/inner", root.path().join("in")).unwrap();
    std::fs::create_dir(root.path().join("inner")).unwrap();
    let files = files_in(root.path());
    write_text(&files, "/in/file", "x").unwrap();
    assert_eq!(std::fs::read(root.path().join("inner/file")).unwrap(), b"x");
    let error = write_text(&files, "/out/file", "x").unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    write_text(&files, "/../../../../above", "x").unwrap();
    assert!(root.path().join("above").is_file());
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn extended_attributes_are_those_of_the_last_write() {
    let root = tempfile::tempdir().unwrap();
    let files = files_in(root.path());
    let write = |xattrs: Value, more: Value| {
        let mut all = json!({"path": "/d/f", "data": "", "parents": true, "xattrs": xattrs});
        all.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let params: FileWriteParams = params(all);
        step(&files.guest_root, |step| write::write(step, &params))
    };
    let seen = || {
        let paths = params(json!({"paths": ["/d/f"]}));
        let stat = step(&files.guest_root, |step| stat::stat(step, &paths)).unwrap();
        let FileOutcome::Stat(file) = &stat.paths["/d/f"] else {
            panic!("{stat:?}");
        };
        let path = params(json!({"path": "/d"}));
        let listed = step(&files.guest_root, |step| list::list(step, &path)).unwrap();
        assert_eq!(listed.entries[0].xattrs, file.xattrs);
        json!(file.xattrs)
    };
    let both = json!({"a.b": "1", "c": "\u{e9}"});
    let written = write(both.clone(), json!({})).unwrap();
    assert_eq!((json!(written.xattrs), seen()), (both.clone(), both));
    let file = root.path().join("d/f");
    let set = |name: &str, value: &[u8]| {
        rustix::fs::setxattr(&file, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    set("user.own", b"2");
    set("user.bytes", b"\xff");
    assert_eq!(seen(), json!({"a.b": "1", "c": "\u{e9}", "own": "2"}));
    write(json!({"c": "3"}), json!({"append": true})).unwrap();
    assert_eq!(seen(), json!({"a.b": "1", "c": "3", "own": "2"}));
    write(json!({}), json!({})).unwrap();
    assert_eq!(seen(), json!({}), "another file has replaced it");
    for invalid in [
        json!({"": "v"}),
        json!({"a\0b": "v"}),
        json!({"k".repeat(251): "v"}),
        json!({"k": "v".repeat(4096)}),
    ] {
        let error = write(invalid, json!({})).unwrap_err();
        assert!(error.message().starts_with("xattrs: "), "{error:?}");
        assert_eq!(error.code(), Code::Validation);
    }
}

#[test]
fn a_write_follows_a_link_and_keeps_the_mode() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "old").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", root.path().join("link")).unwrap();
    symlink("loop", root.path().join("loop")).unwrap();
    let files = files_in(root.path());
    write_text(&files, "/link", "new").unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), b"new");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    assert!(root.path().join("link").is_symlink());
    let error = write_text(&files, "/loop", "x").unwrap_err();
    assert_eq!(error.code(), Code::Validation);
    assert_eq!(
        std::fs::read_dir(root.path()).unwrap().count(),
        3,
        "no temporary file is left"
    );
}

#[test]
fn a_deep_tree_is_removed_with_few_descriptors() {
    let root = tempfile::tempdir().unwrap();
    let mut dir = open_dir(root.path());
    for _ in 0..3000 {
        dir = super::guest_root::make_dir(&dir, "d", 0o755).unwrap().0;
    }
    drop(dir);
    symlink("/", root.path().join("d/link")).unwrap();
    let files = files_in(root.path());
    let request = || params(json!({"paths": ["/d"], "recursive": true}));
    step(&files.guest_root, |step| change::remove(step, &request())).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    let again = step(&files.guest_root, |step| change::remove(step, &request()));
    assert_eq!(again.unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_cancelled_walk_stops() {
    let root = tempfile::tempdir().unwrap();
    let files = files_in(root.path());
    write_text(&files, "/a", "x").unwrap();
    let cancel = CancelFlag::default();
    cancel.cancel();
    let step = Step {
        guest_root: &files.guest_root,
        cancel: &cancel,
    };
    let listed = list::list(&step, &params(json!({"path": "/"})));
    assert_eq!(listed.unwrap_err().code(), Code::Cancelled);
}

#[test]
fn a_copy_into_itself_terminates() {
    let root = tempfile::tempdir().unwrap();
    let files = files_in(root.path());
    std::fs::create_dir_all(root.path().join("a/b")).unwrap();
    write_text(&files, "/a/b/file", "x").unwrap();
    let request = params(json!({"src": "/a", "dest": "/a/b/copy", "keep_source": true}));
    step(&files.guest_root, |step| change::move_path(step, &request)).unwrap();
    let copied = root.path().join("a/b/copy/b");
    let names: Vec<_> = std::fs::read_dir(copied).unwrap().flatten().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn a_file_that_has_changed_is_not_replaced() {
    let root = tempfile::tempdir().unwrap();
    let files = files_in(root.path());
    write_text(&files, "/f", "one").unwrap();
    let request = params(json!({"path": "/f", "old": "one", "new": "two"}));
    let done = step(&files.guest_root, |step| replace::replace(step, &request)).unwrap();
    assert_eq!(done.count, 1);
    let stale: FileWriteParams = FileWriteParams {
        if_match: Some("stale".into()),
        ..params(json!({"path": "/f", "data": "eA=="}))
    };
    let error = step(&files.guest_root, |step| write::write(step, &stale));
    assert_eq!(error.unwrap_err().code(), Code::Conflict);
    assert_eq!(std::fs::read(root.path().join("f")).unwrap(), b"two");
}

#[test]
fn a_directory_with_many_entries_is_removed() {
    let root = tempfile::tempdir().unwrap();
    for dir in ["d/one", "d/two"] {
        std::fs::create_dir_all(root.path().join(dir)).unwrap();
        for number in 0..5000 {
            std::fs::write(root.path().join(format!("{dir}/{number}")), "").unwrap();
        }
    }
    let files = files_in(root.path());
    let request = params(json!({"paths": ["/d"], "recursive": true}));
    step(&files.guest_root, |step| change::remove(step, &request)).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_tree_of_long_paths_is_refused_before_it_exhausts_memory() {
    let root = tempfile::tempdir().unwrap();
    let mut dir = open_dir(root.path());
    for _ in 0..100 {
        dir = super::guest_root::make_dir(&dir, &"d".repeat(250), 0o755)
            .unwrap()
            .0;
    }
    for number in 0..2000 {
        let name = format!("{number:0>250}");
        super::guest_root::make_dir(&dir, &name, 0o755).unwrap();
    }
    let files = files_in(root.path());
    let request = params(json!({"path": "/"}));
    let error = step(&files.guest_root, |step| {
        super::pack::TreePacker::open(step, &request)
    });
    let error = error.unwrap_err();
    assert_eq!(error.code(), Code::TooLarge);
    let detail: box_protocol::error::Detail = error.detail().unwrap();
    assert_eq!(detail.limit.as_deref(), Some("paths_bytes"));
}
