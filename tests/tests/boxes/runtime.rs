//! A client and a runtime, connected by the wire only.

use box_protocol::actions::{
    BoxCreate, BoxCreateParams, BoxDelete, BoxDeleteParams, BoxExec, BoxExecParams, BoxGet,
    BoxGetParams, BoxList, BoxListParams, SystemHealth, SystemShutdown, SystemStatus,
};
use box_protocol::{BoxExecutionResult, BoxId, ExecutionStatus, Killed, SpecDraft};
use box_rpc::{CallError, Code, Empty, Peer};
use box_tests::boxes::{BackendCalls, InspectBackend, set_available};
use box_tests::every_transport;
use box_tests::fixture::Setup;
use futures::future::join_all;
use serde_json::{Value, json};

every_transport!(
    a_command_runs_and_its_result_comes_back,
    boxes_are_reused_by_their_id,
    two_first_calls_at_once_start_one_box,
    boxes_can_be_listed,
    status_reports_backend_and_boxes,
    health_names_the_backend_or_none,
    a_box_can_be_made_ahead_of_its_first_command,
    a_deleted_box_is_gone,
    deleting_an_absent_box_is_not_found,
    a_spec_that_disagrees_is_a_conflict_naming_the_field,
    another_workspace_is_a_conflict_that_names_no_path,
    without_a_backend_a_call_is_unavailable,
    a_timeout_ends_the_box_before_the_answer,
    an_exit_code_and_a_signal_are_distinguished,
    more_boxes_than_allowed_are_refused_by_name,
    an_agent_that_exits_is_reported_as_unavailable,
    shutdown_ends_every_box_and_serves_again,
);

fn draft(id: &str, cmd: &str, more: &Value) -> SpecDraft {
    let mut spec = json!({"box_id": id, "cmd": cmd});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    serde_json::from_value(spec).unwrap()
}

async fn exec_with(
    peer: &Peer,
    id: &str,
    cmd: &str,
    more: Value,
) -> Result<BoxExecutionResult, CallError> {
    let params: BoxExecParams =
        serde_json::from_value(json!({"spec": draft(id, cmd, &more)})).unwrap();
    peer.call::<BoxExec>(&params).await
}

async fn exec(peer: &Peer, id: &str, cmd: &str) -> Result<BoxExecutionResult, CallError> {
    exec_with(peer, id, cmd, json!({})).await
}

async fn seen(peer: &Peer) -> BackendCalls {
    peer.call::<InspectBackend>(&Empty {}).await.unwrap()
}

async fn list(peer: &Peer) -> Vec<String> {
    let listed = peer
        .call::<BoxList>(&BoxListParams::default())
        .await
        .unwrap();
    listed
        .items
        .iter()
        .map(|item| item.box_id.to_string())
        .collect()
}

fn id(text: &str) -> BoxId {
    BoxId::new(text).unwrap()
}

fn refused(error: &CallError) -> (Code, String) {
    let CallError::Refused(refused) = error else {
        panic!("{error:?}")
    };
    (refused.code(), refused.message().to_owned())
}

async fn a_command_runs_and_its_result_comes_back(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let result = exec(&fixture.peer, "r-1", "echo remote").await.unwrap();
    assert_eq!(result.box_id, id("r-1"));
    assert_eq!(
        (result.status, result.exit_code),
        (ExecutionStatus::Completed, Some(0))
    );
    assert_eq!(
        (result.stdout.as_str(), result.backend_name.as_str()),
        ("executed: echo remote", "fake")
    );
}

async fn boxes_are_reused_by_their_id(setup: Setup) {
    let fixture = setup.boxes().start().await;
    exec(&fixture.peer, "req-1", "echo first").await.unwrap();
    exec(&fixture.peer, "req-1", "echo second").await.unwrap();
    let seen = seen(&fixture.peer).await;
    assert_eq!(seen.starts, ["req-1"]);
    let expected = [("req-1", "echo first"), ("req-1", "echo second")];
    assert_eq!(
        seen.execs,
        expected.map(|(id, cmd)| (id.to_owned(), cmd.to_owned()))
    );
}

async fn two_first_calls_at_once_start_one_box(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let calls = (0..10).map(|n| {
        let peer = fixture.peer.clone();
        async move { exec(&peer, "shared", &format!("echo {n}")).await }
    });
    for (n, result) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(result.unwrap().stdout, format!("executed: echo {n}"));
    }
    let seen = seen(&fixture.peer).await;
    assert_eq!((seen.starts.len(), seen.execs.len()), (1, 10));
}

