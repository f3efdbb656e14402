//! Boxes on images: users, packages, and the name of the default image.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use box_protocol::{BoxError, BoxExecutionResult, Code};
use box_runtime::ImageRoot;
use box_runtime::native::NativeConfig;
use box_tests::image;
use box_tests::machine::{Machine, on_each_machine, on_each_machine_set_up, printed, spec};
use serde_json::{Value, json};

const PROGRAMS: &[&str] = &[
    "cat",
    "chown",
    "diff",
    "id",
    "rm",
    "sh",
    "stat",
    "su",
    "touch",
    "tar",
    "dpkg",
    "dpkg-deb",
    "dpkg-query",
    "dpkg-split",
    "ldconfig",
    "start-stop-daemon",
];

/// Runs a test on every machine with the image `small`, whose user is root.
async fn on_each_image(test: impl AsyncFn(&Machine, &Path)) {
    let image = RefCell::new(None);
    let set_up = |config: &mut NativeConfig| {
        let user = rustix::process::geteuid().as_raw();
        let user = config.run_as.map_or(user, |(user, _)| user);
        let made = image::image(user, PROGRAMS);
        for name in ["info", "updates"] {
            fs::create_dir_all(made.path().join("var/lib/dpkg").join(name)).unwrap();
        }
        fs::write(made.path().join("var/lib/dpkg/status"), "").unwrap();
        image::give(&made.path().join("var"), user);
        let root = ImageRoot {
            path: made.path().canonicalize().unwrap(),
            user: Some(String::new()),
            ..ImageRoot::default()
        };
        config.images.insert("small".into(), root);
        image.replace(Some(made));
    };
    let limit = Duration::from_mins(5);
    let test = async |machine: &Machine| {
        let path = image.borrow().as_ref().unwrap().path().to_owned();
        test(machine, &path).await;
    };
    Box::pin(on_each_machine_set_up(limit, set_up, test)).await;
}

async fn exec(machine: &Machine, cmd: &str, more: Value) -> Result<BoxExecutionResult, BoxError> {
    let mut asked = json!({"box_id": "d", "image": "small", "cmd": cmd, "timeout_sec": 200,
        "read_only_rootfs": false});
    for (name, value) in more.as_object().unwrap() {
        asked[name] = value.clone();
    }
    machine.exec_spec(spec(asked)).await
}

/// Makes a package with one program, which runs a script when it is installed.
fn package(place: &Path) {
    let tree = place.join("hello");
    for name in ["DEBIAN", "usr/bin", "etc"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let control = "Package: hello\nVersion: 1\nArchitecture: all\nMaintainer: Box <box@example.org>\nDescription: greets\n";
    fs::write(tree.join("DEBIAN/control"), control).unwrap();
    for (name, text) in [
        ("usr/bin/hello", "#!/bin/sh\necho Hello, world!\n"),
        (
            "DEBIAN/postinst",
            "#!/bin/sh\necho done > /etc/configured\n",
        ),
    ] {
        fs::write(tree.join(name), text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(tree.join(name), mode).unwrap();
    }
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "--build"]).arg(&tree);
    let output = build.arg(place.join("hello.deb")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[tokio::test]
async fn packages_are_installed_by_root_of_an_image() {
    on_each_image(async |machine, image| {
        let workspace = machine.directory();
        package(workspace.path());
        let more = json!({"host_path": workspace.path(), "host_path_mode": "ro"});
        let install = "id -un; echo $HOME $USER; dpkg -i hello.deb > /tmp/log 2>&1 || cat /tmp/log; hello; cat /etc/configured; dpkg-query -W -f '${Status}\\n' hello; stat -c %u:%g /usr/bin/hello";
        let ran = exec(machine, install, more.clone()).await.unwrap();
        let wanted = "root\n/root root\nHello, world!\ndone\ninstall ok installed\n0:0";
        assert_eq!(printed(&ran), wanted, "{}", machine.name);
        for denied in ["chown 33:33 /tmp/log", "chown app /tmp/log", "su app -c true"] {
            let ran = exec(machine, denied, more.clone()).await.unwrap();
            assert_ne!(ran.exit_code, Some(0), "{} {denied}: {ran:?}", machine.name);
        }
        let control = exec(machine, "chown 0:0 /tmp/log", more).await.unwrap();
        assert_eq!(control.exit_code, Some(0), "{control:?}");
        assert!(!image.join("usr/bin/hello").exists(), "the image is unchanged");
    })
    .await;
}

#[tokio::test]
async fn a_box_runs_as_a_user_of_its_image() {
    on_each_image(async |machine, _| {
        for (user, shown) in [
            (Value::Null, "0 0 root /root"),
            (json!("root"), "0 0 root /root"),
            (json!("app"), "1234 2345 app /srv/app"),
            (json!("1234"), "1234 2345 app /srv/app"),
            (json!("app:staff"), "1234 50 app /srv/app"),
            (json!("33:4"), "33 4 box /home/box"),
        ] {
            let name = user.as_str().unwrap_or("none").replace(':', "-");
            let cmd = "echo $(id -u) $(id -g) $USER $HOME; touch ~/x /tmp/x /workspace/x";
            let more = json!({"box_id": name, "user": user});
            let ran = exec(machine, cmd, more).await.unwrap();
            assert_eq!(printed(&ran), shown, "{} {user}: {ran:?}", machine.name);
        }
        for (user, problem) in [
            ("ghost", "does not exist"),
            ("app:ghosts", "does not exist"),
            ("61000", "61000"),
            ("5:60999", "60999"),
            ("70000", "70000"),
        ] {
            let more = json!({"box_id": "u", "user": user});
            let error = exec(machine, "true", more).await.unwrap_err();
            assert_eq!(error.code(), Code::Validation, "{user}: {error:?}");
            assert!(error.message().starts_with("user:"), "{error:?}");
            assert!(error.message().contains(problem), "{error:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_default_image_is_the_host_and_has_no_other_user() {
    on_each_machine(async |machine| {
        let named = spec(json!({"box_id": "h", "image": "host", "cmd": "id -un"}));
        let ran = machine.exec_spec(named).await.unwrap();
        assert_eq!(printed(&ran), "box", "{}", machine.name);
        let unnamed = spec(json!({"box_id": "h", "cmd": "id -un"}));
        let same = machine.exec_spec(unnamed).await.unwrap();
        assert_eq!(printed(&same), "box", "the same box: {}", machine.name);
        let root = spec(json!({"box_id": "r", "user": "root", "cmd": "true"}));
        let error = machine.exec_spec(root).await.unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        assert!(error.message().starts_with("user:"), "{error:?}");
    })
    .await;
}
