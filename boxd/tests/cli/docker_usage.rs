//! Options and habits of container engines: they work as expected, or the error names the right
//! option.

use std::process::Output;

use box_test_wait::blocking::eventually;

use super::support::{Server, boxd, err, feed, out};

fn run(arguments: &[&str]) -> Output {
    feed(boxd().arg("run").args(arguments), b"")
}

#[test]
fn options_of_container_engines_work() {
    let (shared, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(kept.path().join("f"), "kept").unwrap();
    let volume = format!("{}:/data", shared.path().display());
    let read_only = format!("{}:/kept:ro", kept.path().display());
    let text = "id -un; pwd; echo $A > /data/f; cat /kept/f; touch /kept/g || echo refused";
    let mut options = vec!["-i", "--rm", "-v", &volume, "-v", &read_only];
    options.extend([
        "-e",
        "A=b",
        "-w",
        "/tmp",
        "-u",
        "box",
        "-m",
        "128m",
        "--network",
        "none",
    ]);
    options.push(text);
    let ran = run(&options);
    assert_eq!(out(&ran), "box\n/tmp\nkeptrefused\n", "{ran:?}");
    let written = std::fs::read_to_string(shared.path().join("f")).unwrap();
    assert_eq!(written, "b\n");
    let workspace = format!("{}:/workspace", shared.path().display());
    let ran = run(&["-v", &workspace, "cat f"]);
    assert_eq!(out(&ran), "b\n", "{ran:?}");
}

#[test]
fn unsupported_options_name_the_alternative() {
    for (arguments, says) in [
        (&["-p", "8080:80", "true"][..], "boxd port NAME PORT"),
        (&["-v", "/data", "true"], "expected DIR:PATH"),
        (&["-v", "cache", "true"], "expected NAME:PATH"),
        (&["-m", "5q", "true"], "use k, m, g or t"),
        (&["--keep", "true"], "--name"),
        (&["--ttl", "1h", "true"], "--name"),
    ] {
        let refused = run(arguments);
        assert!(!refused.status.success(), "{refused:?}");
        assert!(err(&refused).contains(says), "{refused:?}");
    }
    let empty_dir = tempfile::tempdir().unwrap();
    let mut detached = boxd();
    detached.env("BOXD_SERVER_STATE_DIR", empty_dir.path());
    let refused = feed(detached.args(["run", "-d", "true"]), b"");
    assert!(err(&refused).contains("boxd serve"), "{refused:?}");
}

#[test]
fn a_detached_command_continues_and_has_a_name() {
    let server = Server::start();
    let named = server.ok(&["run", "-d", "--name", "job", "echo out; exit 3"]);
    let (name, _) = named.trim().split_once('/').unwrap();
    assert_eq!(name, "job");
    assert_eq!(server.run(&["wait", named.trim()]).status.code(), Some(3));
    assert_eq!(server.ok(&["logs", named.trim()]), "out\n");
    let unnamed = server.ok(&["run", "--detach", "--rm", "exit 4"]);
    let unnamed = unnamed.trim();
    assert_eq!(server.run(&["wait", unnamed]).status.code(), Some(4));
    let (name, _) = unnamed.split_once('/').unwrap();
    let answer = server.json(&["inspect", name]);
    assert_eq!(answer["box"]["lifetime"]["idle_ms"], 10_000, "{answer}");
}

#[test]
fn rm_deletes_a_named_box() {
    let server = Server::start();
    let ran = server.ok(&["run", "--rm", "--name", "brief", "echo $((40 + 2))"]);
    assert_eq!(
        (ran.as_str(), server.ok(&["ps", "-q"]).as_str()),
        ("42\n", "")
    );
    server.ok(&["run", "--name", "brief", "true"]);
    // A persistent box is not used for a run that deletes its box.
    let refused = server.run(&["run", "--rm", "--name", "brief", "true"]);
    assert!(err(&refused).contains("already exists"), "{refused:?}");
    assert_eq!(server.ok(&["ps", "-q"]), "brief\n");
}

#[test]
fn a_detached_run_with_rm_refuses_an_existing_box() {
    let server = Server::start();
    let idle = |name: &str| server.json(&["inspect", name])["box"]["lifetime"]["idle_ms"].clone();
    server.ok(&["run", "--name", "kept", "--ttl", "2h", "touch /tmp/f"]);
    let refused = server.run(&["run", "-d", "--rm", "--name", "kept", "rm /tmp/f"]);
    let stderr_text = err(&refused);
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(
        stderr_text.contains("--rm: box kept already exists"),
        "{stderr_text}"
    );
    assert_eq!(idle("kept"), 7_200_000);
    server.ok(&["exec", "kept", "test -e /tmp/f"]);
    server.ok(&["run", "-d", "--rm", "--name", "brief", "true"]);
    assert_eq!(idle("brief"), 10_000, "control: one that is new");
}

#[test]
fn ttl_and_keep_set_the_lifetime_of_a_named_box() {
    let server = Server::start();
    let idle = |name: &str| server.json(&["inspect", name])["box"]["lifetime"]["idle_ms"].clone();
    server.ok(&["run", "--name", "usual", "true"]);
    assert_eq!(idle("usual"), serde_json::Value::Null);
    server.ok(&["run", "--name", "long", "--ttl", "2h", "touch /tmp/f"]);
    assert_eq!(idle("long"), 7_200_000);
    // The same box, with a new lifetime. Unset options stay.
    server.ok(&["run", "--name", "long", "--ttl", "3h", "test -e /tmp/f"]);
    server.ok(&["run", "--name", "long", "test -e /tmp/f"]);
    assert_eq!(idle("long"), 10_800_000);
    server.ok(&["run", "--name", "long", "--keep", "test -e /tmp/f"]);
    let kept = idle("long").as_u64().unwrap();
    assert!(kept > 1_000_000_000_000_000, "{kept}");
    // A lifetime shorter than the idle time so far begins now.
    let unused = || {
        let answer = server.json(&["inspect", "long"]);
        let last = answer["box"]["last_used_at"].as_u64().unwrap();
        std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() > u128::from(last) + 6_000
    };
    eventually("the box is idle for six seconds", unused);
    server.ok(&["run", "--name", "long", "--ttl", "5s", "test -e /tmp/f"]);
    server.ok(&["run", "--name", "long", "--keep", "test -e /tmp/f"]);
}

#[test]
fn idle_and_expired_boxes_are_kept_and_woken_if_asked() {
    let server = Server::start();
    let info = |name: &str| server.json(&["inspect", name])["box"].clone();
    let is = |name: &str, state: &str| {
        let what = format!("{name} is {state}");
        eventually(&what, || info(name)["state"] == state);
    };
    let idle = ["--ttl", "1s", "--on-idle", "stop", "--wake"];
    server.ok(&[&["run", "--name", "idle"], &idle[..], &["echo 1 > /tmp/f"]].concat());
    is("idle", "stopped");
    assert_eq!(server.ok(&["exec", "idle", "cat /tmp/f"]), "1\n");
    is("idle", "stopped");
    let expires = ["--expire", "2s", "--on-expiry", "stop", "--keep"];
    let run = [&["run", "--name", "expires"], &expires[..]].concat();
    server.ok(&[&run[..], &["echo 2 > /tmp/f"]].concat());
    assert!(info("expires")["lifetime"]["expires_at"].is_u64());
    is("expires", "stopped");
    // The box is stopped a moment earlier.
    eventually("the expiry is over", || {
        info("expires")["lifetime"]["expires_at"].is_null()
    });
    let asleep = server.run(&["exec", "expires", "cat /tmp/f"]);
    assert!(
        err(&asleep).contains("box expires: is stopped; start it"),
        "{asleep:?}"
    );
    server.ok(&["start", "expires"]);
    assert_eq!(server.ok(&["exec", "expires", "cat /tmp/f"]), "2\n");
    // Only the options that are given change an existing box.
    server.ok(&["run", "--name", "expires", "--wake", "true"]);
    let lifetime = &info("expires")["lifetime"];
    assert_eq!(
        (&lifetime["wake"], &lifetime["on_expiry"]),
        (&true.into(), &"stop".into())
    );
    let unnamed = server.run(&["run", "--on-idle", "stop", "true"]);
    assert!(
        err(&unnamed).contains("--on-idle: requires --name"),
        "{unnamed:?}"
    );
}

#[test]
fn a_named_shell_keeps_its_state() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let exec = |shell: &str, text: &str| server.run(&["exec", "--shell", shell, "b", text]);
    let first = exec("s", "cd /tmp; export A=b; C=d; echo first");
    assert_eq!(out(&first), "first\n", "{first:?}");
    let second = exec("s", "pwd; echo $A $C; echo err >&2; exit 3");
    assert_eq!(
        (out(&second).as_str(), err(&second).as_str()),
        ("/tmp\nb d\n", "err\n")
    );
    assert_eq!(second.status.code(), Some(3), "{second:?}");
    let other = exec("t", "pwd; echo [$A]");
    assert_eq!(out(&other), "/workspace\n[]\n", "control: {other:?}");
    // The command reads exactly the bytes of the client.
    let mut reads = server.boxd(&["exec", "--shell", "t", "b", "cat | wc -c"]);
    assert_eq!(out(&feed(&mut reads, &[0xff; 1000])).trim(), "1000");
    let late = ["--timeout", "300ms", "b", "sleep 100"];
    let late = server.run(&[&["exec", "--shell", "u"], &late[..]].concat());
    assert_eq!(late.status.code(), Some(124), "{late:?}");
}

