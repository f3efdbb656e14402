//! Paused and resumed boxes.

use std::time::Duration;

use box_protocol::actions::{
    BoxGet, BoxTransition, BoxTransitionResult, CommandAttach, CommandStart, FileStat,
};
use box_protocol::{BoxError, BoxState, Code};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use box_test_wait::eventually;
use box_tests::machine::{on_each_machine, printed, spec};
use serde_json::{Value, json};

use super::adoption::Host;

async fn move_to(runtime: &BoxRuntime, to: &str) -> Result<BoxTransitionResult, BoxError> {
    let params = serde_json::from_value(json!({"box_id": "p", "to": to})).unwrap();
    runtime.transition(&Caller::Local, params).await
}

async fn state(runtime: &BoxRuntime) -> BoxState {
    let id = box_protocol::BoxId::new("p").unwrap();
    runtime.get(&Caller::Local, &id).await.unwrap().state
}

async fn look(runtime: &BoxRuntime) -> Result<(), BoxError> {
    let params = serde_json::from_value(json!({"box_id": "p", "paths": ["/"]})).unwrap();
    let caller = Caller::Local;
    let looked = runtime.forward::<FileStat>(&caller, &params);
    looked.await.map(drop)
}

/// Counts in a file of the workspace until it is killed.
const COUNTER: &str = "i=0; (while :; do i=$((i+1)); echo $i > count.new; \
    mv count.new count; sleep 0.01; done) > /dev/null 2>&1 & until [ -e count ]; do sleep 0.01; done";

/// The current count, read on the host.
fn count(workspace: &tempfile::TempDir) -> u64 {
    let text = std::fs::read_to_string(workspace.path().join("count")).unwrap();
    text.trim().parse().unwrap()
}

