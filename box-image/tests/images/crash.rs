//! A process that is killed in the middle, and an ordinary user.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use box_image::{Digest, ImportOptions, Limits, Store};
use box_test_wait::blocking::eventually;

use super::support::{Packed, Reply, Scripted, TestImage, names, noise, reply, tar};

const RUN: &str = env!("CARGO_BIN_EXE_box-image-run");

fn spawn(store: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(RUN);
    command
        .arg(store)
        .args(arguments)
        .env_remove("HOME")
        .env_remove("DOCKER_CONFIG");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn open(path: &Path) -> Store {
    Store::open(path, Limits::default()).unwrap()
}

/// Waits until nothing of a dead process is left. A thread removes its files.
fn assert_swept(path: &Path) {
    for folder in ["pulls", "leases"] {
        assert_eq!(names(path, folder), Vec::<String>::new(), "{folder}");
    }
    eventually("the files of the dead are removed", || {
        names(path, "work").is_empty()
    });
}

#[test]
fn a_killed_pull_is_continued_and_leaves_nothing() {
    let server = Scripted::start();
    let image = TestImage::new(&[
        (tar(&[("first", &noise(1 << 20))]), Packed::Gzip),
        (tar(&[("second", &noise(4 << 20))]), Packed::Gzip),
    ]);
    server.offer(&image, "1");
    let stalled = Reply {
        cut: Some(3 << 20),
        stall: true,
        ..reply(200, &[], image.layers[1].clone())
    };
    server.once(&image.layer_path(1), vec![stalled]);
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let child = spawn(&store, &["pull", &server.name("1")]);
    let written = |layer: usize| {
        let partial = Digest::of(&image.layers[layer]).hex();
        std::fs::metadata(store.join("partial").join(partial)).map_or(0, |found| found.len())
    };
    eventually("most of the second layer is there", || {
        written(1) >= 2 << 20
    });
    // Its file exists in the tree before its last bytes have arrived.
    eventually("the first layer is complete", || {
        written(0) == image.layers[0].len() as u64
    });
    // The first layer is unpacked while the second arrives.
    let unpacked = || {
        let work = names(&store, "work");
        work.iter()
            .any(|id| store.join("work").join(id).join("rootfs/first").exists())
    };
    eventually("the first layer is unpacked", unpacked);
    kill(child);
    assert!(
        !names(&store, "work").is_empty(),
        "the killed process left its directory"
    );
    let opened = open(&store);
    assert!(opened.list().unwrap().is_empty());
    assert_swept(&store);
    let kept = written(1);
    assert!(kept >= 2 << 20);
    let again = spawn(&store, &["pull", &server.name("1")])
        .wait_with_output()
        .unwrap();
    assert!(again.status.success(), "{again:?}");
    let requests = server.requests_of(&image.layer_path(1));
    assert_eq!(
        requests[1].header("range"),
        Some(format!("bytes={kept}-").as_str())
    );
    assert_eq!(
        server.requests_of(&image.layer_path(0)).len(),
        1,
        "the first layer was complete"
    );
    let found = opened.get(&server.name("1")).unwrap();
    assert_eq!(
        std::fs::read(opened.rootfs(&found.digest).join("second")).unwrap(),
        noise(4 << 20)
    );
    assert_swept(&store);
    assert_eq!(names(&store, "partial"), Vec::<String>::new());
}

#[test]
fn a_pull_that_is_killed_at_any_point_loses_nothing() {
    let server = Scripted::start();
    let image = TestImage::new(&[(tar(&[("a", &noise(1 << 20)), ("b", b"x")]), Packed::Gzip)]);
    server.offer(&image, "1");
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    // Something that must survive all of it.
    let kept = open(&store)
        .import_stream(
            &tar(&[("kept", b"")])[..],
            &ImportOptions {
                name: Some("kept".parse().unwrap()),
                ..ImportOptions::default()
            },
        )
        .unwrap();
    for delay in 0..30 {
        let child = spawn(&store, &["pull", &server.name("1")]);
        std::thread::sleep(std::time::Duration::from_millis(delay * 3));
        kill(child);
        let opened = open(&store);
        assert_swept(&store);
        for found in opened.list().unwrap() {
            // An image is complete or does not exist.
            assert!(found.digest == kept.digest || opened.rootfs(&found.digest).join("b").exists());
        }
        assert_eq!(opened.get("kept").unwrap().digest, kept.digest);
        if opened.get(&server.name("1")).is_ok() {
            opened
                .remove(&server.name("1"), &box_image::Uses::new())
                .unwrap();
        }
    }
    let last = spawn(&store, &["pull", &server.name("1")])
        .wait_with_output()
        .unwrap();
    assert!(last.status.success(), "{last:?}");
    assert_eq!(open(&store).list().unwrap().len(), 2);
    assert_eq!(names(&store, "partial"), Vec::<String>::new());
}

#[test]
fn a_killed_import_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let archive = tar(&[("a", &noise(4 << 20)), ("b", b"x")]);
    let mut child = spawn(&store, &["import", "-", "mine"]);
    let mut input = child.stdin.take().unwrap();
    input.write_all(&archive[..2 << 20]).unwrap();
    let working = || store.join("work").exists() && !names(&store, "work").is_empty();
    eventually("the import has begun", working);
    kill(child);
    drop(input);
    let opened = open(&store);
    assert!(opened.list().unwrap().is_empty());
    assert_swept(&store);
    let mut child = spawn(&store, &["import", "-", "mine"]);
    child.stdin.take().unwrap().write_all(&archive).unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(opened.list().unwrap().len(), 1);
    assert_swept(&store);
}

