//! Pools on the real program, of root and of an ordinary user, also across `kill -9`.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use box_test_wait::blocking::eventually;
use serde_json::{Value, json};

use super::support::{Server, err, mark, running, users};

/// Creates a template with this spec, and a pool of it.
fn create(server: &Server, spec: &Value, size: usize) {
    let path = server.directory.path().join("spec.json");
    std::fs::write(&path, spec.to_string()).unwrap();
    server.ok(&["template", "create", "web", "--spec", text(&path)]);
    let size = size.to_string();
    let create = [
        "pool",
        "create",
        "ready",
        "--template",
        "web",
        "--size",
        &size,
    ];
    server.ok(&create);
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A spec whose boxes each have one process with this argument, and a file.
fn marked(mark: &str, prepare: &str) -> Value {
    json!({
        "main": {"argv": ["sleep", mark]},
        "prepare": {"commands": [{"text": prepare}]},
    })
}

fn wait_ready(server: &Server, size: usize) {
    eventually("the pool is full", || {
        let pool = server.json(&["pool", "inspect", "ready"]);
        pool["content"]["pool"]["ready"] == size
    });
}

fn boxes(server: &Server) -> Vec<String> {
    let names = server.ok(&["ps", "-q"]);
    names.lines().map(str::to_owned).collect()
}

#[test]
fn a_pool_gives_prepared_boxes_or_the_reason_why_not() {
    for user in users() {
        let server = Server::of_user(tempfile::tempdir().unwrap(), user);
        let mark = mark();
        create(&server, &marked(&mark, "echo made > /tmp/made"), 2);
        wait_ready(&server, 2);
        assert_eq!(boxes(&server), Vec::<String>::new());
        assert_eq!(running(&mark), 2);
        let shown = server.ok(&["pool", "ls"]);
        assert!(shown.contains("2 of 2"), "{shown}");

        let run = ["run", "--pool", "ready", "cat /tmp/made"];
        assert_eq!(server.ok(&run), "made\n");
        server.ok(&["run", "--name", "a", "--pool", "ready", "touch /tmp/mine"]);
        let info = &server.json(&["inspect", "a"])["box"];
        assert_eq!(
            (&info["pool"], &info["pool_missed"]),
            (&json!("ready"), &Value::Null)
        );
        // A template has the boxes of its pools.
        wait_ready(&server, 2);
        let by_template = ["run", "--name", "b", "--template", "web"];
        server.ok(&[&by_template[..], &["ls /tmp/mine || touch /tmp/mine"]].concat());
        assert_eq!(server.json(&["inspect", "b"])["box"]["pool"], "ready");
        let cold = server.run(&[
            "run", "--name", "c", "--pool", "ready", "-m", "300m", "true",
        ]);
        assert!(
            err(&cold).contains("boxd: not from the pool: pool ready:"),
            "{cold:?}"
        );
        let info = &server.json(&["inspect", "c"])["box"];
        let missed = "pool ready: the request has another memory_mb than its boxes";
        assert_eq!(
            (&info["pool"], &info["pool_missed"]),
            (&Value::Null, &json!(missed))
        );

        let refused = server.run(&["template", "rm", "web"]);
        let used = "template web: used by 1 pool; delete it first";
        assert!(err(&refused).contains(used), "{refused:?}");
        server.ok(&["pool", "update", "ready", "--size", "1", "--name", "small"]);
        eventually("a box ends", || running(&mark) == 3 + 1);
        server.ok(&["pool", "rm", "small"]);
        assert_eq!(running(&mark), 3);
        server.ok(&["template", "rm", "web"]);
        let missing = server.run(&["run", "--pool", "small", "true"]);
        assert!(
            err(&missing).contains("pool small not found"),
            "{missing:?}"
        );
    }
}

#[test]
fn a_pool_that_cannot_be_filled_shows_the_reason() {
    let server = Server::start();
    let mark = mark();
    create(&server, &marked(&mark, "echo no package; exit 3"), 1);
    let reason = "prepare: command 1 of 1 exited with code 3: no package";
    eventually("the pool has failed", || {
        let pool = server.json(&["pool", "inspect", "ready"]);
        pool["state"] == "failed" && pool["reason"] == reason
    });
    assert!(server.ok(&["pool", "ls"]).contains(reason));
    // A change of the template starts boxes at once.
    let spec = marked(&mark, "true").to_string();
    let path = server.directory.path().join("spec.json");
    std::fs::write(&path, spec).unwrap();
    server.ok(&["template", "update", "web", "--spec", text(&path)]);
    wait_ready(&server, 1);
    assert_eq!(server.json(&["pool", "inspect", "ready"])["state"], "ready");
}

#[test]
fn policy_decides_the_boxes_of_a_pool() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("boxd.toml");
    let policy = |memory: u64| {
        format!(
            "[policy]\nprofile = \"small\"\n[[policy.profiles]]\nname = \"small\"\n\
             memory_mb = {memory}\nlocked = [\"memory_mb\"]\n"
        )
    };
    std::fs::write(&config, policy(64)).unwrap();
    let server = Server::with(directory, |command| {
        command.arg("--config").arg(&config);
    });
    create(&server, &json!({"memory_mb": 4096}), 1);
    wait_ready(&server, 1);
    let run = |name: &str| {
        server.ok(&["run", "--name", name, "--pool", "ready", "true"]);
        let info = &server.json(&["inspect", name])["box"];
        (info["pool"].clone(), info["memory_mb"].clone())
    };
    assert_eq!(run("a"), (json!("ready"), json!(64)));
    wait_ready(&server, 1);
    // The boxes that wait follow a new policy.
    std::fs::write(&config, policy(96)).unwrap();
    server.signal(rustix::process::Signal::HUP);
    let mut number = 0;
    eventually("the pool has boxes of the new policy", || {
        number += 1;
        run(&format!("b{number}")) == (json!("ready"), json!(96))
    });
}

