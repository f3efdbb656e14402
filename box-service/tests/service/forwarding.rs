//! The contract of a gateway: the service decides where policy applies, and forwards the rest.

use std::time::Duration;

use box_protocol::actions::*;
use box_protocol::{BoxId, BoxMountSpec, Code, HostPathMode, Network, SpecDraft};
use box_rpc::{CallError, Empty, Peer};
use box_service::connector::InProcess;
use box_service::{BoxService, ServiceConfig};
use box_test_wait::eventually;
use futures::StreamExt as _;
use serde_json::json;

use crate::scripted_runtime::{
    ConnectionEnds, ScriptedRuntime, ServiceFixture, allowing, connect, connect_as,
};

/// A gateway's connection to a service in front of this runtime.
struct Gateway {
    _to_service: ConnectionEnds,
    service: ServiceFixture,
    peer: Peer,
}

async fn gateway(runtime: &ScriptedRuntime, config: ServiceConfig) -> Gateway {
    let service = runtime.ready(config).await;
    let (to_service, client) = connect(service.router());
    Gateway {
        _to_service: to_service,
        service,
        peer: client.peer().unwrap(),
    }
}

fn exec(spec: SpecDraft) -> BoxExecParams {
    BoxExecParams::new(spec)
}

fn refused(error: CallError) -> box_protocol::BoxError {
    match error {
        CallError::Refused(error) => error,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn exec_and_create_go_through_policy() {
    let runtime = ScriptedRuntime::new().printing("x".repeat(9000), "");
    let config = ServiceConfig {
        profile: "offline_readonly".into(),
        ..ServiceConfig::default()
    };
    let gateway = gateway(&runtime, config).await;
    let draft = SpecDraft::new("s").cmd("cat").network(Network::On);
    let result = gateway.peer.call::<BoxExec>(&exec(draft.clone())).await;
    assert_eq!(result.unwrap().stdout.len(), 4000);
    assert_eq!(runtime.first_spec().network, Network::Off);
    let params = BoxCreateParams::new(SpecDraft {
        box_id: Some("t".into()),
        ..draft
    });
    let made = gateway.peer.call::<BoxCreate>(&params).await.unwrap();
    assert_eq!(made.info.network, Network::Off);
}

#[tokio::test]
async fn refusals_keep_their_code_and_are_recorded() {
    let runtime = ScriptedRuntime::new();
    let gateway = gateway(&runtime, ServiceConfig::default()).await;
    let draft = SpecDraft::new("s").cmd("ls").host_path("/data");
    let error = refused(
        gateway
            .peer
            .call::<BoxExec>(&exec(draft))
            .await
            .unwrap_err(),
    );
    assert_eq!(error.code(), Code::Validation);
    assert!(error.message().contains("allowed_host_mount_roots"));
    let missing = BoxGetParams::new(BoxId::new("absent").unwrap());
    let error = refused(gateway.peer.call::<BoxGet>(&missing).await.unwrap_err());
    assert_eq!(
        (error.code(), error.message()),
        (Code::NotFound, "box absent not found")
    );
    let status = gateway.peer.call::<SystemStatus>(&Empty {}).await.unwrap();
    assert_eq!(status.profile.as_deref(), Some("default"));
    assert_eq!(status.recent_error_count, 1);
    assert_eq!(status.recent_errors, gateway.service.recent_errors());
    assert_eq!(status.idle_ttl_sec, 300);
}

#[tokio::test]
async fn policy_applies_to_added_mounts() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new();
    let gateway = gateway(&runtime, allowing(&[dir.path()])).await;
    let draft = SpecDraft::new("s").cmd("ls");
    gateway.peer.call::<BoxExec>(&exec(draft)).await.unwrap();
    let update = |path: &str| BoxUpdateParams {
        box_id: BoxId::new("s").unwrap(),
        name: None,
        labels: std::collections::BTreeMap::new(),
        note: None,
        lifetime: None,
        extra_mounts: Some(vec![
            BoxMountSpec::new(path, "/mnt/x", HostPathMode::Ro).unwrap(),
        ]),
        defaults: None,
        network_policy: None,
    };
    let error = gateway.peer.call::<BoxUpdate>(&update("/etc")).await;
    assert_eq!(refused(error.unwrap_err()).code(), Code::Validation);
    assert!(runtime.record().updates.is_empty());
    let inside = update(dir.path().to_str().unwrap());
    gateway.peer.call::<BoxUpdate>(&inside).await.unwrap();
    assert_eq!(runtime.record().updates.len(), 1);
}

#[tokio::test]
async fn an_action_the_runtime_lacks_is_unsupported() {
    let gateway = gateway(&ScriptedRuntime::new(), ServiceConfig::default()).await;
    let params = serde_json::from_value(json!({"box_id": "s"})).unwrap();
    let error = gateway.peer.call::<ShellList>(&params).await;
    assert_eq!(refused(error.unwrap_err()).code(), Code::Unsupported);
}

#[tokio::test]
async fn chunks_are_forwarded_in_order_before_the_result() {
    let gateway = gateway(&ScriptedRuntime::new(), ServiceConfig::default()).await;
    let params = BoxEventsParams {
        after: Some(7),
        ..BoxEventsParams::default()
    };
    let mut events = gateway.peer.stream::<BoxEvents>(&params).await.unwrap();
    let mut seen = Vec::new();
    while let Some(event) = events.next().await {
        seen.push(event.unwrap().seq);
    }
    assert_eq!(seen, (7..107).collect::<Vec<_>>());
    assert_eq!(events.finish().await.unwrap().next, 107);
}

#[tokio::test]
async fn an_error_after_chunks_is_forwarded() {
    let gateway = gateway(&ScriptedRuntime::new(), ServiceConfig::default()).await;
    let params = BoxEventsParams {
        follow: true,
        ..BoxEventsParams::default()
    };
    let events = gateway.peer.stream::<BoxEvents>(&params).await.unwrap();
    let error = refused(events.finish().await.unwrap_err());
    assert_eq!(
        (error.code(), error.message()),
        (Code::Capacity, "no more events")
    );
}

#[tokio::test]
async fn policy_applies_to_a_streamed_exec() {
    let runtime = ScriptedRuntime::new().printing("one two three", "");
    let gateway = gateway(&runtime, ServiceConfig::default()).await;
    let params = BoxExecParams {
        attach: Some(AttachOptions::default()),
        ..exec(SpecDraft::new("s").cmd("cat").timeout_sec(999))
    };
    let mut output = gateway.peer.stream::<BoxExec>(&params).await.unwrap();
    let mut words = Vec::new();
    while let Some(chunk) = output.next().await {
        match chunk.unwrap() {
            CommandChunk::Text(piece) => words.push(piece.data),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(words, ["one", "two", "three"]);
    assert_eq!(output.finish().await.unwrap().stdout, "one two three");
    assert_eq!(runtime.first_spec().timeout_sec, 120);
}

#[tokio::test]
async fn context_and_deadline_are_forwarded() {
    let runtime = ScriptedRuntime::new();
    let gateway = gateway(&runtime, ServiceConfig::default()).await;
    let tenant = json!({"namespace": "ws", "generation": 3});
    let quick = exec(SpecDraft::new("s").cmd("ls"));
    let request = gateway.peer.request::<BoxExec>(&quick);
    request.context(&tenant).call().await.unwrap();
    assert_eq!(runtime.record().contexts, [tenant]);

    let hang = exec(SpecDraft::new("s").cmd("hang"));
    let request = gateway.peer.request::<BoxExec>(&hang);
    let late = request.deadline(Duration::from_millis(50)).call().await;
    assert_eq!(late.unwrap_err().code(), Code::Timeout);
    let deadlines = runtime.record().deadlines;
    assert_eq!(deadlines.len(), 1);
    assert!(deadlines[0] <= Duration::from_millis(50), "{deadlines:?}");
    cancelled(&runtime, 1).await;
}

async fn cancelled(runtime: &ScriptedRuntime, times: usize) {
    eventually("the command is cancelled", async || {
        runtime.record().cancelled >= times
    })
    .await;
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_at_the_runtime() {
    let runtime = ScriptedRuntime::new();
    let gateway = gateway(&runtime, ServiceConfig::default()).await;
    let hang = exec(SpecDraft::new("s").cmd("hang"));
    let call = gateway.peer.call::<BoxExec>(&hang);
    let gave_up = tokio::time::timeout(Duration::from_millis(50), call).await;
    assert!(gave_up.is_err());
    cancelled(&runtime, 1).await;
}

#[tokio::test]
async fn the_runtime_receives_the_callers_identity() {
    let runtime = ScriptedRuntime::new();
    let connector = InProcess::new(runtime.router());
    let service = BoxService::with_connector(ServiceConfig::default(), connector).unwrap();
    for caller in ["alice", "bob", "alice"] {
        let (_ends, client) = connect_as(&box_rpc::Caller::token(caller), service.router());
        let peer = client.peer().unwrap();
        let draft = SpecDraft::new(caller).cmd("ls");
        peer.call::<BoxExec>(&exec(draft)).await.unwrap();
        peer.call::<BoxExec>(&exec(SpecDraft::new(caller)))
            .await
            .unwrap_err();
    }
    assert_eq!(runtime.record().callers, ["alice", "bob", "alice"]);
    let (_ends, client) = connect_as(&box_rpc::Caller::token("bob"), service.router());
    let peer = client.peer().unwrap();
    let status = peer.call::<SystemStatus>(&Empty {}).await.unwrap();
    assert_eq!(status.recent_error_count, 1);
    assert_eq!(service.recent_errors().len(), 3);
}

/// Behind one connection, all callers would be the same caller and see each other's boxes.
#[tokio::test]
async fn a_runtime_without_caller_identity_serves_only_local_calls() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let (_ends, client) = connect_as(&box_rpc::Caller::token("mallory"), service.router());
    let peer = client.peer().unwrap();
    let list = peer.call::<BoxList>(&BoxListParams::default()).await;
    assert_eq!(refused(list.unwrap_err()).code(), Code::Denied);
    let shutdown = peer
        .call::<SystemShutdown>(&SystemShutdownParams::default())
        .await;
    assert_eq!(refused(shutdown.unwrap_err()).code(), Code::Denied);
    let (_own, client) = connect_as(&box_rpc::Caller::Local, service.router());
    let own = client.peer().unwrap();
    own.call::<BoxList>(&BoxListParams::default())
        .await
        .unwrap();
}