#[test]
fn a_recreated_box_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::with(directory, |_| {});
    let gone = |name: &str| server.ok(&["ps", "-q"]).lines().all(|line| line != name);
    let says_nothing = |arguments: &[&str]| {
        let ran = server.run(arguments);
        assert!(ran.status.success() && err(&ran).is_empty(), "{ran:?}");
    };
    says_nothing(&["run", "--name", "b", "--ttl", "1s", "touch /tmp/f"]);
    says_nothing(&["run", "--name", "c", "--ttl", "1s", "true"]);
    eventually("idle boxes end", || gone("b") && gone("c"));
    let ran = server.run(&["run", "--name", "b", "test -e /tmp/f || echo empty"]);
    let stderr_text = err(&ran);
    assert_eq!(out(&ran), "empty\n", "{ran:?}");
    assert!(
        stderr_text.starts_with("boxd: box b is new and empty"),
        "{stderr_text}"
    );
    assert!(stderr_text.contains("idle for too long"), "{stderr_text}");
    assert!(
        stderr_text.contains("--keep") && stderr_text.lines().count() == 1,
        "{stderr_text}"
    );
    // The box exists now. A box that was deleted on request is expected to be absent.
    says_nothing(&["run", "--name", "b", "true"]);
    server.ok(&["rm", "b"]);
    says_nothing(&["run", "--name", "b", "true"]);
    // The next server knows this as well.
    server.signal(rustix::process::Signal::TERM);
    let mut server = server;
    server.child.wait().unwrap();
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = Server::with(directory, |_| {});
    let stderr_text = err(&server.run(&["--json", "run", "--name", "c", "true"]));
    let answer: serde_json::Value = serde_json::from_str(&stderr_text).unwrap();
    assert_eq!(answer["new"]["box"], "c", "{answer}");
    let stderr_text = err(&server.run(&["run", "--name", "b", "true"]));
    assert!(stderr_text.contains("is new and empty"), "{stderr_text}");
}

#[test]
fn the_host_name_of_a_box_is_its_name() {
    let server = Server::start();
    let answer = server.ok(&[
        "run",
        "--name",
        "My_work",
        "hostname; cat /etc/hostname; getent hosts $(hostname)",
    ]);
    let lines: Vec<_> = answer.lines().collect();
    assert_eq!(lines[..2], ["My-work", "My-work"], "{answer}");
    assert!(
        lines[2].starts_with("::1 ") || lines[2].starts_with("127.0.0.1 "),
        "{answer}"
    );
    assert_eq!(out(&run(&["hostname"])), "box\n", "one without a name");
}