#[test]
fn an_import_that_is_killed_at_any_point_is_complete_or_absent() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let file = folder.path().join("root.tar");
    let files: Vec<_> = (0..200)
        .map(|number| format!("d{}/f{number}", number % 10))
        .collect();
    let content = noise(4096);
    let files: Vec<_> = files
        .iter()
        .map(|name| (name.as_str(), content.as_slice()))
        .collect();
    std::fs::write(&file, tar(&files)).unwrap();
    let mut complete = 0;
    for delay in 0..30 {
        let child = spawn(&store, &["import", file.to_str().unwrap(), "mine"]);
        std::thread::sleep(std::time::Duration::from_millis(delay * 3));
        kill(child);
        let opened = open(&store);
        assert_swept(&store);
        for found in opened.list().unwrap() {
            let root = opened.rootfs(&found.digest);
            assert!(files.iter().all(|(name, _)| root.join(name).exists()));
            complete += 1;
            opened
                .remove(&found.digest.to_string(), &box_image::Uses::new())
                .unwrap();
        }
    }
    eprintln!("{complete} of 30 imports were complete");
}

#[test]
fn an_ordinary_user_has_a_store_too() {
    if !rustix::process::geteuid().is_root() {
        // The other tests of this file ran as an ordinary user.
        return;
    }
    let server = Scripted::start();
    let mut builder = tar::Builder::new(Vec::new());
    for (path, kind, mode) in [
        ("locked/", tar::EntryType::Directory, 0o555),
        ("locked/su", tar::EntryType::Regular, 0o4755),
        ("closed/", tar::EntryType::Directory, 0o000),
        ("null", tar::EntryType::Char, 0o666),
        ("pipe", tar::EntryType::Fifo, 0o600),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_path(path).unwrap();
        header.set_mode(mode);
        header.set_uid(1234);
        header.set_gid(80_000);
        header.set_size(0);
        header.set_mtime(9);
        header.set_cksum();
        builder.append(&header, &b""[..]).unwrap();
    }
    // A later layer writes into the read-only directory.
    let layers = [
        (builder.into_inner().unwrap(), Packed::Gzip),
        (
            tar(&[("locked/new", b"x"), ("closed/x", b"")]),
            Packed::Zstd,
        ),
    ];
    let image = TestImage::new(&layers);
    server.offer(&image, "1");
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let home = folder.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(65_534), Some(65_534)).unwrap();
    let program = folder.path().join("run");
    // Copied by another process, because the fork of a thread would keep the copy open for writing.
    assert!(
        Command::new("cp")
            .arg(RUN)
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    let store = home.join("store");
    let run = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        command
            .arg(&program)
            .arg(&store)
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/bin:/bin");
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{arguments:?} {ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    run(&["pull", &server.name("1")]);
    assert!(run(&["list"]).contains(&image.digest().to_string()));
    let root = store
        .join("images")
        .join(image.digest().hex())
        .join("rootfs");
    let found = |path: &str| {
        let found = std::fs::symlink_metadata(root.join(path)).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    assert_eq!(found("locked"), (65_534, 65_534, 0o555));
    assert_eq!(found("locked/su"), (65_534, 65_534, 0o4755));
    assert_eq!(found("closed"), (65_534, 65_534, 0));
    assert!(root.join("locked/new").exists() && !root.join("null").exists());
    run(&["remove", &server.name("1")]);
    for folder in ["images", "tags", "work", "partial", "leases", "pulls"] {
        assert_eq!(names(&store, folder), Vec::<String>::new(), "{folder}");
    }
}
