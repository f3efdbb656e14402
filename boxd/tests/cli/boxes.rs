//! `ps`, `inspect`, `pause`, `resume`, `stats`, `rm`.

use serde_json::json;

use super::support::{Server, err, out};

#[test]
fn ps_prints_a_table_ids_or_json() {
    let server = Server::start();
    assert_eq!(server.json(&["ps"]), json!([]));
    for name in ["one", "two"] {
        server.ok(&["run", "--name", name, "true"]);
    }
    let table = server.ok(&["ps"]);
    let lines: Vec<_> = table.lines().collect();
    assert!(
        lines[0].starts_with("BOX") && lines[1].starts_with("one") && lines[2].starts_with("two"),
        "{table}"
    );
    assert!(!table.contains('\x1b'), "a pipe gets no colours");
    assert_eq!(server.json(&["ps"])[1]["box_id"], "two");
    let commands = server.json(&["ps", "one"]);
    assert_eq!(
        (
            &commands[0]["program"]["text"],
            &commands[0]["exit"]["code"]
        ),
        (&json!("true"), &json!(0))
    );
}

#[test]
fn inspect_shows_a_box_and_a_command() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let id = server.ok(&["exec", "--detach", "--id", "c", "b", "exit 3"]);
    assert_eq!(id, "b/c\n");
    server.run(&["wait", "b/c"]);
    let answer = server.json(&["inspect", "b"]);
    assert_eq!(
        (&answer["box"]["state"], &answer["guest"]["user"]),
        (&json!("running"), &json!("box"))
    );
    assert_eq!(server.json(&["inspect", "b/c"])["exit"]["code"], 3);
    let missing = server.run(&["inspect", "b/nope"]);
    assert!(err(&missing).contains("boxd ps b"), "{missing:?}");
    let missing = server.run(&["--json", "inspect", "b/nope"]);
    let answer: serde_json::Value = serde_json::from_str(&err(&missing)).unwrap();
    assert_eq!(answer["error"]["code"], "not_found");
}

#[test]
fn a_paused_box_refuses_until_it_resumes() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    assert_eq!(server.ok(&["pause", "b"]), "b\n");
    assert_eq!(server.json(&["ps"])[0]["state"], "paused");
    let refused = server.run(&["exec", "b", "true"]);
    assert!(
        err(&refused).contains("conflict") && refused.status.code() == Some(125),
        "{refused:?}"
    );
    server.ok(&["resume", "b"]);
    server.ok(&["exec", "b", "true"]);
}

#[test]
fn stats_are_shown_once_in_a_pipe() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let table = server.ok(&["stats"]);
    assert!(
        table.starts_with("BOX") && table.contains("\nb "),
        "{table}"
    );
    assert!(server.json(&["stats", "b"])["b"]["pids"].as_u64().unwrap() >= 1);
    assert!(err(&server.run(&["stats", "nope"])).contains("not_found"));
}

#[test]
fn boxes_are_deleted_one_by_one_or_all() {
    let server = Server::start();
    for name in ["a", "b", "c"] {
        server.ok(&["run", "--name", name, "true"]);
    }
    let some = server.run(&["rm", "a", "nope"]);
    assert_eq!(
        (out(&some).as_str(), some.status.code()),
        ("a\n", Some(125))
    );
    assert!(err(&some).contains("nope: not_found"), "{some:?}");
    assert!(
        err(&some).contains("list the boxes with `boxd ps`"),
        "{some:?}"
    );
    for command in ["rm", "pause", "kill"] {
        let some = server.run(&[command, "--json", "nope"]);
        let answer: serde_json::Value = serde_json::from_str(&err(&some)).unwrap();
        let error = &answer["error"];
        assert_eq!(
            (&error["code"], &error["about"]),
            (&json!("not_found"), &json!("nope")),
            "{some:?}"
        );
        assert!(
            error["next"].as_str().unwrap().contains("boxd ps"),
            "{answer}"
        );
    }
    assert_eq!(
        server.json(&["rm", "--all"]),
        json!({"deleted": ["b", "c"]})
    );
    assert_eq!(server.ok(&["ps", "-q"]), "");
}

