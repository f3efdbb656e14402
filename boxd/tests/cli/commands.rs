//! `exec`, `logs`, `kill`, `wait`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;

use super::support::{Server, err, feed, out};

fn with_box() -> Server {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    server
}

#[test]
fn exec_runs_in_an_existing_box() {
    let server = with_box();
    let ran = feed(
        &mut server.boxd(&[
            "exec",
            "b",
            "-e",
            "A=1",
            "-w",
            "/tmp",
            "--",
            "sh",
            "-c",
            "cat; echo $A; pwd; exit 6",
        ]),
        b"in\n",
    );
    assert_eq!(
        (out(&ran).as_str(), ran.status.code()),
        ("in\n1\n/tmp\n", Some(6)),
        "{ran:?}"
    );
    let nowhere = server.run(&["exec", "nope", "true"]);
    assert_eq!(nowhere.status.code(), Some(125));
    assert!(
        err(&nowhere).contains("not_found") && err(&nowhere).contains("`boxd ps`"),
        "{nowhere:?}"
    );
    let nothing = err(&server.run(&["logs", "b/nope"]));
    assert!(
        nothing.contains("list its commands with `boxd ps b`"),
        "{nothing}"
    );
    server.ok(&["pause", "b"]);
    let still = err(&server.run(&["exec", "b", "true"]));
    assert!(still.contains("boxd resume b"), "{still}");
    assert!(
        server.ok(&["stats", "--once"]).contains("\nb "),
        "listed without stats"
    );
    server.ok(&["resume", "b"]);
    let again = err(&server.run(&["run", "--name", "b", "--cpus", "0.5", "true"]));
    assert!(
        again.contains("cpus") && again.contains("boxd rm b"),
        "{again}"
    );
}

#[test]
fn ended_commands_are_removed_after_the_configured_retention() {
    let server = Server::with(tempfile::tempdir().unwrap(), |command| {
        command.env("BOXD_RUNTIME_COMMAND_RETENTION_SEC", "0");
    });
    server.ok(&["run", "--name", "b", "echo said"]);
    box_test_wait::blocking::eventually("it is forgotten", || {
        server.ok(&["ps", "-q", "b"]).is_empty()
    });
    let kept = with_box();
    assert_eq!(kept.ok(&["ps", "-q", "b"]).lines().count(), 1, "control");
}

#[test]
fn a_detached_command_continues_and_is_read_followed_and_waited_for() {
    let server = with_box();
    let name = server.ok(&[
        "exec",
        "--detach",
        "b",
        "echo first; echo bad >&2; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo last; exit 9",
    ]);
    let name = name.trim();
    assert!(name.starts_with("b/"), "{name}");
    box_test_wait::blocking::eventually("it has printed both lines", || {
        let printed = server.run(&["logs", name]);
        out(&printed) == "first\n" && err(&printed) == "bad\n"
    });
    let mut following = server
        .boxd(&["logs", "-f", name])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "first\n");
    server.ok(&["exec", "b", "touch /tmp/go"]);
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "last\n");
    assert!(following.wait().unwrap().success());
    assert_eq!(server.run(&["wait", name]).status.code(), Some(9));
    assert_eq!(server.ok(&["logs", "--tail", "1", name]), "last\n");
    assert_eq!(server.ok(&["logs", "-f", "-n", "1", name]), "last\n");
}

#[test]
fn a_command_is_waited_for_and_followed_across_a_server_that_dies() {
    let mut server = with_box();
    let script = "echo one; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo two; exit 7";
    server.ok(&["exec", "--detach", "--id", "c", "b", script]);
    box_test_wait::blocking::eventually("it has begun", || server.ok(&["logs", "b/c"]) == "one\n");
    let mut waiting = server.boxd(&["wait", "b/c"]).spawn().unwrap();
    box_test_wait::blocking::eventually("a client waits for it", || {
        server.json(&["inspect", "b/c"])["attached"] == true
    });
    let mut follow = server.boxd(&["logs", "-f", "b/c"]);
    let mut following = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "one\n");
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = Server::with(directory, |_| {});
    server.ok(&["exec", "b", "touch /tmp/go"]);
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "two\n");
    assert!(following.wait().unwrap().success());
    assert_eq!(waiting.wait().unwrap().code(), Some(7));
}

#[test]
fn an_abnormal_exit_is_explained_with_a_remedy() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "--memory-mb", "64", "true"]);
    let allocation = "python3 -c 'x = b\"x\" * (256 << 20)'";
    let ran = server.run(&["exec", "b", allocation]);
    let stderr_text = err(&ran);
    assert!(!stderr_text.contains("raise --memory-mb"), "{stderr_text}");
    // Without a cgroup, the limit of the process itself refuses the memory.
    let by_limit = stderr_text.contains("MemoryError");
    assert!(
        by_limit || stderr_text.contains("create a box with a higher --memory-mb"),
        "{stderr_text}"
    );
    let late = server.run(&["exec", "--timeout", "200ms", "b", "sleep 100"]);
    assert!(err(&late).contains("raise --timeout"), "{late:?}");
    let arguments = [
        "exec",
        "-d",
        "--id",
        "c",
        "--timeout",
        "200ms",
        "b",
        "sleep 100",
    ];
    server.ok(&arguments);
    let late = server.run(&["wait", "b/c"]);
    assert_eq!(
        (err(&late).as_str(), late.status.code()),
        ("boxd: command timed out\n", Some(124))
    );
}

