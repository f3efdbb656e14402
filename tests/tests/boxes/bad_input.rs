//! An invalid spec is refused with the name of the field. The runtime starts nothing and loses
//! nothing.

use box_rpc::Code;
use box_tests::every_transport;
use box_tests::fixture::Setup;
use serde_json::{Value, json};

every_transport!(a_bad_spec_is_refused_by_its_field);

async fn a_bad_spec_is_refused_by_its_field(setup: Setup) {
    let mut raw = setup.boxes().raw().await;
    let long = "x".repeat(300);
    let cases: Vec<(Value, &str)> = vec![
        (json!({"cpus": 0}), "cpus"),
        (json!({"memory_mb": 10}), "memory_mb"),
        (json!({"pids_limit": 0}), "pids_limit"),
        (json!({"workspace_quota_mb": -1}), "workspace_quota_mb"),
        (json!({"timeout_sec": 0}), "timeout_sec"),
        (json!({"timeout_sec": "soon"}), "timeout_sec"),
        (json!({"network": "maybe"}), "network"),
        (json!({"workdir": "relative"}), "workdir"),
        (json!({"mount_path": "relative"}), "mount_path"),
        (json!({"host_path": "relative"}), "host_path"),
        (json!({"host_path": "/srv/x", "workdir": "/opt"}), "workdir"),
        (json!({"box_id": ""}), "box_id"),
        (json!({"box_id": long}), "box_id"),
        (json!({"box_id": "a/b"}), "box_id"),
        (json!({"env": {"K": 1}}), "env"),
        (json!({"surprise": 1}), "surprise"),
        (json!({"cmd": ""}), "cmd"),
        (json!({"cmd": 7}), "cmd"),
    ];
    for (change, field) in cases {
        let mut spec = json!({"box_id": "bad", "cmd": "echo"});
        for (key, value) in change.as_object().unwrap() {
            spec[key] = value.clone();
        }
        raw.call(1, "box.exec", &json!({"spec": spec})).await;
        let error = raw.answer().await.error();
        assert_eq!(error.code, Code::Validation, "{change}: {error:?}");
        assert!(error.message.contains(field), "{change}: {error:?}");
    }
    raw.call(2, "test.backend.inspect", &json!({})).await;
    assert_eq!(raw.answer().await.result()["starts"], json!([]));
    raw.call(
        3,
        "box.exec",
        &json!({"spec": {"box_id": "good", "cmd": "echo", "timeout_sec": "30"}}),
    )
    .await;
    assert_eq!(
        raw.answer().await.result()["stdout"],
        json!("executed: echo")
    );
}