#[test]
fn a_box_in_use_is_deleted_by_force_only() {
    let server = Server::start();
    for name in ["busy", "paused", "idle"] {
        server.ok(&["run", "--name", name, "true"]);
    }
    server.ok(&["exec", "--detach", "--id", "job", "busy", "sleep 1000"]);
    server.ok(&["pause", "paused"]);
    let refused = server.run(&["rm", "--all"]);
    assert_eq!(
        (out(&refused).as_str(), refused.status.code()),
        ("idle\n", Some(125))
    );
    let answer = err(&refused);
    assert!(
        answer.contains("busy: conflict: in use: busy/job is running; delete it with --force")
            && answer.contains("paused: conflict: in use: paused"),
        "{answer}"
    );
    assert_eq!(
        server.ok(&["rm", "--force", "busy", "paused"]),
        "busy\npaused\n"
    );
}

#[test]
fn a_stopped_box_keeps_its_files_and_starts_again() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "echo kept > /tmp/f"]);
    assert_eq!(server.ok(&["stop", "b"]), "b\n");
    assert_eq!(server.json(&["ls"])[0]["state"], "stopped");
    let refused = err(&server.run(&["exec", "b", "true"]));
    assert!(refused.contains("boxd start b"), "{refused}");
    assert_eq!(server.ok(&["start", "b"]), "b\n");
    assert_eq!(server.ok(&["exec", "b", "cat /tmp/f"]), "kept\n");
}

#[test]
fn control_characters_are_escaped() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let evil = "true \u{9b}2J \u{202e}txt \x1b[2J \u{200b}";
    server.ok(&["exec", "--id", "c", "b", "--", "sh", "-c", evil]);
    let unsafe_in = |text: &str| {
        text.chars()
            .any(|c| c != '\n' && box_protocol::is_invisible(c))
    };
    for arguments in [
        &["inspect", "b/c"][..],
        &["ps", "b"],
        &["--json", "ps", "b"],
        &["inspect", "b/\u{9b}2J"],
        &["exec", "b", "-w", "/\u{9b}2J", "true"],
        &["cp", "b:/\u{202e}x", "x"],
        &["rm", "\u{9b}2J"],
        &["--json", "rm", "\u{9b}2J"],
    ] {
        let ran = server.run(arguments);
        for text in [out(&ran), err(&ran)] {
            assert!(!unsafe_in(&text), "{arguments:?}: {text:?}");
        }
    }
    let answer = server.json(&["inspect", "b/c"]);
    assert_eq!(answer["program"]["argv"][2], evil, "nothing is lost");
    for id in ["a\u{202e}b", "a\u{9b}b", "a\u{200b}b"] {
        let refused = err(&server.run(&["run", "--name", id, "true"]));
        assert!(refused.contains("name: must not contain"), "{refused}");
    }
}

#[test]
fn a_shell_completes_the_names_of_boxes_and_of_their_commands() {
    let server = Server::start();
    for name in ["work", "other"] {
        server.ok(&["run", "--name", name, "true"]);
    }
    server.ok(&["exec", "--detach", "--id", "job", "work", "true"]);
    let complete = |words: &[&str]| {
        let mut command = server.boxd(&["--", "boxd"]);
        command.args(words).env("_BOXD_COMPLETE", "bash");
        command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
        command.env("_CLAP_IFS", "\n");
        out(&command.output().unwrap())
    };
    assert_eq!(complete(&["exec", "w"]), "work");
    assert_eq!(complete(&["rm", "work", "o"]), "other");
    assert!(complete(&["logs", "work/"]).contains("work/job"));
    assert!(complete(&["cp", "wo"]).contains("work:/"));
    assert!(complete(&["sto"]).contains("stop"));
    drop(server);
}

#[test]
fn commands_of_other_tools_get_a_tip() {
    for (word, suggestion) in [
        ("create", "boxd run --name"),
        ("images", "boxd image ls"),
        ("list", "boxd ps"),
        ("commit", "boxd snapshot"),
        ("exce", "tip: `boxd exec`\n"),
        ("inspct", "tip: `boxd inspect`\n"),
        ("rnu", "tip: `boxd run`\n"),
        ("pasue", "tip: `boxd pause`\n"),
        ("elephant", "tip: `boxd --help` lists all commands\n"),
    ] {
        let refused = super::support::boxd().arg(word).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{word}");
        assert!(err(&refused).contains(suggestion), "{word}: {refused:?}");
        let json = super::support::boxd().args(["--json", word]).output();
        let tip = suggestion.trim_start_matches("tip: ").trim();
        assert!(err(&json.unwrap()).contains(tip), "{word}");
    }
}
