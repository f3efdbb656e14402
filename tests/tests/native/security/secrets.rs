//! What a guest sees of the host: its programs, and nothing else.

use std::os::unix::net::UnixListener;
use std::process::Command;

use box_tests::machine::{on_each_machine, printed};
use serde_json::json;

use super::host_process::HostProcess;
use super::{answers, as_root, command, inside, inside_with, outside};

const FILES: &str = include_str!("probes/files.py");
const DEV: &str = include_str!("probes/dev.py");
const DESCRIPTORS: &str = include_str!("probes/descriptors.py");
const ENVIRONMENT: &str = include_str!("probes/environment.py");

#[tokio::test]
async fn a_box_sees_no_files_of_the_host_except_programs() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let (canary, workspace) = (dir.path().join("canary"), dir.path().join("workspace"));
        std::fs::write(&canary, "the host's").unwrap();
        std::fs::create_dir(&workspace).unwrap();
        std::os::unix::fs::chown(&workspace, Some(machine.uid), Some(machine.uid)).unwrap();
        let _socket = UnixListener::bind(dir.path().join("socket")).unwrap();
        let args = [canary.to_str().unwrap(), dir.path().to_str().unwrap()];
        let host = outside(FILES, &args);
        assert_eq!(host["canary:"], "ok the host's", "control");
        assert_eq!(
            (host["canaries"].as_str(), host["sockets"].as_str()),
            ("1", "1"),
            "control"
        );
        if as_root() {
            for path in ["/etc/shadow", "/root", "/var/lib", "/sys"] {
                assert_eq!(host[&format!("there:{path}")], "ok None", "control");
            }
            assert_eq!(host["canary:/proc/self/root"], "ok the host's", "control");
        }
        let more = json!({"host_path": workspace});
        let said = inside_with(machine, "files", FILES, &args, more).await;
        for (question, answer) in &said {
            if question.starts_with("there:") || question.starts_with("canary:") {
                assert!(
                    ["ENOENT", "EACCES"].contains(&answer.as_str()),
                    "{question}: {answer}"
                );
            }
        }
        assert_eq!(said["beside"], "ENOENT");
        for what in ["canaries", "sockets", "blocks"] {
            assert_eq!(said[what], "0", "{what}");
        }
        assert_eq!(said["home"], "box");
        // Any number of `..` ends at the root of the box.
        assert_eq!(
            (said["top"].as_str(), said["top_has"].as_str()),
            ("True", "True")
        );
        assert_eq!(host["top_has"], "False", "control");
    })
    .await;
}

#[tokio::test]
async fn devices_are_the_harmless_ones_and_cannot_be_replaced() {
    let harmless = [
        "null=1:3",
        "zero=1:5",
        "full=1:7",
        "random=1:8",
        "urandom=1:9",
        "tty=5:0",
        "ptmx=5:2",
    ];
    let known = |nodes: &str| nodes.split(' ').all(|node| harmless.contains(&node));
    let host = outside(DEV, &[]);
    assert!(!known(&host["nodes"]), "control: there are more outside");
    assert_eq!(host["read_only"], "False", "control");
    assert_eq!(host["writable"] == "True", as_root(), "control");
    on_each_machine(async |machine| {
        let said = inside(machine, "dev", DEV, &["change"]).await;
        assert!(
            known(&said["nodes"]) && said["nodes"].contains("null=1:3"),
            "{said:?}"
        );
        assert_eq!(
            (said["read_only"].as_str(), said["writable"].as_str()),
            ("True", "False")
        );
        for way in ["make", "unlink", "rename", "link", "mount"] {
            assert!(
                ["EROFS", "EACCES", "EPERM", "EXDEV"].contains(&said[way].as_str()),
                "{way}: {said:?}"
            );
        }
        assert_eq!(said["null_is_empty"], "True");
    })
    .await;
}

#[tokio::test]
async fn descriptors_of_the_runtime_do_not_reach_a_box() {
    on_each_machine(async |machine| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("canary"), "the host's").unwrap();
        let open = std::fs::File::open(dir.path()).unwrap();
        // Every program that this process starts inherits it, until it is closed.
        rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).unwrap();
        let outside = outside(DESCRIPTORS, &[]);
        assert_ne!(outside["reached"], "0", "control: a plain child has it");
        let mut held = HostProcess::start(machine, &[]);
        drop(open);
        let leaked = std::fs::read_dir(format!("/proc/{}/fd", held.pid())).unwrap();
        let mut leaked = leaked
            .flatten()
            .filter_map(|fd| std::fs::read_link(fd.path()).ok());
        assert!(
            leaked.any(|place| place == dir.path()),
            "control: the runtime's process has it"
        );
        let result = held.exec(&json!({"box_id": "fds", "cmd": command(DESCRIPTORS, &[])}));
        let said = answers(printed(&result));
        assert_eq!(said["beyond_three"], "", "{said:?}");
        assert_eq!(
            (said["reached"].as_str(), said["through_others"].as_str()),
            ("0", "0")
        );
    })
    .await;
}

#[tokio::test]
async fn the_environment_of_the_host_does_not_reach_a_box() {
    let word = "canary-of-the-environment";
    on_each_machine(async |machine| {
        let mut held = HostProcess::start(machine, &[("BOX_TEST_CANARY", word)]);
        let probe = command(ENVIRONMENT, &[word]);
        let result = held.exec(&json!({"box_id": "env", "cmd": probe}));
        let own = std::fs::read(format!("/proc/{}/environ", held.pid())).unwrap();
        assert!(
            String::from_utf8_lossy(&own).contains(word),
            "control: the runtime's process has it"
        );
        let said = answers(printed(&result));
        assert_eq!(said["own"], "False");
        for file in ["environ", "cmdline", "comm", "mountinfo", "maps", "cgroup"] {
            assert_eq!(said[file], "0", "{file}");
        }
        // The control: the probe finds the same word when the box gets it on purpose.
        let env = json!({"BOX_TEST_CANARY": word});
        let given = json!({"box_id": "given", "env": env,
            "cmd": format!("sleep 10 & {}", command(ENVIRONMENT, &[word]))});
        let said = answers(printed(&held.exec(&given)));
        assert_eq!(said["own"], "True", "control");
        assert_ne!(
            (said["environ"].as_str(), said["cmdline_read"].as_str()),
            ("0", "0"),
            "control"
        );
    })
    .await;
    let set = Command::new("sh")
        .arg("-c")
        .arg(command(ENVIRONMENT, &[word]))
        .env("X", word)
        .output();
    assert!(
        String::from_utf8(set.unwrap().stdout)
            .unwrap()
            .contains("own=True"),
        "control"
    );
}
