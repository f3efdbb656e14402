//! `boxd image`, and boxes on images: with a registry, as root and as an ordinary user.

mod audit;
mod creation;
mod debian;
mod interrupted;
mod machine;
mod proxy;
mod registry;
mod rights;
mod snapshots;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

use box_client::{BoxClient, ClientOptions, SpecDraft};
use box_protocol::Main;
use box_test_wait::eventually;
use serde_json::{Value, json};

use self::machine::{Machine, on_each_machine};
use self::registry::{Registry, layout};
use super::support::{err, feed, out};

/// The settings of the image in these tests.
fn settings() -> Value {
    json!({"Env": ["GREETING=hello", "PATH=/bin"], "WorkingDir": "/app",
        "Cmd": ["sh", "-c", "echo of the command; sleep 1000000"]})
}

/// Asserts that a command failed with this error, and left nothing behind.
#[track_caller]
fn assert_refused(refused: &Output, error: &str) {
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(err(refused).contains(error), "{error}: {refused:?}");
    assert_eq!(out(refused), "", "{refused:?}");
}

/// What a box on the image prints about itself.
const FACTS: &str = "pwd; echo $GREETING; id -u; cat /etc/marker; touch /tmp/x && echo writable";
const ITS_FACTS: &str = "/app\nhello\n0\nof the image\nwritable\n";

#[test]
fn an_image_of_a_private_registry_is_pulled_and_used_until_its_boxes_end() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    registry.push(&layout(folder.path(), 1 << 20, &settings()), "app:1");
    let name = registry.reference("app:1");
    let host = registry.reference("").trim_end_matches('/').to_owned();
    on_each_machine(|machine| {
        machine.trust(&registry);
        let server = machine.serve();
        // Without a password, and with a wrong one.
        let refused = machine.run(&["image", "pull", &name]);
        assert_refused(&refused, "denied: image: ");
        assert!(err(&refused).contains("log in first"), "{refused:?}");
        let refused = machine.login(&host, "wrong\n");
        let error = format!("denied: registry {host}: it refuses the user name or the password");
        assert_refused(&refused, &error);
        let passwords = machine.state().join("registries.json");
        assert!(!passwords.exists());
        let logged_in = machine.login(&host, "secret\n");
        assert_eq!(out(&logged_in), format!("logged in to {host}\n"));
        let mode = fs::metadata(&passwords).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let pulled = machine.run(&["image", "pull", &name]);
        let digest = out(&pulled).trim().to_owned();
        assert!(digest.starts_with("sha256:"), "{pulled:?}");
        assert!(
            err(&pulled).contains("1 of 1 layers complete"),
            "{pulled:?}"
        );
        let again = machine.run(&["image", "pull", &name]);
        assert!(err(&again).contains("is up to date"), "{again:?}");
        let listed = machine.ok(&["image", "ls"]);
        assert!(
            listed.contains(&name) && listed.contains(&digest[7..19]),
            "{listed}"
        );
        let image = machine.json(&["image", "inspect", &digest[7..15]]);
        assert_eq!(
            (&image["digest"], &image["uses"]),
            (&json!(digest), &json!(0))
        );
        assert_eq!(image["config"]["working_dir"], "/app");
        assert_eq!(image["config"]["env"]["GREETING"], "hello");

        let run = ["run", "--name", "b", "--image", &name, FACTS];
        assert_eq!(machine.ok(&run), ITS_FACTS);
        let info = machine.json(&["inspect", "b"]);
        assert_eq!(info["box"]["image_resolved"], json!(digest));
        let used = machine.run(&["image", "rm", &name]);
        assert_refused_in_use(&used, &name);
        assert_eq!(machine.json(&["image", "inspect", &name])["uses"], 1);
        assert_eq!(machine.ok(&["image", "prune", "--all"]), "");
        // Also by the next server, and by no server.
        server.kill();
        assert_refused_in_use(&machine.run(&["image", "rm", &name]), &name);
        assert_eq!(machine.ok(&["image", "prune", "--all"]), "");
        let server = machine.serve();
        assert_refused_in_use(&machine.run(&["image", "rm", &digest]), &digest);
        assert_eq!(machine.ok(&["exec", "b", FACTS]), ITS_FACTS);
        machine.ok(&["rm", "--force", "b"]);
        let removed = machine.ok(&["image", "rm", &name]);
        assert_eq!(removed, format!("{name}\n{digest}\n"));
        assert_eq!(machine.json(&["image", "ls"]), json!([]));
        machine.assert_clean();

        // A box pulls a missing image, and the new files are those of the new image.
        let arguments = ["run", "--name", "c", "--rm", "--image", &name, FACTS];
        let ran = machine.run(&arguments);
        assert_eq!(out(&ran), ITS_FACTS, "{ran:?}");
        assert!(err(&ran).contains("1 of 1 layers complete"), "{ran:?}");
        assert_eq!(
            machine.ok(&["image", "prune", "--all"]),
            format!("{digest}\n")
        );
        let never = ["run", "--image", &name, "--pull", "never", "true"];
        assert_refused(&machine.run(&never), "is not on this machine");
        let out_of = machine.ok(&["image", "logout", &host]);
        assert_eq!(out_of, format!("logged out of {host}\n"));
        let refused = machine.run(&["image", "logout", &host]);
        assert_refused(&refused, "not_found: registry: the server has no password");
        assert_refused(
            &machine.run(&["run", "--image", &name, "true"]),
            "log in first",
        );
        machine.assert_clean();
        drop(server);
    });
}

