//! Commands, their ends, and specs that cannot become a box.

use box_protocol::{BoxId, BoxState, Code};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, Caller, ImageRoot, RuntimeConfig};
use box_tests::machine::{on_each_machine, params, printed, spec};
use serde_json::json;

#[tokio::test]
async fn a_command_runs_and_its_output_comes_back() {
    on_each_machine(async |machine| {
        let result = machine
            .exec("simple", "echo hello-box; echo oops >&2")
            .await;
        assert_eq!(printed(&result), "hello-box");
        assert_eq!(result.stderr, "oops\n");
        assert_eq!(result.backend_name, "native");
    })
    .await;
}

#[tokio::test]
async fn files_persist_in_a_box_and_stay_out_of_others() {
    on_each_machine(async |machine| {
        let write = "echo 'hello from file' > /tmp/testfile.txt";
        printed(&machine.exec("one", write).await);
        let read = machine.exec("one", "cat /tmp/testfile.txt").await;
        assert_eq!(printed(&read), "hello from file");
        let other = machine.exec("two", "cat /tmp/testfile.txt").await;
        assert_eq!(other.exit_code, Some(1));
    })
    .await;
}

#[tokio::test]
async fn exit_codes_and_signals_are_reported() {
    on_each_machine(async |machine| {
        for (cmd, code, signal) in [
            ("true", 0, None),
            ("exit 3", 3, None),
            ("exit 255", 255, None),
            ("no-such-program", 127, None),
            ("kill -TERM $$", 143, Some(15)),
            ("kill -KILL $$", 137, Some(9)),
        ] {
            let result = machine.exec("codes", cmd).await;
            assert_eq!(
                (result.exit_code, result.signal),
                (Some(code), signal),
                "{cmd}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn a_command_has_its_environment_directory_and_user_and_nothing_else() {
    on_each_machine(async |machine| {
        let asked = spec(
            json!({"box_id": "env", "workdir": "/tmp/a/b", "env": {"COLOR": "red"},
            "cmd": "pwd; id -un; env | sort; read line || echo no input"}),
        );
        let result = machine.exec_spec(asked).await.unwrap();
        let lines: Vec<_> = printed(&result).lines().collect();
        assert_eq!(lines[..2], ["/tmp/a/b", "box"]);
        assert!(
            lines.contains(&"COLOR=red") && lines.contains(&"HOME=/home/box"),
            "{lines:?}"
        );
        assert!(
            !lines.iter().any(|line| line.starts_with("CARGO")),
            "{lines:?}"
        );
        assert_eq!(lines.last(), Some(&"no input"));
        let home = machine
            .exec("env", "touch ~/x /workspace/x /tmp/x /var/tmp/x")
            .await;
        printed(&home);
    })
    .await;
}

#[tokio::test]
async fn an_invalid_directory_is_a_typed_error_and_the_box_lives() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"box_id": "cwd", "workdir": "/proc/nowhere", "cmd": "true"}));
        let error = machine.exec_spec(asked).await.unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        assert!(error.message().contains("cwd"), "{error:?}");
        printed(&machine.exec("cwd", "true").await);
    })
    .await;
}

#[tokio::test]
async fn a_box_reports_its_backend_and_missing_features() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"box_id": "facts", "image": "alpine:latest", "cmd": "true"}));
        machine.exec_spec(asked).await.unwrap();
        let id = BoxId::new("facts").unwrap();
        let info = machine.runtime.get(&Caller::Local, &id).await.unwrap();
        assert_eq!(
            (info.image.as_deref(), info.rootfs.as_deref()),
            (Some("alpine:latest"), Some("host"))
        );
        assert_eq!(info.state, BoxState::Running);
        assert_eq!(info.missing, machine.runtime.health().await.missing);
        let two_uids = machine.name == "root";
        assert_eq!(!info.missing.contains(&"two_uids".to_owned()), two_uids);
    })
    .await;
}

#[tokio::test]
async fn without_a_fork_server_a_call_is_unavailable_and_names_no_path() {
    let backend = NativeBackend::new(NativeConfig::new("/nowhere/at-all"));
    let runtime = BoxRuntime::start(RuntimeConfig::with(backend));
    let asked = spec(json!({"box_id": "none", "cmd": "true"}));
    let error = runtime
        .exec(&Caller::Local, params(asked))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(!error.message().contains("nowhere"), "{error:?}");
    assert!(!runtime.health().await.available);
}

#[tokio::test]
async fn images_are_named_directories_and_strict_images_refuse_others() {
    on_each_machine(async |machine| {
        let mut config = machine.config();
        let image = machine.directory();
        config
            .images
            .insert("empty".into(), ImageRoot::new(image.path()));
        config.strict_images = true;
        let runtime = BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config)));
        let exec = |image: &str| {
            let asked = spec(json!({"box_id": image, "image": image, "cmd": "true"}));
            runtime.exec(&Caller::Local, params(asked))
        };
        let error = exec("other").await.unwrap_err();
        assert_eq!(error.code(), Code::Unsupported, "{error:?}");
        // It has no shell, which shows that it is the root file system.
        let error = exec("empty").await.unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        assert!(error.message().contains("not found"), "{error:?}");
    })
    .await;
}