#[test]
fn a_command_with_a_chosen_id_starts_once() {
    let server = with_box();
    let start = || {
        server.ok(&[
            "exec",
            "--detach",
            "--id",
            "once",
            "b",
            "echo x >> /tmp/count; sleep 100",
        ])
    };
    assert_eq!(
        (start(), start()),
        ("b/once\n".to_owned(), "b/once\n".to_owned())
    );
    box_test_wait::blocking::eventually("it runs", || {
        server.ok(&["exec", "b", "cat /tmp/count 2>/dev/null; true"]) == "x\n"
    });
}

#[test]
fn commands_are_killed_one_by_one_or_all() {
    let server = with_box();
    for id in ["x", "y", "z"] {
        server.ok(&["exec", "-d", "--id", id, "b", "trap '' TERM; sleep 100"]);
    }
    assert_eq!(server.ok(&["kill", "b/x"]), "b/x\n");
    assert_eq!(server.run(&["wait", "b/x"]).status.code(), Some(137));
    let rest = server.ok(&["kill", "b"]);
    assert!(
        rest.contains("b/y") && rest.contains("b/z") && !rest.contains("b/x"),
        "{rest}"
    );
    assert_eq!(
        server.ok(&["exec", "b", "echo the box lives"]),
        "the box lives\n"
    );
    // The client tries all of them, and reports the one that failed.
    server.ok(&["exec", "-d", "--id", "v", "b", "sleep 100"]);
    let some = server.run(&["kill", "nope", "b/nope", "b"]);
    assert_eq!(
        (out(&some).as_str(), some.status.code()),
        ("b/v\n", Some(125))
    );
    let stderr_text = err(&some);
    assert!(
        stderr_text.contains("nope: not_found") && stderr_text.contains("b/nope: not_found"),
        "{stderr_text}"
    );
    assert!(
        stderr_text.contains("`boxd run --name nope …`"),
        "{stderr_text}"
    );
    assert!(err(&server.run(&["wait", "b"])).contains("BOX/COMMAND"));
}

#[test]
fn tail_prints_whole_lines() {
    let server = with_box();
    // More than the client reads first, in lines of very different lengths.
    let text = "seq 1 20000; head -c 100000 /dev/zero | tr '\\0' x; echo; echo; printf end";
    server.ok(&["exec", "--detach", "--id", "c", "b", text]);
    server.run(&["wait", "b/c"]);
    let tail = |lines: &str| server.run(&["logs", "--tail", lines, "b/c"]);
    assert_eq!(out(&tail("1")), "end");
    assert_eq!(out(&tail("2")), "\nend");
    assert_eq!(out(&tail("3")).len(), 100_001 + 4);
    assert!(out(&tail("5")).starts_with("19999\n20000\nxxx"));
    assert_eq!(out(&tail("0")), "");
    let all = server.ok(&["logs", "b/c"]);
    assert!(out(&tail("20003")) == all && out(&tail("99999999")) == all);
}

#[test]
fn a_used_command_id_is_a_conflict() {
    let server = with_box();
    let ran = |arguments: &[&str]| {
        let mut all = vec!["exec", "--id", "job", "b"];
        all.extend(arguments);
        server.run(&all)
    };
    assert_eq!(out(&ran(&["echo one"])), "one\n");
    assert_eq!(out(&ran(&["echo one"])), "one\n", "the same is read again");
    for other in [
        &["echo two"][..],
        &["-w", "/tmp", "echo one"],
        &["-e", "A=1", "echo one"],
    ] {
        let refused = ran(other);
        assert_eq!(refused.status.code(), Some(125), "{other:?} {refused:?}");
        assert!(
            err(&refused).contains("conflict: command_id")
                && err(&refused).contains("boxd logs b/"),
            "{refused:?}"
        );
    }
}

#[test]
fn hints_match_the_error() {
    let server = with_box();
    for arguments in [
        &["exec", "b", "--user", "nobody-here", "true"][..],
        &["exec", "b", "-w", "/not/there", "true"],
        &["exec", "b", "--", "/not/there"],
        &["cp", "/etc/hostname", "b:/usr/x"],
        &["cp", "b:/not/there", "x"],
    ] {
        let refused = err(&server.run(arguments));
        assert!(
            !refused.contains("token") && !refused.contains("boxd ps"),
            "{arguments:?}: {refused}"
        );
    }
}