async fn boxes_can_be_listed(setup: Setup) {
    let fixture = setup.boxes().start().await;
    assert_eq!(list(&fixture.peer).await, Vec::<String>::new());
    exec(&fixture.peer, "r-2", "echo hi").await.unwrap();
    let listed = fixture
        .peer
        .call::<BoxList>(&BoxListParams::default())
        .await
        .unwrap();
    let [item] = &listed.items[..] else {
        panic!("{listed:?}")
    };
    assert_eq!(
        (item.box_id.as_str(), item.backend_name.as_str()),
        ("r-2", "fake")
    );
    assert!(item.created_at.0 > 0 && item.last_used_at >= item.created_at);
}

async fn status_reports_backend_and_boxes(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let status = |peer: Peer| async move {
        serde_json::to_value(peer.call::<SystemStatus>(&Empty {}).await.unwrap()).unwrap()
    };
    let before = status(fixture.peer.clone()).await;
    assert_eq!(
        (&before["backend"]["name"], &before["backend"]["available"]),
        (&json!("fake"), &json!(true))
    );
    assert_eq!(
        (&before["active_boxes"], &before["idle_ttl_sec"]),
        (&json!(0), &json!(300))
    );
    exec(&fixture.peer, "obs-1", "echo").await.unwrap();
    assert_eq!(status(fixture.peer.clone()).await["active_boxes"], json!(1));
}

async fn health_names_the_backend_or_none(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let health = fixture.peer.call::<SystemHealth>(&Empty {}).await.unwrap();
    assert_eq!(
        (health.name.as_deref(), health.available),
        (Some("fake"), true)
    );
    set_available(&fixture.peer, false).await;
    // The runtime caches the backend's health for a second.
    box_test_wait::eventually("the backend is reported as unavailable", async || {
        let health = fixture.peer.call::<SystemHealth>(&Empty {}).await.unwrap();
        (health.name, health.available) == (None, false)
    })
    .await;
}

async fn a_box_can_be_made_ahead_of_its_first_command(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let params = BoxCreateParams::new(draft("r-create-1", "", &json!({})));
    let made = fixture.peer.call::<BoxCreate>(&params).await.unwrap();
    assert_eq!(
        (
            made.info.box_id.as_str(),
            made.info.backend_name.as_str(),
            made.existed
        ),
        ("r-create-1", "fake", false)
    );
    assert!(
        fixture
            .peer
            .call::<BoxCreate>(&params)
            .await
            .unwrap()
            .existed
    );
    assert_eq!(list(&fixture.peer).await, ["r-create-1"]);
    let found = fixture
        .peer
        .call::<BoxGet>(&BoxGetParams::new(id("r-create-1")))
        .await
        .unwrap();
    assert_eq!(found.info.box_id, id("r-create-1"));
}

fn delete(text: &str) -> BoxDeleteParams {
    BoxDeleteParams {
        box_id: id(text),
        force: false,
    }
}

async fn a_deleted_box_is_gone(setup: Setup) {
    let fixture = setup.boxes().start().await;
    exec(&fixture.peer, "r-del-1", "echo hi").await.unwrap();
    fixture
        .peer
        .call::<BoxDelete>(&delete("r-del-1"))
        .await
        .unwrap();
    assert_eq!(list(&fixture.peer).await, Vec::<String>::new());
    assert_eq!(seen(&fixture.peer).await.stops, ["r-del-1"]);
}

