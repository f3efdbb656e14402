//! Templates and prepared boxes on the real program, of root and of an ordinary user.

use super::support::{Server, err, out, users};

#[test]
fn a_template_fills_what_a_request_leaves_out() {
    for user in users() {
        let server = Server::of_user(tempfile::tempdir().unwrap(), user);
        server.ok(&[
            "template",
            "create",
            "web",
            "-m",
            "128m",
            "--env",
            "GREETING=hello",
            "--label",
            "team=x",
            "--prepare",
            "echo $GREETING > /tmp/made",
            "--prepare",
            "cat /tmp/made",
        ]);
        assert_eq!(server.ok(&["template", "ls", "-q"]), "web\n");
        let run = ["run", "--template", "web", "cat /tmp/made; echo $GREETING"];
        assert_eq!(server.ok(&run), "hello\nhello\n");
        server.ok(&[
            "run",
            "--name",
            "b",
            "--template",
            "web",
            "--memory",
            "256m",
            "true",
        ]);
        let info = server.json(&["inspect", "b"]);
        assert_eq!(
            (&info["box"]["memory_mb"], &info["box"]["template"]),
            (&256.into(), &"web".into())
        );
        assert_eq!(server.ok(&["logs", "b/prepare-2"]), "hello\n");
        // The template survives its server, and the box that was made from it.
        let server = Server::of_user(server.kill(), user);
        assert_eq!(server.ok(&["exec", "b", "cat /tmp/made"]), "hello\n");
        server.ok(&["template", "update", "web", "--name", "page", "-m", "64m"]);
        let page = server.json(&["template", "inspect", "page"]);
        assert_eq!(
            page["content"]["template"]["spec"],
            serde_json::json!({"memory_mb": 64})
        );
        let same = server.run(&["run", "--name", "b", "--template", "web", "cat /tmp/made"]);
        assert_eq!(out(&same), "hello\n", "{same:?}");
        server.ok(&["template", "rm", "page"]);
        let missing = server.run(&["run", "--template", "page", "true"]);
        assert!(
            err(&missing).contains("template page not found"),
            "{missing:?}"
        );
    }
}

#[test]
fn a_failed_preparation_shows_its_last_lines_and_leaves_no_box() {
    let server = Server::start();
    let fails = "seq 100; printf '\\033[31mbroken\\n' >&2; exit 7";
    let ran = server.run(&[
        "run",
        "--name",
        "b",
        "--prepare",
        "true",
        "--prepare",
        fails,
        "echo ready",
    ]);
    let reported = err(&ran);
    assert!(
        reported.contains("prepare: command 2 of 2 exited with code 7: \u{fffd}[31mbroken"),
        "{reported}"
    );
    assert!(reported.contains("\n      100\n"), "{reported}");
    assert!(!reported.contains("\n      80\n"), "{reported}");
    assert_eq!((out(&ran).as_str(), ran.status.code()), ("", Some(125)));
    assert_eq!(server.ok(&["ps", "-q"]), "");
    let slow = [
        "run",
        "--prepare",
        "echo begun; sleep 1000",
        "--prepare-timeout",
        "1",
        "true",
    ];
    let mut slow = slow.to_vec();
    slow.splice(1..1, ["--name", "slow"]);
    let ran = server.run(&slow);
    assert!(
        err(&ran).contains("prepare: command 1 of 1 did not end within 1 s: begun"),
        "{ran:?}"
    );
    // Without a server as well.
    let ran = super::support::feed(
        super::support::boxd().args(["run", "--prepare", "echo 1 > /tmp/f", "cat /tmp/f"]),
        b"",
    );
    assert_eq!(out(&ran), "1\n", "{ran:?}");
}

#[test]
fn policy_is_above_a_template() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("boxd.toml");
    let text = "[policy]\nprofile = \"small\"\n[[policy.profiles]]\nname = \"small\"\nmemory_mb = 64\nlocked = [\"memory_mb\", \"network\"]\nmax_timeout_sec = 60\nmax_command_sec = 60\n";
    std::fs::write(&config, text).unwrap();
    let server = Server::with(directory, |command| {
        command.arg("--config").arg(&config);
    });
    server.ok(&[
        "template",
        "create",
        "big",
        "-m",
        "4g",
        "--network",
        "on",
        "--prepare",
        "true",
    ]);
    let ran = server.run(&["run", "--name", "b", "--template", "big", "true"]);
    let reported = err(&ran);
    for adjusted in [
        "memory_mb: 64 instead of 4096",
        "network: off instead of on",
        "prepare.timeout_sec: 60 instead of 300",
    ] {
        assert!(reported.contains(adjusted), "{reported}");
    }
    let info = server.json(&["inspect", "b"]);
    assert_eq!(
        (&info["box"]["memory_mb"], &info["box"]["network"]),
        (&64.into(), &"off".into())
    );
}
