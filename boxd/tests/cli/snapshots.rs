//! Snapshots, forks and checkpoints on the real program, of root and of an ordinary user.

use std::path::{Path, PathBuf};

use box_test_wait::blocking::eventually;

use super::support::{Server, err, out, users};

pub(crate) fn start(user: Option<u32>) -> Server {
    Server::of_user(tempfile::tempdir().unwrap(), user)
}

pub(crate) fn restart(server: Server, user: Option<u32>) -> Server {
    Server::of_user(server.kill(), user)
}

/// The loop devices of files below a directory, without those of boxes that the server has ready.
fn loops(directory: &Path) -> Vec<PathBuf> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
    let files = files.map(|file| PathBuf::from(file.trim()));
    // The disk of such a box has no name yet.
    let is_named = |file: &PathBuf| !file.to_string_lossy().contains("/#");
    let named = files.filter(is_named);
    named.filter(|file| file.starts_with(directory)).collect()
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.collect()
}

/// The directories of boxes, which are named after their internal ids.
fn sandboxes(state: &Path) -> Vec<String> {
    let mut names = names(state);
    names.retain(|name| name.len() == 32);
    names
}

/// Checks that nothing of boxes and snapshots is left.
pub(crate) fn assert_nothing_left(server: &Server) {
    assert_nothing_left_in(&server.directory.path().join("state"));
}

/// Checks that nothing of boxes and snapshots is left in this state directory.
pub(crate) fn assert_nothing_left_in(state: &Path) {
    let state = state.canonicalize().unwrap();
    for directory in ["layers", "stopped", "history", "forks"] {
        eventually(directory, || names(&state.join(directory)).is_empty());
    }
    eventually("no directory of a box is left", || {
        sandboxes(&state).is_empty()
    });
    eventually("no loop device is left", || loops(&state).is_empty());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(state.to_str().unwrap()), "{mounts}");
}

/// Whether the server can freeze boxes, which a snapshot of a running box needs.
///
/// Otherwise the box is stopped.
pub(crate) fn is_live(server: &Server, name: &str) -> bool {
    if server.run(&["pause", name]).status.success() {
        server.ok(&["resume", name]);
        return true;
    }
    server.ok(&["stop", name]);
    false
}

/// The names in the directory of the layers.
pub(crate) fn layers(server: &Server) -> Vec<String> {
    let mut names = names(&server.directory.path().join("state/layers"));
    names.sort();
    names
}

#[test]
fn a_box_begins_with_the_files_of_a_snapshot() {
    for user in users() {
        let server = start(user);
        let make =
            "mkdir -p ~/a /tmp/b; echo one > ~/a/f; echo two > /tmp/b/g; echo w > w; ln -s f ~/a/l";
        server.ok(&["run", "--name", "work", make]);
        is_live(&server, "work");
        assert_eq!(
            server.ok(&["snapshot", "work", "ready", "--tag", "latest"]),
            "ready\n"
        );
        let shown = server.json(&["snapshot", "inspect", "latest"]);
        assert_eq!(shown["state"], "ready", "{shown}");
        let content = &shown["content"]["snapshot"];
        assert_eq!(content["source_box"], "work", "{shown}");
        assert!(content["entries"].as_u64() >= Some(6), "{shown}");
        assert!(shown["size_bytes"].as_u64() >= Some(10), "{shown}");
        // Later changes of the box are not in the snapshot.
        server.run(&["start", "work"]);
        server.ok(&["exec", "work", "rm -r ~/a; echo late > /tmp/b/g"]);
        let look = "cat ~/a/l /tmp/b/g w; echo more >> ~/a/f; cat ~/a/f; touch /opt/x";
        for _ in 0..2 {
            let found = server.ok(&["run", "--snapshot", "ready", look]);
            assert_eq!(found, "one\ntwo\nw\none\nmore\n");
        }
        let table = server.ok(&["snapshot", "ls", "--box", "work"]);
        assert!(table.starts_with("SNAPSHOT"), "{table}");
        assert!(table.contains("ready") && table.contains("latest"));
        assert_eq!(server.ok(&["snapshot", "ls", "-q", "--box", "other"]), "");
        server.ok(&["snapshot", "update", "ready", "--name", "first"]);
        server.ok(&["rm", "-f", "work"]);
        // The snapshot outlives its box and the server.
        let server = Server::of_user(server.kill(), user);
        server.ok(&["run", "--name", "user", "--snapshot", "first", "true"]);
        let refused = server.run(&["snapshot", "rm", "first"]);
        assert!(
            err(&refused).contains("snapshot first: used by 1 box; delete it first"),
            "{refused:?}"
        );
        assert_eq!(server.ok(&["exec", "user", "cat ~/a/f"]), "one\n");
        assert_eq!(layers(&server).len(), 1);
        server.ok(&["rm", "-f", "user"]);
        server.ok(&["snapshot", "rm", "first"]);
        eventually("the layer is removed", || layers(&server).is_empty());
        let missing = server.run(&["run", "--snapshot", "first", "true"]);
        assert!(
            err(&missing).contains("snapshot first not found"),
            "{missing:?}"
        );
    }
}

