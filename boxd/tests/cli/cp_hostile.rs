//! `cp` with a hostile guest, and `cp` that is interrupted.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use box_test_wait::LONG;
use box_test_wait::blocking::eventually;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Pid, Signal, kill_process};

use super::support::{Server, err, feed};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `again` repeatedly during `work`.
fn beside<T>(again: impl Fn() + Send + Sync, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                again();
            }
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Relaxed);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Repeats without a pause until the condition holds, because the window of a race may be short.
fn race_until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < LONG, "{what}");
    }
}

#[test]
fn links_swapped_in_during_an_upload_copy_no_file_of_the_host() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let path = tempfile::tempdir().unwrap();
    let (from, outside) = (path.path().join("from"), path.path().join("outside"));
    for directory in [from.join("d"), outside.clone()] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write(outside.join("f"), "canary").unwrap();
    for name in ["d/f", "f"] {
        fs::write(from.join(name), "mine").unwrap();
    }
    symlink(&outside, from.join("to-d")).unwrap();
    symlink(outside.join("f"), from.join("to-f")).unwrap();
    let swap = || {
        for (one, other) in [("d", "to-d"), ("f", "to-f")] {
            let (one, other) = (from.join(one), from.join(other));
            renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
        }
    };
    beside(swap, || {
        // The control: checking a path first and opening it then does end up outside.
        for (name, file) in [("d", "d/f"), ("f", "f")] {
            race_until("the swaps do not work", || {
                let is_link = fs::symlink_metadata(from.join(name)).unwrap().is_symlink();
                !is_link && fs::read_to_string(from.join(file)).is_ok_and(|read| read == "canary")
            });
        }
        for number in 0..60 {
            server.ok(&["cp", text(&from), &format!("b:/tmp/n{number}")]);
        }
    });
    let found = server.ok(&[
        "exec",
        "b",
        "grep -rlx mine /tmp | wc -l; ! grep -r canary /tmp",
    ]);
    assert!(found.trim().parse::<usize>().unwrap() > 60, "{found}");
}

#[test]
fn links_swapped_in_during_a_download_are_not_followed() {
    let server = Server::start();
    let script = "mkdir -p /tmp/t/d; for i in $(seq 30); do echo canary > /tmp/t/d/f$i; done";
    server.ok(&["run", "--name", "b", script]);
    let path = tempfile::tempdir().unwrap();
    let (to, outside) = (path.path().join("to"), path.path().join("outside"));
    fs::create_dir_all(to.join("t")).unwrap();
    fs::create_dir(&outside).unwrap();
    let (directory, gone) = (to.join("t/d"), to.join("gone"));
    let swap = || {
        let _ = fs::rename(&directory, &gone);
        let _ = fs::remove_dir_all(&gone);
        let _ = symlink(&outside, &directory);
        let _ = fs::remove_file(&directory);
    };
    beside(swap, || {
        // The control: making the directory first and writing then does end up outside.
        race_until("the swaps do not work", || {
            let _ = fs::create_dir(&directory);
            let _ = fs::write(directory.join("control"), "");
            outside.join("control").exists()
        });
        fs::remove_file(outside.join("control")).unwrap();
        for _ in 0..40 {
            // The client may find that a directory it has just made is gone.
            server.run(&["cp", "b:/tmp/t", text(&to)]);
        }
    });
    let written: Vec<_> = fs::read_dir(&outside).unwrap().collect();
    assert!(written.is_empty(), "{written:?}");
    let _ = fs::remove_file(&directory);
    server.ok(&["cp", "b:/tmp/t", text(&to)]);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 30);
}

#[test]
fn a_named_link_is_refused_and_a_link_at_the_target_is_replaced() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "echo new > /tmp/f"]);
    let path = tempfile::tempdir().unwrap();
    let at = |name: &str| path.path().join(name);
    fs::create_dir(at("real")).unwrap();
    fs::write(at("mine"), "mine").unwrap();
    symlink("real", at("link")).unwrap();
    symlink("../mine", at("real/f")).unwrap();
    // Out of a box.
    let refused = err(&server.run(&["cp", "b:/tmp/f", text(&at("link"))]));
    assert!(
        refused.contains("symbolic link, which cp does not follow"),
        "{refused}"
    );
    server.ok(&["cp", "b:/tmp/f", &format!("{}/", text(&at("link")))]);
    assert_eq!(fs::read_to_string(at("mine")).unwrap(), "mine");
    assert!(!at("real/f").is_symlink());
    assert_eq!(fs::read_to_string(at("real/f")).unwrap(), "new\n");
    // Into a box.
    let refused = err(&server.run(&["cp", text(&at("link")), "b:/tmp/tree"]));
    assert!(
        refused.contains("symbolic link, which cp does not follow"),
        "{refused}"
    );
    server.ok(&["cp", &format!("{}/", text(&at("link"))), "b:/tmp/tree"]);
    assert_eq!(server.ok(&["exec", "b", "cat /tmp/tree/f"]), "new\n");
}

