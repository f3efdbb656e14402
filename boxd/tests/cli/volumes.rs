//! Volumes on the real program, of root and of an ordinary user, also across `kill -9`.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use box_test_wait::blocking::eventually;

use super::support::{Server, err, out, users};

fn start(user: Option<u32>) -> Server {
    Server::of_user(tempfile::tempdir().unwrap(), user)
}

fn restart(server: Server, user: Option<u32>) -> Server {
    Server::of_user(server.kill(), user)
}

/// Whether the kernel limits the volumes of this user: those of root.
fn is_limited(user: Option<u32>) -> bool {
    user.is_none() && rustix::process::geteuid().is_root()
}

/// The names in the directory of the volumes.
fn folders(server: &Server) -> Vec<String> {
    let folder = server.directory.path().join("state/volumes");
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

/// The loop devices of files below a directory.
fn loops(directory: &Path) -> Vec<PathBuf> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
    let files = files.map(|file| PathBuf::from(file.trim()));
    files.filter(|file| file.starts_with(directory)).collect()
}

#[test]
fn data_of_a_volume_survives_boxes_and_servers() {
    for user in users() {
        let server = start(user);
        assert_eq!(
            server.ok(&["volume", "create", "data", "--size", "64m"]),
            "data\n"
        );
        let run = |server: &Server, text: &str| server.ok(&["run", "-v", "data:/data", text]);
        assert_eq!(
            run(&server, "echo one > /data/f; id -u; stat -c %u /data/f"),
            "1000\n1000\n"
        );
        assert_eq!(run(&server, "cat /data/f; ls -A /data"), "one\nf\n");
        // A box that lives across the kill keeps its volume, and a later box sees its data.
        server.ok(&[
            "run",
            "--name",
            "b",
            "-v",
            "data:/data",
            "echo two > /data/g",
        ]);
        let server = restart(server, user);
        assert_eq!(
            server.ok(&["exec", "b", "cat /data/f /data/g"]),
            "one\ntwo\n"
        );
        let refused = server.run(&["volume", "rm", "data"]);
        assert!(
            err(&refused).contains("volume data: used by 1 box; delete it first"),
            "{refused:?}"
        );
        let second = server.run(&["run", "-v", "data:/data", "true"]);
        assert!(
            err(&second).contains("data is mounted read-write by box b"),
            "{second:?}"
        );
        let reader = [
            "run",
            "-v",
            "data:/data:ro",
            "cat /data/g; touch /data/x || echo no",
        ];
        assert_eq!(out(&server.run(&reader)), "two\nno\n");
        server.ok(&["exec", "b", "echo three > /data/h; sync"]);
        server.ok(&["rm", "-f", "b"]);
        assert_eq!(run(&server, "cat /data/h"), "three\n");
        let inspected = server.json(&["volume", "inspect", "data"]);
        let content = &inspected["content"]["volume"];
        assert_eq!(content["enforced"], is_limited(user), "{inspected}");
        assert!(inspected["size_bytes"].as_u64().is_some(), "{inspected}");
        server.ok(&["volume", "rm", "data"]);
        assert!(folders(&server).is_empty());
        let missing = server.run(&["run", "-v", "data:/data", "true"]);
        assert!(
            err(&missing).contains("volume data not found"),
            "{missing:?}"
        );
        let state = server
            .directory
            .path()
            .join("state")
            .canonicalize()
            .unwrap();
        eventually("no loop device is left", || loops(&state).is_empty());
    }
}

#[test]
fn a_volume_has_a_limit() {
    for user in users() {
        let server = start(user);
        server.ok(&["volume", "create", "small", "--size", "32m"]);
        let fill = "head -c 100000000 /dev/zero > /data/big; echo $?; sleep 100";
        let volume = ["-v", "small:/data"];
        if is_limited(user) {
            let fill = fill.replace(
                "; sleep 100",
                "; rm /data/big; echo ok > /data/f; cat /data/f",
            );
            let ran = server.run(&[&["run"], &volume[..], &[&fill]].concat());
            assert_eq!(out(&ran), "1\nok\n", "{ran:?}");
            assert!(err(&ran).contains("No space left"), "{ran:?}");
            let grown = ["volume", "update", "small", "--size", "256m"];
            server.ok(&grown);
            let ran = server.run(
                &[
                    &["run"],
                    &volume[..],
                    &["head -c 100000000 /dev/zero > /data/big; cat /data/f"],
                ]
                .concat(),
            );
            assert_eq!(out(&ran), "ok\n", "{ran:?}");
        } else {
            let ran = server.run(&[&["run"], &volume[..], &[fill]].concat());
            let reported = err(&ran);
            assert!(
                reported.contains(
                    "size_mb: the files of volume small exceed 32 MiB; the runtime killed the box"
                ),
                "{reported}"
            );
            assert!(reported.contains("volume.limit"), "{reported}");
            let refused = server.run(&["run", "-v", "small:/data", "true"]);
            assert!(
                err(&refused).contains("mount it with ro, or enlarge it"),
                "{refused:?}"
            );
            server.ok(&["run", "-v", "small:/data:ro", "ls /data"]);
            server.ok(&["volume", "update", "small", "--size", "1g"]);
            server.ok(&["run", "-v", "small:/data", "rm /data/big"]);
        }
    }
}

