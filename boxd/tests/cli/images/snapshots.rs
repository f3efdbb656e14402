//! Snapshots and forks of boxes on an image.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;

use box_test_wait::blocking::eventually;
use serde_json::{Value, json};

use super::machine::on_each_machine;
use super::registry::layout;
use super::{FACTS, ITS_FACTS, assert_refused_in_use, settings};
use crate::support::{feed, out};

#[test]
fn a_snapshot_keeps_its_image_and_is_exported_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 1 << 20, &settings());
    let archive = folder.path().join("layout.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", layout.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let archive = std::fs::read(&archive).unwrap();
    on_each_machine(|machine| {
        let server = machine.serve();
        let mut import = machine.boxd(&["image", "import", "-", "app"]);
        let imported = feed(&mut import, &archive);
        let digest = out(&imported).trim().to_owned();
        assert!(digest.starts_with("sha256:"), "{imported:?}");
        let change = "echo added > /etc/added; rm /etc/marker; mkdir /new; cat /etc/added";
        let run = ["run", "--name", "b", "--image", "app", change];
        assert_eq!(machine.ok(&run), "added\n");
        machine.ok(&["stop", "b"]);
        machine.ok(&["snapshot", "b", "s"]);
        let item = machine.json(&["snapshot", "inspect", "s"]);
        assert_eq!(item["content"]["snapshot"]["image"], json!(digest));
        let look = "cat /etc/added; ls -d /new; ls /etc/marker 2> /dev/null; echo $GREETING; pwd";
        let seen = "added\n/new\nhello\n/app\n";
        let names = machine.ok(&["fork", "b", "-n", "3"]);
        for name in names.lines() {
            assert_eq!(machine.ok(&["exec", name, look]), seen);
            machine.ok(&["rm", "--force", name]);
        }
        machine.ok(&["rm", "--force", "b"]);
        // The image of a snapshot stays, also for the next server and without one.
        assert_refused_in_use(&machine.run(&["image", "rm", "app"]), "app");
        server.kill();
        assert_refused_in_use(&machine.run(&["image", "rm", "app"]), "app");
        let server = machine.serve();
        assert_eq!(machine.ok(&["image", "prune", "--all"]), "");
        assert_eq!(machine.ok(&["run", "--snapshot", "s", look]), seen);
        // The archive is an image with the changes.
        let exported = machine.run(&["snapshot", "export", "s", "-"]);
        assert!(exported.status.success(), "{:?}", exported.stderr);
        machine.ok(&["snapshot", "rm", "s"]);
        let mut import = machine.boxd(&["image", "import", "-", "changed"]);
        let imported = feed(&mut import, &exported.stdout);
        assert!(imported.status.success(), "{imported:?}");
        assert_eq!(machine.ok(&["run", "--image", "changed", look]), seen);
        assert_eq!(machine.ok(&["run", "--image", "app", FACTS]), ITS_FACTS);
        machine.ok(&["image", "rm", "app"]);
        let layers = machine.state().join("layers");
        eventually("no layer is left", || {
            std::fs::read_dir(&layers).unwrap().next().is_none()
        });
        drop(server);
    });
}

/// Files whose owner may not read them, below a directory that it may not search.
const LOCK: &str = "mkdir -p /etc/closed && echo inner > /etc/closed/inner && echo secret > /etc/locked && \
    : > /etc/empty && chmod 0 /etc/closed/inner /etc/locked /etc/empty && chmod 0 /etc/closed";

/// Shows them to root of a box, which an ordinary user's guest is after a change of the modes.
const UNLOCK: &str = "stat -c '%a %n' /etc/closed /etc/locked /etc/empty; chmod 700 /etc/closed; \
    stat -c '%a %n' /etc/closed/inner; chmod 400 /etc/closed/inner /etc/locked; cat /etc/closed/inner /etc/locked";

const UNLOCKED: &str =
    "0 /etc/closed\n0 /etc/locked\n0 /etc/empty\n0 /etc/closed/inner\ninner\nsecret\n";

#[test]
fn files_that_their_owner_may_not_read_are_exported_with_their_modes() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 0, &settings());
    let archive = folder.path().join("layout.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", layout.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let archive = std::fs::read(&archive).unwrap();
    on_each_machine(|machine| {
        let server = machine.serve();
        let import = |archive: &[u8], name: &str| {
            let mut import = machine.boxd(&["image", "import", "-", name]);
            let imported = feed(&mut import, archive);
            assert!(imported.status.success(), "{imported:?}");
        };
        let export = |what: &str, name: &str| {
            let exported = machine.run(&[what, "export", name, "-"]);
            assert!(exported.status.success(), "{:?}", out(&exported));
            exported.stdout
        };
        import(&archive, "app");
        let run = ["run", "--name", "b", "--keep", "--image", "app", LOCK];
        machine.ok(&run);
        machine.ok(&["stop", "b"]);
        // The changes of a box, with its image.
        machine.ok(&["snapshot", "b", "s"]);
        import(&export("snapshot", "s"), "locked");
        assert_eq!(machine.ok(&["run", "--image", "locked", UNLOCK]), UNLOCKED);
        // An image whose own files are locked, with and without a server.
        let first = export("image", "locked");
        import(&first, "again");
        assert_eq!(machine.ok(&["run", "--image", "again", UNLOCK]), UNLOCKED);
        machine.ok(&["rm", "--force", "b"]);
        drop(server);
        assert_eq!(export("image", "locked").len(), first.len());
        assert_eq!(machine.ok(&["run", "--image", "locked", UNLOCK]), UNLOCKED);
    });
}

#[test]
fn a_box_of_a_snapshot_of_an_image_runs_on_that_image() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 1 << 20, &settings());
    let archive = folder.path().join("layout.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", layout.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let archive = std::fs::read(&archive).unwrap();
    on_each_machine(|machine| {
        let _server = machine.serve();
        let mut import = machine.boxd(&["image", "import", "-", "app"]);
        assert!(feed(&mut import, &archive).status.success());
        let put = json!({"jsonrpc": "2.0", "id": 1, "method": "catalog.put",
            "params": {"name": "s", "content": {"snapshot": {"image": "app"}}}});
        let mut stream = UnixStream::connect(machine.state().join("boxd.sock")).unwrap();
        stream.write_all(format!("{put}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["result"]["state"], "ready", "{answer}");
        let run = ["run", "--name", "b", "--keep", "--snapshot", "s", FACTS];
        assert_eq!(machine.ok(&run), ITS_FACTS);
        // Also after a stop, and as an archive.
        machine.ok(&["stop", "b"]);
        machine.ok(&["start", "b"]);
        assert_eq!(machine.ok(&["exec", "b", FACTS]), ITS_FACTS);
        machine.ok(&["rm", "--force", "b"]);
        let exported = machine.run(&["snapshot", "export", "s", "-"]);
        assert!(exported.status.success(), "{:?}", exported.stderr);
        let mut import = machine.boxd(&["image", "import", "-", "back"]);
        let imported = feed(&mut import, &exported.stdout);
        assert!(imported.status.success(), "{imported:?}");
        assert_eq!(machine.ok(&["run", "--image", "back", FACTS]), ITS_FACTS);
    });
}
