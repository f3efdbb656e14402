//! The policy layer over a runtime behind every transport.

use box_protocol::ExecutionStatus;
use box_rpc::{Code, Empty};
use box_service::{BoxService, Query, ServiceConfig};
use box_tests::boxes::{BackendCalls, InspectBackend, set_available};
use box_tests::every_transport;
use box_tests::fixture::{Fixture, Setup};
use serde_json::{Map, Value, json};

every_transport!(
    a_tool_runs_in_the_box_of_its_launcher,
    a_query_without_a_launcher_has_a_separate_box,
    long_output_is_cut_around_a_notice,
    locked_fields_and_the_longest_timeout_are_the_profiles,
    the_default_workspace_is_mounted,
    a_path_outside_the_roots_never_reaches_the_runtime,
    a_workspace_over_its_quota_runs_nothing,
    a_box_that_writes_too_much_is_deleted,
    a_box_that_writes_too_much_and_fails_is_over_its_quota,
    failures_are_remembered_with_their_class,
    status_joins_runtime_and_service,
    a_conflict_keeps_its_type_through_every_hop,
    output_within_the_limit_is_unchanged_and_each_stream_is_cut_alone,
    the_default_profile_fills_in_unset_fields,
    a_caller_can_set_an_unlocked_field,
    every_way_to_write_a_timeout_is_cut_to_the_longest,
    network_extended_has_higher_limits,
    a_path_under_a_configured_root_is_mounted,
    workspace_and_root_derive_from_the_shared_root,
    the_configured_quota_is_set_in_the_spec,
    the_services_sessions_are_the_runtimes_and_can_be_deleted,
);

fn object(value: Value) -> Map<String, Value> {
    let Value::Object(object) = value else {
        panic!("{value}")
    };
    object
}

fn query(id: u32) -> Query {
    Query::new(id).from_launcher("person", "test_user")
}

async fn service(fixture: &Fixture, config: Value) -> BoxService {
    let config: ServiceConfig = serde_json::from_value(config).unwrap();
    let service = BoxService::with_client(config, fixture.peer.clone()).unwrap();
    service.initialize().await.unwrap();
    service
}

async fn seen(fixture: &Fixture) -> BackendCalls {
    fixture
        .peer
        .call::<InspectBackend>(&Empty {})
        .await
        .unwrap()
}

async fn a_tool_runs_in_the_box_of_its_launcher(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    let result = service
        .execute_tool(object(json!({"command": "pwd"})), &query(7))
        .await
        .unwrap();
    assert_eq!(
        (result.session_id.as_str(), result.ok),
        ("person_test_user", true)
    );
    assert_eq!(seen(&fixture).await.starts, ["person_test_user"]);
}

async fn a_query_without_a_launcher_has_a_separate_box(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    let command = object(json!({"command": "echo service-path"}));
    let result = service
        .execute_tool(command, &Query::new(42))
        .await
        .unwrap();
    assert_eq!(
        (result.ok, result.status, result.session_id.as_str()),
        (true, ExecutionStatus::Completed, "42")
    );
    assert!(result.stdout.contains("service-path"));
}

async fn long_output_is_cut_around_a_notice(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({"output_limit_chars": 100})).await;
    let result = service
        .execute_tool(object(json!({"command": "print 500"})), &query(21))
        .await
        .unwrap();
    assert_eq!(
        (result.stdout_truncated, result.stderr_truncated),
        (true, false)
    );
    assert!(result.stdout.chars().count() <= 100);
    assert!(
        result.stdout.contains("characters truncated"),
        "{}",
        result.stdout
    );
    assert!(result.stdout.starts_with('é') && result.stdout.ends_with('é'));
    assert_eq!(result.stderr, "quiet");
}

async fn locked_fields_and_the_longest_timeout_are_the_profiles(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({"profile": "offline_readonly"})).await;
    let payload = json!({"cmd": "echo hi", "box_id": "41", "read_only_rootfs": false, "network": "on", "timeout_sec": "999"});
    service
        .execute_spec_payload(object(payload), &query(41))
        .await
        .unwrap();
    let spec = &seen(&fixture).await.specs[0];
    assert_eq!(
        (&spec["read_only_rootfs"], &spec["network"]),
        (&json!(true), &json!("off"))
    );
    assert_eq!(spec["timeout_sec"], json!(60));
}

async fn the_default_workspace_is_mounted(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let workspace = root.path().join("default-workspace");
    let config =
        json!({"allowed_host_mount_roots": [root.path()], "default_host_workspace": workspace});
    let service = service(&fixture, config).await;
    assert!(workspace.is_dir());
    service
        .execute_tool(object(json!({"command": "pwd"})), &query(15))
        .await
        .unwrap();
    let real = workspace.canonicalize().unwrap();
    assert_eq!(seen(&fixture).await.specs[0]["host_path"], json!(real));
}