#[test]
fn a_kill_while_boxes_are_taken_and_started_loses_none_and_leaves_none() {
    const SIZE: usize = 2;
    for user in users() {
        let mut server = Server::of_user(tempfile::tempdir().unwrap(), user);
        let mark = mark();
        create(
            &server,
            &marked(&mark, "echo made > /tmp/made; sleep 0.2"),
            SIZE,
        );
        let mut kept: Vec<String> = Vec::new();
        for round in 0..6_u64 {
            // With a full pool, a box is taken and then the pool refilled. An empty one is filled.
            if round % 3 != 2 {
                wait_ready(&server, SIZE);
            }
            let name = format!("r{round}");
            let mut taking = server
                .boxd(&["run", "--name", &name, "--pool", "ready", "true"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            if round % 2 == 0 {
                // In the middle of the call.
                std::thread::sleep(Duration::from_millis(5 + round * 4));
            } else {
                // Right after it, while the pool is refilled.
                assert!(taking.wait().unwrap().success());
            }
            server = Server::of_user(server.kill(), user);
            if taking.wait().unwrap().success() {
                kept.push(name);
            }
            let found = boxes(&server);
            for name in &kept {
                assert!(found.contains(name), "{name} is lost: {found:?}");
            }
            for name in &found {
                let made = server.ok(&["exec", name, "cat /tmp/made"]);
                assert_eq!(made, "made\n", "{name}");
            }
        }
        wait_ready(&server, SIZE);
        let found = boxes(&server);
        eventually("no box is left over", || {
            running(&mark) == found.len() + SIZE
        });
        // A server that ends by itself leaves no boxes of pools either, if it keeps the others.
        let directory = server.kill();
        let mut server = server_that_keeps_boxes(directory, user);
        wait_ready(&server, SIZE);
        server.signal(rustix::process::Signal::TERM);
        assert!(server.child.wait().unwrap().success());
        assert_eq!(running(&mark), found.len());
        let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
        drop(Server::of_user(directory, user));
        assert_eq!(running(&mark), 0);
    }
}

/// A server that keeps its boxes when it ends.
fn server_that_keeps_boxes(directory: tempfile::TempDir, user: Option<u32>) -> Server {
    let config = directory.path().join("keep.toml");
    std::fs::write(&config, "[server]\nkeep_boxes = true\n").unwrap();
    Server::of_user_with(directory, user, |command| {
        command.arg("--config").arg(&config);
    })
}
