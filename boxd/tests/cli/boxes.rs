//! `ps`, `inspect`, `pause`, `resume`, `stats`, `rm`.

use serde_json::json;

use super::support::{Server, err, out};

#[test]
fn boxes_are_listed_for_people_and_for_programs() {
    let server = Server::start();
    assert_eq!(server.json(&["ps"]), json!([]));
    for name in ["one", "two"] {
        server.ok(&["run", "--session", name, "true"]);
    }
    let table = server.ok(&["ps"]);
    let lines: Vec<_> = table.lines().collect();
    assert!(
        lines[0].starts_with("BOX") && lines[1].starts_with("one") && lines[2].starts_with("two"),
        "{table}"
    );
    assert!(!table.contains('\x1b'), "a pipe gets no colours");
    assert_eq!(server.json(&["ps"])[1]["session_id"], "two");
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
fn a_box_and_a_command_tell_everything() {
    let server = Server::start();
    server.ok(&["run", "--session", "b", "true"]);
    let id = server.ok(&["exec", "--detach", "--id", "c", "b", "exit 3"]);
    assert_eq!(id, "b/c\n");
    server.run(&["wait", "b/c"]);
    let told = server.json(&["inspect", "b"]);
    assert_eq!(
        (&told["box"]["state"], &told["guest"]["user"]),
        (&json!("running"), &json!("box"))
    );
    assert_eq!(server.json(&["inspect", "b/c"])["exit"]["code"], 3);
    let missing = server.run(&["inspect", "b/nope"]);
    assert!(err(&missing).contains("boxd ps b"), "{missing:?}");
    let missing = server.run(&["--json", "inspect", "b/nope"]);
    let told: serde_json::Value = serde_json::from_str(&err(&missing)).unwrap();
    assert_eq!(told["error"]["code"], "not_found");
}

#[test]
fn a_paused_box_refuses_until_it_goes_on() {
    let server = Server::start();
    server.ok(&["run", "--session", "b", "true"]);
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
fn figures_are_shown_once_in_a_pipe() {
    let server = Server::start();
    server.ok(&["run", "--session", "b", "true"]);
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
        server.ok(&["run", "--session", name, "true"]);
    }
    let some = server.run(&["rm", "a", "nope"]);
    assert_eq!(
        (out(&some).as_str(), some.status.code()),
        ("a\n", Some(125))
    );
    assert!(err(&some).contains("nope: not_found"), "{some:?}");
    assert!(err(&some).contains("`boxd ps` lists the boxes"), "{some:?}");
    for command in ["rm", "pause", "kill"] {
        let some = server.run(&[command, "--json", "nope"]);
        let told: serde_json::Value = serde_json::from_str(&err(&some)).unwrap();
        let error = &told["error"];
        assert_eq!(
            (&error["code"], &error["about"]),
            (&json!("not_found"), &json!("nope")),
            "{some:?}"
        );
        assert!(
            error["next"].as_str().unwrap().contains("boxd ps"),
            "{told}"
        );
    }
    assert_eq!(
        server.json(&["rm", "--all"]),
        json!({"deleted": ["b", "c"]})
    );
    assert_eq!(server.ok(&["ps", "-q"]), "");
}