/// A server that allows mounts for tests.
fn with_mounts() -> Server {
    Server::with(tempfile::tempdir().unwrap(), |command| {
        let roots = format!("[\"{}\"]", std::env::temp_dir().display());
        command.env("BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS", roots);
    })
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn names(directory: &Path) -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn an_interrupted_upload_leaves_nothing() {
    let (workspace, quota) = (tempfile::tempdir().unwrap(), ["--quota-mb", "4"]);
    let server = with_mounts();
    let mut make = ["run", "--name", "b", "--workspace", text(workspace.path())];
    server.ok(&[&make[..], &quota, &["true"]].concat());
    let data = vec![7; 3 << 20];
    let started = || {
        let mut copy = server.boxd(&["cp", "-", "b:/workspace/large"]);
        let mut copy = copy.stdin(Stdio::piped()).spawn().unwrap();
        let mut input = copy.stdin.take().unwrap();
        // This is more than one piece.
        input.write_all(&data).unwrap();
        (copy, input)
    };
    for number in 0..3 {
        let (mut copy, _input) = started();
        signal(&copy, Signal::INT);
        assert_eq!(copy.wait().unwrap().code(), Some(130), "{number}");
        assert_eq!(names(workspace.path()).len(), 0);
    }
    // With the pieces of the earlier copies, the disk would have no room for this one.
    let copied = feed(&mut server.boxd(&["cp", "-", "b:/workspace/whole"]), &data);
    assert!(copied.status.success(), "{copied:?}");
    server.ok(&["exec", "b", "rm /workspace/whole"]);
    let (mut copy, _input) = started();
    copy.kill().unwrap();
    copy.wait().unwrap();
    assert_eq!(
        names(workspace.path()).len(),
        0,
        "also not if the client is killed"
    );
    make[2] = "c";
    server.ok(&[&make[..], &["true"]].concat());
    // A tree, while the client packs it.
    let tree = tempfile::tempdir().unwrap();
    let file = fs::File::create(tree.path().join("sparse")).unwrap();
    file.set_len(1 << 40).unwrap();
    let mut copy = server.boxd(&["cp", text(tree.path()), "c:/workspace/tree"]);
    let mut copy = copy.stderr(Stdio::null()).spawn().unwrap();
    eventually("it has begun", || workspace.path().join("tree").is_dir());
    signal(&copy, Signal::INT);
    assert_eq!(copy.wait().unwrap().code(), Some(130));
    assert_eq!(names(&workspace.path().join("tree")).len(), 0);
}

/// Whether a process has a non-empty file open below a directory.
fn writes(process: &Child, below: &Path) -> bool {
    let open = fs::read_dir(format!("/proc/{}/fd", process.id()));
    let mut open = open.into_iter().flatten().flatten();
    open.any(|fd| {
        let is_below = fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(below));
        is_below && fs::metadata(fd.path()).is_ok_and(|meta| meta.is_file() && meta.len() > 0)
    })
}

#[test]
fn an_interrupted_download_leaves_nothing() {
    let server = Server::start();
    let script = "mkdir /tmp/t; truncate -s 2G /tmp/large /tmp/t/large";
    server.ok(&["run", "--name", "b", script]);
    let path = tempfile::tempdir().unwrap();
    let path = path.path().canonicalize().unwrap();
    for (from, sent_signal) in [
        ("b:/tmp/large", Signal::INT),
        ("b:/tmp/large", Signal::KILL),
        ("b:/tmp/t", Signal::INT),
        ("b:/tmp/t", Signal::KILL),
    ] {
        let mut copy = server.boxd(&["cp", from, text(&path.join("to"))]);
        let mut copy = copy.spawn().unwrap();
        eventually("it has begun", || {
            assert_eq!(copy.try_wait().unwrap(), None, "{from}");
            writes(&copy, &path)
        });
        signal(&copy, sent_signal);
        let code = copy.wait().unwrap().code();
        assert_eq!(code, (sent_signal == Signal::INT).then_some(130), "{from}");
        let _ = fs::remove_dir(path.join("to"));
        assert!(
            names(&path).is_empty(),
            "{from} {sent_signal:?}: {:?}",
            names(&path)
        );
    }
}