#[track_caller]
fn assert_refused_in_use(refused: &Output, name: &str) {
    let error =
        format!("conflict: image: {name} is used by 1 box or export; delete its boxes first");
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(err(refused).contains(&error), "{refused:?}");
}

#[test]
fn an_image_is_imported_used_and_exported_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 3 << 20, &settings());
    let archive = folder.path().join("layout.tar");
    let packed = std::process::Command::new("tar")
        .args(["-C", layout.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let archive = fs::read(&archive).unwrap();
    on_each_machine(|machine| {
        // From a pipe, and from a directory.
        let import = ["image", "import", "-", "mine:1"];
        let imported = feed(&mut machine.boxd(&import), &archive);
        let digest = out(&imported);
        assert!(imported.status.success(), "{imported:?}");
        let own = machine.path("layout");
        copy_tree(&layout, &own);
        let again = ["image", "import", own.to_str().unwrap(), "mine:2"];
        assert_eq!(machine.ok(&again), digest);
        assert_eq!(machine.ok(&["run", "--image", "mine:2", FACTS]), ITS_FACTS);
        let user = [
            "run",
            "--image",
            "mine:1",
            "--user",
            "app",
            "id -u; echo $HOME",
        ];
        assert_eq!(machine.ok(&user), "1000\n/app\n");
        let set = [
            "run",
            "-e",
            "GREETING=hi",
            "-w",
            "/etc",
            "--image",
            "mine:1",
            "echo $GREETING; pwd",
        ];
        assert_eq!(machine.ok(&set), "hi\n/etc\n");
        // A workspace is the working directory, because the caller named it.
        let workspace = machine.path("work");
        fs::create_dir(&workspace).unwrap();
        let there = [
            "run",
            "--workspace",
            workspace.to_str().unwrap(),
            "--image",
            "mine:1",
            "pwd",
        ];
        assert_eq!(machine.ok(&there), "/workspace\n");

        let file = machine.path("exported.tar");
        machine.ok(&["image", "export", "mine:1", file.to_str().unwrap()]);
        let first = fs::read(&file).unwrap();
        let streamed = machine.run(&["image", "export", "mine:2", "-"]);
        assert_eq!(streamed.stdout.len(), first.len());
        let import = ["image", "import", file.to_str().unwrap(), "back:1"];
        assert_ne!(
            machine.ok(&import),
            digest,
            "an export has one layer of its own"
        );
        assert_eq!(machine.ok(&["run", "--image", "back:1", FACTS]), ITS_FACTS);
        machine.ok(&["image", "export", "back:1", file.to_str().unwrap()]);
        let second = fs::read(&file).unwrap();
        let name_bytes = first.iter().zip(&second).filter(|(a, b)| a != b).count();
        assert!(
            first.len() == second.len() && name_bytes < 64,
            "{name_bytes} bytes differ"
        );
        assert_eq!(machine.json(&["image", "ls"]).as_array().unwrap().len(), 2);
        let removed = machine.ok(&["image", "rm", "mine:1", "mine:2", "back:1"]);
        assert_eq!(removed.lines().count(), 5, "{removed}");
        machine.assert_clean();
        assert_eq!(machine.stored("images"), [""; 0]);
    });
}

fn copy_tree(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp")
        .args(["-r", "--no-preserve=ownership"])
        .args([from, to])
        .status();
    assert!(copied.unwrap().success());
    let readable = std::process::Command::new("chmod")
        .args(["-R", "a+rX"])
        .arg(to)
        .status();
    assert!(readable.unwrap().success());
}

#[test]
fn a_run_without_a_script_runs_the_command_of_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let settings = json!({"Entrypoint": ["/bin/echo", "of"], "Cmd": ["the", "image"]});
    let layout = layout(folder.path(), 0, &settings);
    let machine = Machine::new("root");
    machine.ok(&["image", "import", layout.to_str().unwrap(), "echo"]);
    assert_eq!(machine.ok(&["run", "--image", "echo"]), "of the image\n");
    let usage = machine.run(&["run"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let none = registry::layout(&empty, 0, &json!({}));
    machine.ok(&["image", "import", none.to_str().unwrap(), "silent"]);
    let refused = machine.run(&["run", "--image", "silent"]);
    assert_refused(&refused, "the image has no command");
}

#[test]
fn a_damaged_record_of_a_box_hides_no_image_and_prevents_removals() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 0, &settings());
    on_each_machine(|machine| {
        let own = machine.path("layout");
        copy_tree(&layout, &own);
        machine.ok(&["image", "import", own.to_str().unwrap(), "app"]);
        let stopped = machine.state().join("stopped");
        fs::create_dir(&stopped).unwrap();
        let id = "00000000000040008000000000000001";
        let record = stopped.join(format!("{id}.json"));
        let check = || {
            let listed = machine.json(&["image", "ls"]);
            assert_eq!(listed[0]["uses"], 0, "{listed}");
            machine.ok(&["image", "inspect", "app"]);
            let error = format!("image: the record of the box {id} is damaged");
            for arguments in [&["image", "rm", "app"][..], &["image", "prune"]] {
                assert_refused(&machine.run(arguments), &error);
            }
        };
        for damaged in [&b"{"[..], b"\xff"] {
            fs::write(&record, damaged).unwrap();
            check();
            let server = machine.serve();
            check();
            drop(server);
        }
        fs::remove_file(&record).unwrap();
        machine.ok(&["image", "rm", "app"]);
    });
}

