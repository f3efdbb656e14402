//! The audit lines of image actions: which caller changed what, and the code of a refusal.

use std::process::Stdio;

use box_test_wait::blocking::eventually;
use serde_json::{Value, json};

use super::machine::Machine;
use crate::support::out;

#[test]
fn every_change_of_the_images_is_in_the_audit_log() {
    let machine = Machine::new("root");
    let log = machine.path("log");
    let mut serve = machine.boxd(&["serve"]);
    serve.env("BOXD_LOG_FORMAT", "json");
    let server = Machine::start(serve.stderr(std::fs::File::create(&log).unwrap()));
    let archive = machine.path("root.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", machine.path("").to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg("log")
        .status();
    assert!(packed.unwrap().success());
    machine.ok(&["image", "import", archive.to_str().unwrap(), "app:1"]);
    machine.ok(&["image", "rm", "app:1"]);
    machine.ok(&["image", "prune"]);
    let failing = [
        &["image", "rm", "app:1"][..],
        &["image", "pull", "localhost:1/app:1"],
    ];
    for arguments in failing {
        let mut command = machine.boxd(arguments);
        let failed = command.stdin(Stdio::null()).output().unwrap();
        assert!(!failed.status.success(), "{}", out(&failed));
    }
    assert!(!machine.login("localhost:1", "hidden\n").status.success());

    let lines = || {
        let text = std::fs::read_to_string(&log).unwrap();
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        lines
            .filter(|line: &Value| line["fields"]["message"] == "image")
            .map(|line| {
                assert_eq!(line["target"], "box_runtime::audit");
                let fields = &line["fields"];
                json!([fields["action"], fields["subject"], fields["code"]])
            })
            .collect::<Vec<_>>()
    };
    eventually("every line is written", || lines().len() == 6);
    let wanted = json!([
        ["image.import", "app:1", null],
        ["image.remove", "app:1", null],
        ["image.prune", "", null],
        ["image.remove", "app:1", "not_found"],
        ["image.pull", "localhost:1/app:1", "unavailable"],
        ["image.login", "localhost:1", "unavailable"],
    ]);
    assert_eq!(json!(lines()), wanted);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("hidden"), "no password");
    drop(server);
}
