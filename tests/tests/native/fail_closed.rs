//! Fail closed: a call is refused with the missing primitive, or served with a report of it.
//!
//! `box-sys/tests/sys/missing_primitives.rs` removes each primitive; here an outer user namespace does.

use std::os::unix::fs::PermissionsExt as _;

use box_protocol::{BoxId, Code};
use box_rpc::{Options, Router, Session};
use box_runtime::native::NativeBackend;
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use box_service::{BoxService, Query, ServiceConfig};
use box_tests::machine::{ORDINARY_USER, PROGRAM, config, on_each_machine, params, printed, spec};
use serde_json::json;

/// A runtime with an ordinary user's fork server, which is started after `script` in a new user
/// namespace.
fn runtime_after(script: &str) -> (BoxRuntime, tempfile::TempDir) {
    let root = rustix::process::geteuid().is_root();
    let mut config = config(root.then_some(ORDINARY_USER));
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("server");
    let text = format!(
        "#!/bin/sh\nexec unshare --user --map-root-user sh -c '{script}; exec \"$0\" \"$@\"' {} \"$@\"\n",
        PROGRAM.display()
    );
    std::fs::write(&program, text).unwrap();
    for path in [dir.path(), &program] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    config.program = program;
    let backend = NativeBackend::new(config);
    (BoxRuntime::start(RuntimeConfig::with(backend)), dir)
}

#[tokio::test]
async fn a_box_is_refused_with_the_name_of_the_missing_primitive() {
    let exec = async |runtime: &BoxRuntime| {
        let asked = spec(json!({"box_id": "closed", "cmd": "echo ran"}));
        runtime.exec(&Caller::Local, params(asked)).await
    };
    let (runtime, _dir) = runtime_after("true");
    assert_eq!(printed(&exec(&runtime).await.unwrap()), "ran", "control");
    for kind in ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let file = format!("/proc/sys/user/max_{kind}_namespaces");
        let (runtime, _dir) = runtime_after(&format!("echo 0 > {file}"));
        let error = exec(&runtime).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error:?}");
        let name = format!("namespace.{}", if kind == "mnt" { "mount" } else { kind });
        assert!(error.message().contains(&name), "{error:?}");
        assert!(runtime.health().await.missing.contains(&name));
        let session = BoxId::new("closed").unwrap();
        let left = runtime.get(&Caller::Local, &session).await;
        assert_eq!(left.unwrap_err().code(), Code::NotFound, "no box is left");
    }
}

#[tokio::test]
async fn a_strict_profile_refuses_a_box_with_a_missing_feature() {
    on_each_machine(async |machine| {
        let (near, far) = box_transports::queue::pair(64);
        let _served = Session::start(far, machine.runtime.router(), Options::new(Caller::Local));
        let client = Session::start(near, Router::empty(), Options::client());
        let run = async |profile: &str| {
            let config: ServiceConfig =
                serde_json::from_value(json!({"profile": profile, "profiles": [
                {"name": "hard", "strict": true}, {"name": "soft"}]}))
                .unwrap();
            let service = BoxService::with_client(config, client.peer()).unwrap();
            service.initialize().await.unwrap();
            let command = json!({"command": "echo ran"}).as_object().unwrap().clone();
            service.execute_tool(command, &Query::new(profile)).await
        };
        assert!(run("soft").await.unwrap().ok, "control");
        let missing = machine.runtime.health().await.missing;
        match run("hard").await {
            Ok(result) => assert!(result.ok && missing.is_empty(), "{missing:?}"),
            Err(error) => {
                assert_eq!(error.code(), Code::Unavailable, "{error:?}");
                assert!(!missing.is_empty());
                for name in missing {
                    assert!(error.message().contains(&name), "{name}: {error:?}");
                }
            }
        }
    })
    .await;
}