#[tokio::test]
async fn a_paused_box_is_frozen_refuses_calls_and_resumes() {
    on_each_machine(async |machine| {
        let runtime = &machine.runtime;
        let absent = move_to(runtime, "paused").await.unwrap_err();
        assert_eq!(absent.code(), Code::NotFound);
        let workspace = machine.directory();
        let asked = json!({"box_id": "p", "host_path": workspace.path(), "cmd": COUNTER});
        machine.exec_spec(spec(asked)).await.unwrap();
        assert!(!move_to(runtime, "running").await.unwrap().changed);
        if machine.lacks("cgroup.freeze").await {
            let error = move_to(runtime, "paused").await.unwrap_err();
            assert_eq!(error.code(), Code::Unsupported, "{error:?}");
            assert_eq!(state(runtime).await, BoxState::Running);
            return look(runtime).await.unwrap();
        }
        let paused = move_to(runtime, "paused").await.unwrap();
        assert_eq!(
            (paused.changed, paused.info.state),
            (true, BoxState::Paused)
        );
        assert!(!move_to(runtime, "paused").await.unwrap().changed);
        assert_eq!(state(runtime).await, BoxState::Paused);
        assert_eq!(look(runtime).await.unwrap_err().code(), Code::Conflict);
        let asked = json!({"box_id": "p", "host_path": workspace.path(), "cmd": "true"});
        let exec = machine.exec_spec(spec(asked)).await;
        assert_eq!(exec.unwrap_err().code(), Code::Conflict);
        let figures = serde_json::from_value(json!({"box_id": "p"})).unwrap();
        let figures = runtime.stats(&Caller::Local, figures, None).await;
        assert_eq!(figures.unwrap_err().code(), Code::Conflict);
        let again = json!({"spec": {"box_id": "p", "host_path": workspace.path()}});
        let create = serde_json::from_value(again).unwrap();
        let found = runtime.create(&Caller::Local, create).await.unwrap();
        assert_eq!((found.existed, found.info.state), (true, BoxState::Paused));
        let before = count(&workspace);
        // The count would be higher if the counter had run meanwhile.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(count(&workspace), before);
        assert!(move_to(runtime, "running").await.unwrap().changed);
        assert_eq!(state(runtime).await, BoxState::Running);
        look(runtime).await.unwrap();
        eventually("it continues to count", async || count(&workspace) > before).await;
        move_to(runtime, "paused").await.unwrap();
        let delete = serde_json::from_value(json!({"box_id": "p"})).unwrap();
        runtime.delete(&Caller::Local, delete).await.unwrap();
        let gone = move_to(runtime, "running").await.unwrap_err();
        assert_eq!(gone.code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn a_call_wakes_a_box_that_allows_it() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let wakes =
            |cmd: &str| spec(json!({"box_id": "p", "cmd": cmd, "lifetime": {"wake": true}}));
        machine.exec_spec(wakes("true")).await.unwrap();
        let runtime = &machine.runtime;
        move_to(runtime, "paused").await.unwrap();
        look(runtime).await.unwrap();
        assert_eq!(state(runtime).await, BoxState::Running);
        move_to(runtime, "paused").await.unwrap();
        let ran = machine.exec_spec(wakes("echo awake")).await.unwrap();
        assert_eq!(printed(&ran), "awake");
        assert_eq!(state(runtime).await, BoxState::Running);
    })
    .await;
}

#[tokio::test]
async fn neither_silence_nor_idle_time_ends_a_paused_box_but_its_lifetime_does() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let mut config = RuntimeConfig::with(machine.backend.clone());
        // Both are shorter than the pause, and long enough for an agent on a busy machine.
        config.agent_heartbeat = Some(Duration::from_millis(500));
        let runtime = BoxRuntime::start(config);
        let now = serde_json::to_value(box_protocol::UnixMs::now()).unwrap();
        let expires = now.as_u64().unwrap() + 12_000;
        let lifetime = json!({"idle_ms": 2000, "expires_at": expires});
        let workspace = machine.directory();
        let asked = spec(
            json!({"box_id": "p", "host_path": workspace.path(), "cmd": COUNTER,
            "lifetime": lifetime}),
        );
        let exec = box_tests::machine::params(asked);
        runtime.exec(&Caller::Local, exec).await.unwrap();
        move_to(&runtime, "paused").await.unwrap();
        let before = count(&workspace);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(state(&runtime).await, BoxState::Paused);
        move_to(&runtime, "running").await.unwrap();
        eventually("the same box", async || count(&workspace) > before).await;
        move_to(&runtime, "paused").await.unwrap();
        loop {
            let error = look(&runtime).await.unwrap_err();
            if error.code() == Code::NotFound {
                break;
            }
            assert_eq!(error.code(), Code::Conflict, "{error:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_paused_box_is_adopted_paused() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let state = machine.directory();
        let host = Host::start(machine, state.path()).await.unwrap();
        let made = json!({"spec": {"box_id": "p", "persistent": true}});
        host.call::<box_protocol::actions::BoxCreate>(made)
            .await
            .unwrap();
        let program = json!({"text": "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"});
        let start = json!({"box_id": "p", "command_id": "c", "program": program, "cwd": "/tmp",
            "on_disconnect": "keep"});
        host.call::<CommandStart>(start).await.unwrap();
        let paused: Value = json!({"box_id": "p", "to": "paused"});
        host.call::<BoxTransition>(paused).await.unwrap();
        host.kill().await;
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        let get = json!({"box_id": "p"});
        let found = host.call::<BoxGet>(get).await.unwrap().info;
        assert_eq!(found.state, BoxState::Paused);
        let running = json!({"box_id": "p", "to": "running"});
        let moved = host.call::<BoxTransition>(running).await.unwrap();
        assert!(moved.changed);
        loop {
            let read = json!({"box_id": "p", "command_id": "c", "view": "none",
                "until": {"ms": 50}});
            let read = host.call::<CommandAttach>(read).await.unwrap();
            if read.info.size.stdout > 0 {
                break;
            }
        }
        let delete = json!({"box_id": "p", "force": true});
        host.call::<box_protocol::actions::BoxDelete>(delete)
            .await
            .unwrap();
        host.kill().await;
    })
    .await;
}