#[test]
fn a_machine_that_cannot_pause_a_box_logs_the_remedy_once() {
    for user in users() {
        let server = start(user);
        server.ok(&["run", "--name", "b", "true"]);
        if server.run(&["pause", "b"]).status.success() {
            continue;
        }
        for arguments in [&["snapshot", "b", "s"][..], &["checkpoint", "b"]] {
            let refused = err(&server.run(arguments));
            let remedies = refused.matches("stop the box first").count();
            assert_eq!(remedies, 1, "{refused}");
        }
    }
}

#[test]
fn a_snapshot_has_rules() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    is_live(&server, "b");
    server.ok(&["snapshot", "create", "b", "one"]);
    let refused = |arguments: &[&str]| err(&server.run(arguments));
    let taken = refused(&["snapshot", "b", "one"]);
    assert!(
        taken.contains("name: one is taken by another snapshot"),
        "{taken}"
    );
    assert_eq!(layers(&server).len(), 1);
    let unknown = refused(&["snapshot", "nope", "two"]);
    assert!(unknown.contains("box nope not found"), "{unknown}");
    let both = refused(&["run", "--snapshot", "one", "--image", "x", "true"]);
    assert!(both.contains("cannot be used with"), "{both}");
    let none = refused(&["fork", "b", "-n", "0"]);
    assert!(
        none.contains("count: must be between 1 and 100, not 0"),
        "{none}"
    );
}

#[test]
fn forks_have_the_files_and_options_of_their_box() {
    for user in users() {
        let server = start(user);
        let run = ["run", "--name", "work", "-m", "128m", "echo one > /tmp/f"];
        server.ok(&run);
        is_live(&server, "work");
        let names = server.ok(&["fork", "work", "-n", "3", "--label", "try=1"]);
        let names: Vec<_> = names.lines().collect();
        assert_eq!(names.len(), 3);
        for name in &names {
            assert!(name.starts_with("work-"), "{name}");
            let text = format!("cat /tmp/f; echo {name} > /tmp/f; cat /tmp/f");
            assert_eq!(server.ok(&["exec", name, &text]), format!("one\n{name}\n"));
            let info = server.json(&["inspect", name]);
            assert_eq!(info["box"]["memory_mb"], 128, "{info}");
            assert_eq!(info["box"]["labels"]["try"], "1", "{info}");
        }
        // A fork of a fork has the changes of the first.
        is_live(&server, names[0]);
        assert_eq!(server.ok(&["fork", names[0], "--prefix", "x"]), "x-1\n");
        let found = server.ok(&["exec", "x-1", "cat /tmp/f"]);
        assert_eq!(found.trim(), names[0]);
        // All or none: the second id is taken.
        server.ok(&["run", "--name", "y-2", "true"]);
        let refused = server.run(&["fork", names[0], "-n", "3", "--prefix", "y"]);
        assert!(
            err(&refused).contains("box y-2 already exists"),
            "{refused:?}"
        );
        let left = server.ok(&["ps", "-q"]);
        assert!(!left.contains("y-1") && !left.contains("y-3"), "{left}");
        server.run(&["start", "work"]);
        assert_eq!(server.ok(&["exec", "work", "cat /tmp/f"]), "one\n");
        // The files of forks stay as long as one of them.
        server.ok(&["rm", "-f", "work"]);
        let server = Server::of_user(server.kill(), user);
        assert_eq!(
            server.ok(&["exec", names[1], "cat /tmp/f"]).trim(),
            names[1]
        );
        server.ok(&["rm", "-f", "--all"]);
        eventually("the layers are removed", || layers(&server).is_empty());
    }
}

