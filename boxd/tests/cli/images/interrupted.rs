//! A server that is killed in the middle of a pull and of an import.

use std::io::Write as _;
use std::process::Stdio;

use box_test_wait::blocking::eventually;

use super::machine::on_each_machine;
use super::registry::{Registry, ThrottledProxy, layout};
use super::{FACTS, ITS_FACTS, settings};
use crate::support::err;

/// The size of the large file, in bytes.
const LARGE: usize = 8 << 20;

#[test]
fn a_pull_continues_after_its_server_was_killed() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    registry.push(&layout(folder.path(), LARGE, &settings()), "app:1");
    on_each_machine(|machine| {
        let proxy = ThrottledProxy::start(&registry, 3 << 20);
        let name = format!("localhost:{}/app:1", proxy.port);
        let host = format!("localhost:{}", proxy.port);
        machine.trust(&registry);
        let server = machine.serve();
        assert!(machine.login(&host, "secret").status.success());
        let mut pull = machine.boxd(&["image", "pull", &name]);
        let pull = pull.stdout(Stdio::piped()).stderr(Stdio::piped());
        let pull = pull.spawn().unwrap();
        eventually("a part of the layer has arrived", || {
            proxy.passed() >= 3 << 20
        });
        let partial = || {
            let names = machine.stored("partial");
            let path = machine.state().join("images/partial");
            let sizes = names.iter().map(|name| path.join(name).metadata());
            sizes.flatten().map(|found| found.len()).sum::<u64>()
        };
        eventually("a part of the layer is stored", || partial() >= 2 << 20);
        server.kill();
        let failed = pull.wait_with_output().unwrap();
        assert_eq!(failed.status.code(), Some(125), "{failed:?}");
        assert!(err(&failed).contains("unavailable"), "{failed:?}");

        let server = machine.serve();
        assert_eq!(machine.json(&["image", "ls"]), serde_json::json!([]));
        eventually("what the killed server made is removed", || {
            machine.stored("work").is_empty() && machine.stored("pulls").is_empty()
        });
        let (before, kept) = (proxy.passed(), partial());
        assert!(kept >= 2 << 20, "{kept}");
        proxy.open();
        machine.ok(&["image", "pull", &name]);
        let fetched = proxy.passed() - before;
        assert!(
            fetched < (LARGE as u64) - kept + (4 << 20),
            "{fetched} of {LARGE}"
        );
        machine.assert_clean();
        assert_eq!(machine.stored("images").len(), 1);
        assert_eq!(machine.ok(&["run", "--image", &name, FACTS]), ITS_FACTS);
        drop(server);
    });
}

#[test]
fn an_import_is_repeated_after_its_server_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), LARGE, &settings());
    let archive = folder.path().join("layout.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", layout.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let archive = std::fs::read(&archive).unwrap();
    on_each_machine(|machine| {
        let import = ["image", "import", "-", "app"];
        let server = machine.serve();
        let mut failing = machine.boxd(&import);
        let failing = failing.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut failing = failing.spawn().unwrap();
        let mut input = failing.stdin.take().unwrap();
        input.write_all(&archive[..5 << 20]).unwrap();
        eventually("the server has begun", || {
            !machine.stored("work").is_empty()
        });
        server.kill();
        // The client notices when it sends the next piece.
        let _ = input.write_all(&archive[5 << 20..]);
        drop(input);
        let failed = failing.wait_with_output().unwrap();
        assert_eq!(failed.status.code(), Some(125), "{failed:?}");

        let server = machine.serve();
        eventually("what the killed server made is removed", || {
            machine.stored("work").is_empty()
        });
        assert_eq!(machine.json(&["image", "ls"]), serde_json::json!([]));
        let imported = crate::support::feed(&mut machine.boxd(&import), &archive);
        assert!(imported.status.success(), "{imported:?}");
        machine.assert_clean();
        assert_eq!(machine.ok(&["run", "--image", "app", FACTS]), ITS_FACTS);
        drop(server);
    });
}

#[test]
fn an_import_whose_client_is_interrupted_leaves_nothing() {
    let machine = super::Machine::new("root");
    let server = machine.serve();
    let mut import = machine.boxd(&["image", "import", "-", "app"]);
    let mut import = import.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = import.stdin.take().unwrap();
    input.write_all(&vec![0; 3 << 20]).unwrap();
    eventually("the server has begun", || {
        !machine.stored("work").is_empty()
    });
    let pid = rustix::process::Pid::from_child(&import);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(import.wait().unwrap().code(), Some(130));
    eventually("the server has cancelled the import", || {
        machine.stored("work").is_empty()
    });
    machine.assert_clean();
    drop((server, input));
}