async fn a_path_outside_the_roots_never_reaches_the_runtime(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    for name in ["allowed", "allowed-not"] {
        std::fs::create_dir(root.path().join(name)).unwrap();
    }
    std::os::unix::fs::symlink("/", root.path().join("allowed/link")).unwrap();
    let service = service(
        &fixture,
        json!({"allowed_host_mount_roots": [root.path().join("allowed")]}),
    )
    .await;
    for path in [
        root.path().join("allowed-not"),
        root.path().join("allowed/link/srv"),
        root.path().join("allowed/../allowed-not"),
        "/".into(),
    ] {
        let payload = json!({"cmd": "pwd", "box_id": "12", "host_path": path});
        let error = service
            .execute_spec_payload(object(payload), &query(12))
            .await
            .unwrap_err();
        assert_eq!(
            error.code(),
            Code::Validation,
            "{}: {error}",
            path.display()
        );
    }
    assert_eq!(seen(&fixture).await, BackendCalls::default());
}

fn quota(root: &std::path::Path) -> Value {
    json!({"allowed_host_mount_roots": [root], "default_host_workspace": root.join("w"), "workspace_quota_mb": 1})
}

async fn a_workspace_over_its_quota_runs_nothing(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let service = service(&fixture, quota(root.path())).await;
    std::fs::write(root.path().join("w/large.bin"), vec![b'x'; 2 << 20]).unwrap();
    let error = service
        .execute_tool(object(json!({"command": "echo hi"})), &query(44))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted before execution"),
        "{error}"
    );
    assert_eq!(seen(&fixture).await.starts, Vec::<String>::new());
}

async fn a_box_that_writes_too_much_is_deleted(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let service = service(&fixture, quota(root.path())).await;
    let command = object(json!({"command": format!("write output.bin {}", 2 << 20)}));
    let error = service.execute_tool(command, &query(45)).await.unwrap_err();
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted after execution"),
        "{error}"
    );
    let seen = seen(&fixture).await;
    assert_eq!(
        (seen.starts, seen.stops),
        (
            vec!["person_test_user".to_owned()],
            vec!["person_test_user".to_owned()]
        )
    );
}

async fn a_box_that_writes_too_much_and_fails_is_over_its_quota(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let service = service(&fixture, quota(root.path())).await;
    let run = async |command: String| {
        let parameters = object(json!({"command": command}));
        service.execute_tool(parameters, &query(46)).await
    };
    let error = run("spoil small.bin 1".to_owned()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "within it: {error}");
    let error = run(format!("spoil large.bin {}", 2 << 20))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted after execution"),
        "{error}"
    );
    assert_eq!(service.sessions().await.unwrap(), []);
}

async fn failures_are_remembered_with_their_class(setup: Setup) {
    let fixture = setup.boxes().start().await;
    set_available(&fixture.peer, false).await;
    let service = service(&fixture, json!({})).await;
    for n in 100..160 {
        service
            .execute_tool(object(json!({"command": "fail"})), &query(n))
            .await
            .unwrap_err();
    }
    let errors = serde_json::to_value(service.recent_errors()).unwrap();
    let errors = errors.as_array().unwrap();
    assert_eq!(errors.len(), 50);
    assert_eq!(
        (&errors[0]["query_id"], &errors[49]["query_id"]),
        (&json!("110"), &json!("159"))
    );
    assert!(
        errors
            .iter()
            .all(|error| error["type"] == json!("BoxBackendUnavailableError")),
        "{}",
        errors[0]
    );
}

async fn status_joins_runtime_and_service(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    let status = serde_json::to_value(service.status().await).unwrap();
    assert_eq!(
        (&status["profile"], &status["backend"]["name"]),
        (&json!("default"), &json!("fake"))
    );
    assert_eq!(
        (&status["available"], &status["active_boxes"]),
        (&json!(true), &json!(0))
    );
}

async fn a_conflict_keeps_its_type_through_every_hop(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    let payload =
        |memory: u32| object(json!({"cmd": "echo", "box_id": "hop", "memory_mb": memory}));
    service
        .execute_spec_payload(payload(256), &query(1))
        .await
        .unwrap();
    let error = service
        .execute_spec_payload(payload(512), &query(1))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert!(
        error
            .message()
            .starts_with("memory_mb: box hop has 256, not 512;"),
        "{error}"
    );
    let errors = serde_json::to_value(service.recent_errors()).unwrap();
    assert_eq!(errors[0]["type"], json!("BoxSessionConflictError"));
}