#[tokio::test]
async fn a_box_starts_the_command_of_its_image_as_its_main_command() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 0, &settings());
    let machine = Machine::new("root");
    let server = machine.serve();
    machine.ok(&["image", "import", layout.to_str().unwrap(), "app"]);
    let endpoint = format!("unix:{}", machine.state().join("boxd.sock").display());
    let client = BoxClient::connect(endpoint.parse().unwrap(), ClientOptions::default());
    let client = client.await.unwrap();
    let main = Main {
        argv: Vec::new(),
        ends_box: false,
    };
    let spec = SpecDraft::new("m").image("app").main(main.clone());
    let created = client.create(spec).await.unwrap();
    // The command runs beside the calls.
    let printed = async || machine.ok(&["logs", "m/main"]) == "of the command\n";
    eventually("the main command has printed its line", printed).await;
    created.stop().await.unwrap();
    created.start().await.unwrap();
    eventually("it has printed its line again", printed).await;
    created.delete().await.unwrap();
    let refused = client.create(SpecDraft::new("n").main(main)).await;
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("main: argv must not be empty without an image"),
        "{message}"
    );
    drop(server);
}

#[test]
fn invalid_image_files_are_refused_with_a_reason() {
    let machine = Machine::new("root");
    let server = machine.serve();
    let file = |name: &str, content: &[u8]| {
        let path = machine.path(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let (text, empty) = (file("text", b"not an archive"), file("empty", b""));
    let directory = machine.path("nothing");
    fs::create_dir(&directory).unwrap();
    let directory = directory.display().to_string();
    let digest = format!("sha256:{}", "0".repeat(64));
    for (arguments, error) in [
        (
            &["pull", "acme/UPPER"][..],
            "validation: image: `acme/UPPER`",
        ),
        (&["pull", ""], "validation: image: `` has no name"),
        (&["pull", "a:b:c d"], "validation: image: `a:b:c d`"),
        (&["pull", &digest], "validation: image: "),
        (
            &["inspect", "nothing"],
            "not_found: image: `nothing` is not on this machine",
        ),
        (&["inspect", &digest], "not_found: image: "),
        (&["export", "nothing", "-"], "not_found: image: `nothing`"),
        (&["rm", "nothing"], "not_found: image: `nothing`"),
        (&["import", &text, "x"], "validation: "),
        (&["import", &empty, "x"], "validation: "),
        (&["import", &directory, "x"], "validation: "),
        (&["import", "/nowhere/at/all", "x"], "/nowhere/at/all"),
        (
            &["import", &text, "Bad Name"],
            "validation: image: `Bad Name`",
        ),
        (&["import", &text, &format!("x@{digest}")], "validation: "),
        (
            &["login", "hub", "-u", "x", "--password-stdin"],
            "stdin is empty",
        ),
        (
            &["login", "-u", "x", "-p", "y", "ghcr.io"],
            "use --password-stdin",
        ),
        (&["login", "ghcr.io"], "stdin is not a terminal"),
        (
            &["logout", "hub"],
            "validation: registry: `hub` is not a host name",
        ),
    ] {
        let refused = machine.run(&[&["image"], arguments].concat());
        assert_refused(&refused, error);
        let reported = machine.run(&[&["--json", "image"], arguments].concat());
        let report: Value = serde_json::from_str(err(&reported).trim()).unwrap();
        assert!(report["error"]["message"].is_string(), "{reported:?}");
    }
    let hub = feed(
        &mut machine.boxd(&["image", "login", "hub", "-u", "x", "--password-stdin"]),
        b"y",
    );
    assert_refused(&hub, "validation: registry: `hub` is not a host name");
    for image in ["UPPER", "nothing"] {
        let refused = machine.run(&["run", "--image", image, "--pull", "never", "true"]);
        assert_refused(&refused, "image: `");
    }
    machine.assert_clean();
    assert_eq!(machine.ok(&["ps", "-q"]), "");
    drop(server);
}
