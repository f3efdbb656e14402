//! A server whose disk is full refuses what needs room, and its boxes keep their files.

use std::path::PathBuf;
use std::process::Command;

use box_test_wait::blocking::eventually;

use super::support::{BOXD, Server, err};

/// Starts a server whose state directory is a small file system. Only root may mount one.
fn small() -> Server {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let script =
        "mkdir \"$3\" && mount -t tmpfs -o size=48m,mode=700 none \"$3\" && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, BOXD]);
    Server::spawn(command, directory, |command| {
        // Other mount namespaces do not see the state directory.
        command
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()));
    })
}

/// The state directory, as the server sees it.
fn inside(server: &Server) -> PathBuf {
    let state = server.directory.path().join("state");
    format!("/proc/{}/root{}", server.child.id(), state.display()).into()
}

#[test]
fn a_full_disk_refuses_by_name_and_loses_no_file() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let server = small();
    let refused = |arguments: &[&str], error: &str| {
        let refused = server.run(arguments);
        assert!(!refused.status.success(), "{refused:?}");
        assert!(err(&refused).contains(error), "{arguments:?}: {refused:?}");
    };
    server.ok(&["run", "--name", "a", "--disk-mb", "1g", "true"]);
    server.ok(&["rm", "-f", "a"]);
    let sum = "sha256sum < ~/file";
    let fill = format!("head -c 80000000 /dev/urandom > ~/file; {sum}");
    let written = server.ok(&["run", "--name", "b", "--keep", &fill]);
    // The copy or the record of the box has no room.
    let no_room = "the server's disk has no room for";
    refused(&["snapshot", "b", "s"], no_room);
    refused(&["fork", "b", "-n", "2"], no_room);
    refused(&["checkpoint", "b"], no_room);
    refused(&["stop", "b"], no_room);
    assert_eq!(server.json(&["snapshot", "ls"]), serde_json::json!([]));
    assert_eq!(server.ok(&["ps", "-q"]), "b\n");
    assert_eq!(server.ok(&["exec", "b", sum]), written);
    // With no room at all, the machine makes neither boxes nor items.
    let state = inside(&server);
    let filler = state.join("filler");
    let written_all = std::fs::write(&filler, vec![0; 60 << 20]);
    assert_eq!(
        written_all.unwrap_err().kind(),
        std::io::ErrorKind::StorageFull
    );
    refused(
        &["volume", "create", "v"],
        "capacity: catalog: no space left",
    );
    refused(
        &["run", "--name", "c", "true"],
        "capacity: the server's disk has no room",
    );
    // With little room, a disk cannot be formatted.
    let opened = std::fs::OpenOptions::new().write(true).open(&filler);
    let opened = opened.unwrap();
    let length = opened.metadata().unwrap().len();
    opened.set_len(length - (48 << 10)).unwrap();
    let large = ["run", "--name", "d", "--disk-mb", "2g", "true"];
    refused(&large, "capacity: the server's disk has no room");
    refused(&["exec", "d", "true"], "box d not found: the ");
    assert_eq!(server.ok(&["exec", "b", sum]), written);
    std::fs::remove_file(filler).unwrap();
    server.ok(&["run", "--name", "c", "true"]);
    server.ok(&["rm", "-f", "b", "c"]);
    eventually("no layer is left", || {
        std::fs::read_dir(state.join("layers"))
            .unwrap()
            .next()
            .is_none()
    });
}