async fn output_within_the_limit_is_unchanged_and_each_stream_is_cut_alone(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({"output_limit_chars": 50})).await;
    for (command, length, cut) in [
        ("print 3", 3, false),
        ("print 50", 50, false),
        ("print 51", 50, true),
    ] {
        let result = service
            .execute_tool(object(json!({"command": command})), &query(20))
            .await
            .unwrap();
        assert_eq!(
            (result.stdout.chars().count(), result.stdout_truncated),
            (length, cut),
            "{command}"
        );
        assert_eq!(
            (result.stderr.as_str(), result.stderr_truncated),
            ("quiet", false)
        );
    }
}

async fn first_spec(fixture: &Fixture) -> Value {
    seen(fixture).await.specs[0].clone()
}

/// The spec of the box in which a service runs a command with these options.
async fn spec_of_a_tool_call(fixture: &Fixture, options: Value, number: u32) -> Value {
    let service = service(fixture, options).await;
    let payload = object(json!({"command": "echo hi"}));
    service.execute_tool(payload, &query(number)).await.unwrap();
    first_spec(fixture).await
}

async fn the_default_profile_fills_in_unset_fields(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let spec = spec_of_a_tool_call(&fixture, json!({}), 30).await;
    assert_eq!(
        (&spec["network"], &spec["timeout_sec"]),
        (&json!("off"), &json!(30))
    );
    assert_eq!(
        (&spec["cpus"], &spec["memory_mb"], &spec["pids_limit"]),
        (&json!(1.0), &json!(512), &json!(128))
    );
    assert_eq!(spec["read_only_rootfs"], json!(true));
}

async fn a_caller_can_set_an_unlocked_field(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    let payload = json!({"cmd": "echo hi", "box_id": "31", "network": "on"});
    service
        .execute_spec_payload(object(payload), &query(31))
        .await
        .unwrap();
    assert_eq!(first_spec(&fixture).await["network"], json!("on"));
}

async fn every_way_to_write_a_timeout_is_cut_to_the_longest(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    for (n, timeout) in [json!(999), json!("999"), json!(999.0)]
        .into_iter()
        .enumerate()
    {
        let payload = json!({"cmd": "echo", "box_id": format!("t{n}"), "timeout_sec": timeout});
        service
            .execute_spec_payload(object(payload), &query(33))
            .await
            .unwrap();
        assert_eq!(
            seen(&fixture).await.specs[n]["timeout_sec"],
            json!(120),
            "{timeout}"
        );
    }
}

async fn network_extended_has_higher_limits(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let spec = spec_of_a_tool_call(&fixture, json!({"profile": "network_extended"}), 42).await;
    assert_eq!(
        (&spec["network"], &spec["cpus"]),
        (&json!("on"), &json!(2.0))
    );
    assert_eq!(
        (&spec["memory_mb"], &spec["read_only_rootfs"]),
        (&json!(1024), &json!(false))
    );
}

async fn a_path_under_a_configured_root_is_mounted(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("mounted");
    std::fs::create_dir(&directory).unwrap();
    let service = service(&fixture, json!({"allowed_host_mount_roots": [root.path()]})).await;
    let payload =
        json!({"cmd": "pwd", "box_id": "11", "host_path": directory, "host_path_mode": "rw"});
    let result = service
        .execute_spec_payload(object(payload), &query(11))
        .await
        .unwrap();
    assert_eq!(
        (result.ok, seen(&fixture).await.starts),
        (true, vec!["11".to_owned()])
    );
}

async fn workspace_and_root_derive_from_the_shared_root(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let shared = root.path().join("shared");
    let service = service(&fixture, json!({"shared_host_root": shared})).await;
    assert!(shared.join("default").is_dir());
    service
        .execute_tool(object(json!({"command": "pwd"})), &query(16))
        .await
        .unwrap();
    let real = shared.canonicalize().unwrap().join("default");
    assert_eq!(first_spec(&fixture).await["host_path"], json!(real));
}

async fn the_configured_quota_is_set_in_the_spec(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let root = tempfile::tempdir().unwrap();
    let service = service(&fixture, quota(root.path())).await;
    service
        .execute_tool(object(json!({"command": "echo hi"})), &query(43))
        .await
        .unwrap();
    assert_eq!(first_spec(&fixture).await["workspace_quota_mb"], json!(1));
}

async fn the_services_sessions_are_the_runtimes_and_can_be_deleted(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let service = service(&fixture, json!({})).await;
    service
        .execute_tool(
            object(json!({"command": "echo hi"})),
            &Query::new("test-session"),
        )
        .await
        .unwrap();
    let sessions = service.sessions().await.unwrap();
    let names: Vec<_> = sessions
        .iter()
        .map(|session| session.box_id.as_str())
        .collect();
    assert_eq!(names, ["test-session"]);
    let id = sessions[0].box_id.clone();
    service.delete_session(id.clone()).await.unwrap();
    assert_eq!(service.sessions().await.unwrap(), []);
    let error = service.delete_session(id).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
}