#[test]
fn a_kill_while_volumes_are_made_and_deleted_leaves_nothing_half_made() {
    for user in users() {
        let mut server = start(user);
        server.ok(&["volume", "create", "kept", "--size", "32m"]);
        server.ok(&["run", "-v", "kept:/data", "echo kept > /data/f"]);
        for round in 0..8_u64 {
            let name = format!("v{round}");
            let many = if is_limited(user) { 2 } else { 300 };
            let fill = format!("for n in $(seq {many}); do mkdir -p /data/$n/a/b; done");
            server.ok(&["volume", "create", &name, "--size", "64m"]);
            server.ok(&["run", "-v", &format!("{name}:/data"), &fill]);
            let mut deleting = server.boxd(&["volume", "rm", &name]);
            let mut making = server.boxd(&["volume", "create", &format!("n{round}")]);
            let mut children = [&mut deleting, &mut making].map(|command| {
                let command = command.stdin(Stdio::null()).stdout(Stdio::null());
                command.stderr(Stdio::null()).spawn().unwrap()
            });
            std::thread::sleep(std::time::Duration::from_millis(5 + round * 7));
            server = restart(server, user);
            for child in &mut children {
                child.wait().unwrap();
            }
            // The clients may have repeated their calls at the next server.
            let listed = server.json(&["volume", "ls"]);
            let listed = listed.as_array().unwrap();
            let mut ids: Vec<_> = listed
                .iter()
                .map(|item| item["id"].as_str().unwrap().to_owned())
                .collect();
            assert!(
                listed.iter().all(|item| item["state"] == "ready"),
                "{listed:?}"
            );
            ids.sort();
            let mut found = folders(&server);
            found.sort();
            assert_eq!(found, ids, "round {round}");
            for item in listed {
                let name = item["name"].as_str().unwrap();
                if name != "kept" {
                    server.ok(&["run", "-v", &format!("{name}:/data"), "echo 1 > /data/x"]);
                    server.ok(&["volume", "rm", name]);
                }
            }
        }
        assert_eq!(
            server.ok(&["run", "-v", "kept:/data", "cat /data/f"]),
            "kept\n"
        );
        let state = server
            .directory
            .path()
            .join("state")
            .canonicalize()
            .unwrap();
        eventually("no loop device is left", || loops(&state).is_empty());
    }
}

#[test]
fn volumes_are_listed_tagged_renamed_and_shared() {
    let server = Server::start();
    server.ok(&[
        "volume", "create", "a", "--label", "team=x", "--tag", "latest",
    ]);
    server.ok(&["volume", "create", "b", "--shared", "--size", "1g"]);
    assert_eq!(server.ok(&["volume", "ls", "-q"]), "a\nb\n");
    assert_eq!(
        server.ok(&["volume", "ls", "-q", "--label", "team=x"]),
        "a\n"
    );
    let table = server.ok(&["volume", "ls"]);
    assert!(
        table.starts_with("VOLUME") && table.contains("1024 MiB"),
        "{table}"
    );
    assert_eq!(
        server.ok(&["run", "-v", "latest:/d", "echo 1 > /d/f; cat /d/f"]),
        "1\n"
    );
    server.ok(&["volume", "update", "b", "--tag", "latest", "--name", "c"]);
    assert_eq!(server.json(&["volume", "inspect", "latest"])["name"], "c");
    for name in ["one", "two"] {
        server.ok(&[
            "run",
            "--name",
            name,
            "-v",
            "c:/d",
            "touch /d/$HOSTNAME; ls /d",
        ]);
    }
    assert_eq!(server.ok(&["exec", "two", "ls /d"]), "one\ntwo\n");
    assert_eq!(server.json(&["volume", "inspect", "c"])["used_by"], 2);
    server.ok(&[
        "run",
        "-v",
        "a:/d:sub=in/side",
        "touch /d/file; ls -d /d/in && exit 1 || true",
    ]);
    let show = "ls /d; touch /d/more || echo read-only";
    let shown = server.run(&["run", "-v", "a:/d:ro,sub=in/side", show]);
    assert_eq!(out(&shown), "file\nread-only\n", "{shown:?}");
    let outside = server.run(&["run", "-v", "a:/d:sub=../b", "true"]);
    assert!(err(&outside).contains("sub_path: must be"), "{outside:?}");
    let taken = server.run(&["volume", "create", "a"]);
    assert!(err(&taken).contains("name: a is taken"), "{taken:?}");
    let small = server.run(&["volume", "create", "s", "--size", "1m"]);
    assert!(
        err(&small).contains("size_mb: must be between 16"),
        "{small:?}"
    );
    let reserved = server.run(&["run", "-v", "a:/proc", "true"]);
    assert!(err(&reserved).contains("reserved"), "{reserved:?}");
    let conflict = server.run(&["run", "--name", "one", "-v", "a:/d", "true"]);
    assert!(
        err(&conflict).contains("volumes: box one has "),
        "{conflict:?}"
    );
}