async fn deleting_an_absent_box_is_not_found(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let error = fixture
        .peer
        .call::<BoxDelete>(&delete("nonexistent"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
}

async fn a_spec_that_disagrees_is_a_conflict_naming_the_field(setup: Setup) {
    let fixture = setup.boxes().start().await;
    for (field, first, second) in [
        ("cpus", json!(1.0), json!(2.0)),
        ("network", json!("off"), json!("on")),
        ("memory_mb", json!(512), json!(1024)),
    ] {
        let session = format!("conflict-{field}");
        exec_with(&fixture.peer, &session, "echo first", json!({field: first}))
            .await
            .unwrap();
        let error = exec_with(
            &fixture.peer,
            &session,
            "echo second",
            json!({field: second}),
        )
        .await
        .unwrap_err();
        let (code, message) = refused(&error);
        assert_eq!(code, Code::Conflict);
        assert!(message.starts_with(&format!("{field}: box ")), "{message}");
        assert!(message.contains(", not "), "{message}");
        exec_with(&fixture.peer, &session, "echo third", json!({field: first}))
            .await
            .unwrap();
    }
    assert!(
        !seen(&fixture.peer)
            .await
            .execs
            .iter()
            .any(|(_, cmd)| cmd == "echo second")
    );
}

async fn another_workspace_is_a_conflict_that_names_no_path(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let mount = |path: &str| json!({"host_path": path});
    exec_with(
        &fixture.peer,
        "req-mount",
        "echo first",
        mount("/srv/first"),
    )
    .await
    .unwrap();
    let error = exec_with(
        &fixture.peer,
        "req-mount",
        "echo second",
        mount("/srv/second"),
    )
    .await
    .unwrap_err();
    let (code, message) = refused(&error);
    assert_eq!(code, Code::Conflict);
    assert!(
        message.contains("host_path") && !message.contains("/srv"),
        "{message}"
    );
}

async fn without_a_backend_a_call_is_unavailable(setup: Setup) {
    let fixture = setup.boxes().start().await;
    set_available(&fixture.peer, false).await;
    let error = exec(&fixture.peer, "int-no-backend", "echo hello")
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert_eq!(seen(&fixture.peer).await.starts, Vec::<String>::new());
    set_available(&fixture.peer, true).await;
    exec(&fixture.peer, "int-no-backend", "echo hello")
        .await
        .unwrap();
}

async fn a_timeout_ends_the_box_before_the_answer(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let hang = draft("int-timeout", "hang", &json!({"timeout_sec": 1}));
    let params = json!({"spec": hang, "on_timeout": "drop_box"});
    let params = serde_json::from_value(params).unwrap();
    let result = fixture.peer.call::<BoxExec>(&params).await.unwrap();
    assert_eq!(
        (result.status, result.exit_code),
        (ExecutionStatus::TimedOut, None)
    );
    assert_eq!(result.stderr, "Command timed out after 1 seconds.");
    assert_eq!(result.killed, Some(Killed::Box));
    assert_eq!(list(&fixture.peer).await, Vec::<String>::new());
    assert_eq!(seen(&fixture.peer).await.stops, ["int-timeout"]);
    // Only on request: by default a timeout ends the command.
    let hang = json!({"timeout_sec": 1});
    let result = exec_with(&fixture.peer, "stays", "hang", hang).await;
    assert_eq!(result.unwrap().killed, Some(Killed::Command));
    assert_eq!(list(&fixture.peer).await, ["stays"]);
}

async fn an_exit_code_and_a_signal_are_distinguished(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let code = exec(&fixture.peer, "ends", "exit 3").await.unwrap();
    assert_eq!(
        (code.status, code.exit_code, code.signal),
        (ExecutionStatus::Completed, Some(3), None)
    );
    let signal = exec(&fixture.peer, "ends", "signal 9").await.unwrap();
    assert_eq!(
        (signal.status, signal.exit_code, signal.signal),
        (ExecutionStatus::Completed, Some(137), Some(9))
    );
}

async fn more_boxes_than_allowed_are_refused_by_name(setup: Setup) {
    let fixture = setup.boxes().start().await;
    for n in 0..8 {
        exec(&fixture.peer, &format!("full-{n}"), "echo")
            .await
            .unwrap();
    }
    let (code, message) = refused(&exec(&fixture.peer, "full-8", "echo").await.unwrap_err());
    assert_eq!(code, Code::Capacity);
    assert!(message.contains("the limit of 8 is reached"), "{message}");
    exec(&fixture.peer, "full-0", "echo again").await.unwrap();
    fixture
        .peer
        .call::<BoxDelete>(&delete("full-0"))
        .await
        .unwrap();
    exec(&fixture.peer, "full-8", "echo").await.unwrap();
}

async fn an_agent_that_exits_is_reported_as_unavailable(setup: Setup) {
    let fixture = setup.boxes().start().await;
    exec(&fixture.peer, "mortal", "echo").await.unwrap();
    exec(&fixture.peer, "other", "echo").await.unwrap();
    let error = exec(&fixture.peer, "mortal", "die").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    exec(&fixture.peer, "other", "echo").await.unwrap();
    let again = exec(&fixture.peer, "mortal", "echo back").await.unwrap();
    assert_eq!(again.stdout, "executed: echo back", "a new box replaces it");
}

async fn shutdown_ends_every_box_and_serves_again(setup: Setup) {
    let fixture = setup.boxes().start().await;
    for n in 0..3 {
        exec(&fixture.peer, &format!("s-{n}"), "echo")
            .await
            .unwrap();
    }
    let params = serde_json::from_value(json!({})).unwrap();
    fixture.peer.call::<SystemShutdown>(&params).await.unwrap();
    assert_eq!(
        (
            list(&fixture.peer).await.len(),
            seen(&fixture.peer).await.stops.len()
        ),
        (0, 3)
    );
    exec(&fixture.peer, "s-0", "echo").await.unwrap();
}