#[test]
fn a_fork_refuses_a_volume_with_one_writer() {
    let server = Server::start();
    server.ok(&["volume", "create", "data", "--size", "64m"]);
    server.ok(&["run", "--name", "b", "-v", "data:/data", "true"]);
    is_live(&server, "b");
    let refused = err(&server.run(&["fork", "b"]));
    assert!(
        refused.contains("volumes: data is mounted read-write"),
        "{refused}"
    );
    server.ok(&["volume", "update", "data", "--shared", "on"]);
    let name = server.ok(&["fork", "b"]);
    server.ok(&["exec", name.trim(), "echo 1 > /data/f"]);
    server.run(&["start", "b"]);
    assert_eq!(server.ok(&["exec", "b", "cat /data/f"]), "1\n");
}

#[test]
fn a_running_command_continues_during_a_snapshot() {
    let server = Server::start();
    let count = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i >> /tmp/log; done; echo done";
    server.ok(&["run", "--name", "b", "true"]);
    if !is_live(&server, "b") {
        return;
    }
    let id = server.ok(&["exec", "--detach", "b", count]);
    eventually("the writer runs", || {
        !server
            .ok(&["exec", "b", "cat /tmp/log 2>/dev/null || true"])
            .is_empty()
    });
    for round in 0..3 {
        let name = format!("s{round}");
        server.ok(&["snapshot", "b", &name]);
        let found = server.ok(&["run", "--snapshot", &name, "cat /tmp/log"]);
        // Each line is whole and follows the one before.
        let lines: Vec<u64> = found.lines().map(|line| line.parse().unwrap()).collect();
        assert!(lines.iter().copied().eq(1..=lines.len() as u64), "{round}");
    }
    server.ok(&["exec", "b", "touch /tmp/end"]);
    let ended = server.run(&["wait", id.trim()]);
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(out(&server.run(&["logs", id.trim()])), "done\n");
}

#[test]
fn a_snapshot_is_exported_as_an_archive() {
    for user in users() {
        let server = start(user);
        server.ok(&[
            "run",
            "--name",
            "b",
            "mkdir ~/d; echo one > ~/d/f; echo two > /tmp/g",
        ]);
        is_live(&server, "b");
        server.ok(&["snapshot", "b", "s"]);
        let file = server.directory.path().join("s.tar");
        server.ok(&["snapshot", "export", "s", file.to_str().unwrap()]);
        let listed = std::process::Command::new("tar")
            .arg("-tf")
            .arg(&file)
            .output();
        let listed = out(&listed.unwrap());
        for name in ["home/box/d/f", "tmp/g"] {
            assert!(listed.lines().any(|line| line.ends_with(name)), "{listed}");
        }
        // A second layer without the first file has a mark for it.
        server.ok(&[
            "run",
            "--name",
            "c",
            "--snapshot",
            "s",
            "rm ~/d/f; echo three > /tmp/h",
        ]);
        is_live(&server, "c");
        server.ok(&["snapshot", "c", "t"]);
        server.ok(&["snapshot", "export", "t", file.to_str().unwrap()]);
        let listed = std::process::Command::new("tar")
            .arg("-tf")
            .arg(&file)
            .output();
        let listed = out(&listed.unwrap());
        assert!(
            listed.lines().any(|line| line.ends_with("tmp/h")),
            "{listed}"
        );
        assert!(
            !listed.lines().any(|line| line.ends_with("d/f")),
            "{listed}"
        );
        let missing = err(&server.run(&["snapshot", "export", "nope", "x.tar"]));
        assert!(missing.contains("snapshot nope not found"), "{missing}");
    }
}
