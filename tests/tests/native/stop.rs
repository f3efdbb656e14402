//! Stopped boxes: their sandboxes have ended, and their files remain.

use std::time::Duration;

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxEvent, BoxGet, BoxTransition, BoxTransitionResult, FileStat, FileWrite,
};
use box_protocol::{BoxError, BoxState, Code, CommandInfo, CommandState, ExitWhy, SpecDraft};
use box_runtime::{BoxRuntime, Caller};
use box_test_wait::eventually;
use box_tests::machine::{Machine, mark, on_each_machine, printed, processes_with, spec};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::adoption::{Host, code};

fn params<T: serde::de::DeserializeOwned>(mut more: Value) -> T {
    more["box_id"] = json!("s");
    serde_json::from_value(more).unwrap()
}

async fn move_to(runtime: &BoxRuntime, to: &str) -> Result<BoxTransitionResult, BoxError> {
    let asked = params(json!({ "to": to }));
    runtime.transition(&Caller::Local, asked).await
}

async fn state(runtime: &BoxRuntime) -> Result<BoxState, Code> {
    let id = box_protocol::BoxId::new("s").unwrap();
    let answer = runtime.get(&Caller::Local, &id).await;
    answer.map(|info| info.state).map_err(|error| error.code())
}

async fn start(machine: &Machine, id: &str, text: &str, hold: bool) {
    let asked = params(
        json!({"command_id": id, "program": {"text": text}, "cwd": "/tmp",
        "on_disconnect": "keep", "hold": hold}),
    );
    let caller = Caller::Local;
    let started = machine.runtime.start_command(&caller, asked, None);
    started.await.unwrap();
}

async fn get(machine: &Machine, id: &str) -> Result<CommandInfo, BoxError> {
    let key = params(json!({"command_id": id}));
    machine.runtime.get_command(&Caller::Local, key).await
}

async fn look(runtime: &BoxRuntime) -> Result<(), BoxError> {
    let asked = params(json!({"paths": ["/"]}));
    let looked = runtime.forward::<FileStat>(&Caller::Local, &asked).await;
    looked.map(drop)
}

async fn kinds(runtime: &BoxRuntime) -> Vec<String> {
    let (to, mut chunks) = mpsc::channel(64);
    let asked = serde_json::from_value(json!({"box_id": "s"})).unwrap();
    runtime
        .events(&Caller::Local, asked, Some(to))
        .await
        .unwrap();
    let mut kinds = Vec::new();
    while let Some(BoxEvent { kind, .. }) = chunks.recv().await {
        kinds.push(kind);
    }
    kinds
}

/// Waits until the box has this state, or is absent.
async fn becomes(runtime: &BoxRuntime, wanted: Result<BoxState, Code>) {
    eventually(&format!("{wanted:?}"), async || {
        state(runtime).await == wanted
    })
    .await;
}

#[tokio::test]
async fn a_stopped_box_has_its_files_and_none_of_its_processes() {
    on_each_machine(async |machine| {
        let runtime = &machine.runtime;
        let seconds = mark();
        let leave = format!(
            "for d in /workspace /tmp /var/tmp ~; do echo kept > $d/f; done; \
             setsid sleep {seconds} > /dev/null 2>&1 & trap '' TERM; true"
        );
        machine.exec("s", &leave).await;
        // A command that forks as fast as it can and leaves room for the rest, one that waits for
        // its reader, and a shell with a run.
        let forks = format!("for n in $(seq 60); do sleep {seconds} & done; wait");
        start(machine, "forks", &forks, false).await;
        start(machine, "held", "true", true).await;
        start(machine, "over", "echo before; exit 3", false).await;
        let shell = params(json!({"shell_id": "sh", "language": "sh"}));
        runtime.create_shell(&Caller::Local, shell).await.unwrap();
        let run = params(json!({"shell_id": "sh", "command_id": "run", "text": format!("sleep {seconds}")}));
        runtime.run_in_shell(&Caller::Local, run, None).await.unwrap();
        eventually("the command ends", async || {
            get(machine, "over").await.unwrap().state == CommandState::Exited
        })
        .await;
        let stopped = move_to(runtime, "stopped").await.unwrap();
        assert_eq!((stopped.changed, stopped.info.state), (true, BoxState::Stopped));
        assert_eq!(processes_with(&seconds), 0);
        assert!(!move_to(runtime, "stopped").await.unwrap().changed);
        assert_eq!(move_to(runtime, "paused").await.unwrap_err().code(), Code::Conflict);
        assert_eq!(look(runtime).await.unwrap_err().code(), Code::Conflict);
        let exec = machine.exec_spec(SpecDraft::new("s").cmd("true")).await;
        assert_eq!(exec.unwrap_err().code(), Code::Conflict);
        let started = move_to(runtime, "running").await.unwrap();
        assert_eq!((started.changed, started.info.state), (true, BoxState::Running));
        let kept = machine
            .exec("s", "cd /; cat workspace/f tmp/f var/tmp/f ~/f | sort | uniq -c; ls /proc | grep -c '^[0-9]'")
            .await;
        let kept: Vec<_> = printed(&kept).split_whitespace().collect();
        assert_eq!(kept[..2], ["4", "kept"]);
        assert!(kept[2].parse::<u32>().unwrap() <= 6, "{kept:?}");
        for id in ["forks", "held", "run"] {
            let exit = get(machine, id).await.unwrap().exit.unwrap();
            assert_eq!(exit.why, ExitWhy::BoxEnded, "{id}");
        }
        let over = get(machine, "over").await.unwrap();
        assert_eq!((over.exit.unwrap().code, over.size.stdout), (Some(3), 7));
        let shells = params(json!({}));
        let shells = runtime.list_shells(&Caller::Local, shells).await;
        assert_eq!(shells.unwrap().items.len(), 0);
        assert_eq!(kinds(runtime).await, ["started", "stopped", "started"]);
    })
    .await;
}

#[tokio::test]
async fn an_idle_box_stops_and_a_call_starts_it() {
    on_each_machine(async |machine| {
        let runtime = &machine.runtime;
        let lifetime = json!({"idle_ms": 100, "on_idle": "stop", "wake": true});
        let asked = |cmd: &str| spec(json!({"box_id": "s", "cmd": cmd, "lifetime": lifetime}));
        machine.exec_spec(asked("echo 1 > /tmp/f")).await.unwrap();
        becomes(runtime, Ok(BoxState::Stopped)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(state(runtime).await, Ok(BoxState::Stopped), "for ever");
        look(runtime).await.unwrap();
        assert_eq!(state(runtime).await, Ok(BoxState::Running));
        becomes(runtime, Ok(BoxState::Stopped)).await;
        let ran = machine.exec_spec(asked("cat /tmp/f")).await.unwrap();
        assert_eq!(printed(&ran), "1");
        becomes(runtime, Ok(BoxState::Stopped)).await;
        let update = params(json!({"lifetime": {"idle_ms": 100, "delete_after_stop_ms": 50}}));
        runtime.update(&Caller::Local, update).await.unwrap();
        becomes(runtime, Err(Code::NotFound)).await;
        assert_eq!(kinds(runtime).await.last().unwrap(), "expired");
    })
    .await;
}

#[tokio::test]
async fn an_idle_or_expired_box_is_paused_and_a_call_resumes_it() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let runtime = &machine.runtime;
        let lifetime = json!({"idle_ms": 100, "on_idle": "pause", "wake": true});
        let asked = |cmd: &str| spec(json!({"box_id": "s", "cmd": cmd, "lifetime": lifetime}));
        // Processes that an exec leaves behind do not keep the box busy.
        let text = "sleep 1000 > /dev/null 2>&1 & echo $! > /tmp/pid";
        machine.exec_spec(asked(text)).await.unwrap();
        becomes(runtime, Ok(BoxState::Paused)).await;
        look(runtime).await.unwrap();
        assert_eq!(state(runtime).await, Ok(BoxState::Running));
        becomes(runtime, Ok(BoxState::Paused)).await;
        let ran = machine.exec_spec(asked("cat /proc/$(cat /tmp/pid)/comm"));
        assert_eq!(printed(&ran.await.unwrap()), "sleep", "it kept its memory");
        let at = box_protocol::UnixMs::now().0 + 200;
        let lifetime = json!({"idle_ms": null, "expires_at": at, "on_expiry": "pause"});
        let update = params(json!({ "lifetime": lifetime }));
        runtime.update(&Caller::Local, update).await.unwrap();
        becomes(runtime, Ok(BoxState::Paused)).await;
        look(runtime).await.unwrap();
        let at = box_protocol::UnixMs::now().0 + 200;
        let lifetime = json!({"expires_at": at, "on_expiry": "stop"});
        let update = params(json!({ "lifetime": lifetime }));
        runtime.update(&Caller::Local, update).await.unwrap();
        becomes(runtime, Ok(BoxState::Stopped)).await;
        look(runtime).await.unwrap();
        assert_eq!(state(runtime).await, Ok(BoxState::Running));
    })
    .await;
}

#[tokio::test]
async fn a_paused_box_can_be_stopped() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        machine
            .exec("s", "sleep 60 > /dev/null 2>&1 & echo 1 > /tmp/f")
            .await;
        for to in ["paused", "stopped", "running"] {
            assert!(move_to(&machine.runtime, to).await.unwrap().changed, "{to}");
        }
        assert_eq!(printed(&machine.exec("s", "cat /tmp/f").await), "1");
    })
    .await;
}

#[tokio::test]
async fn a_stopped_box_is_adopted_stopped() {
    on_each_machine(async |machine| {
        let directory = machine.directory();
        let host = Host::start(machine, directory.path()).await.unwrap();
        let made = json!({"spec": {"box_id": "s", "persistent": true}});
        host.call::<BoxCreate>(made).await.unwrap();
        let write = json!({"box_id": "s", "path": "/tmp/f", "data": "aGk="});
        host.call::<FileWrite>(write).await.unwrap();
        let to = |to: &str| json!({"box_id": "s", "to": to});
        host.call::<BoxTransition>(to("stopped")).await.unwrap();
        host.kill().await;
        let host = Host::start(machine, directory.path()).await.unwrap();
        host.adopts(1).await;
        let found = host.call::<BoxGet>(json!({"box_id": "s"})).await;
        assert_eq!(found.unwrap().info.state, BoxState::Stopped);
        host.call::<BoxTransition>(to("running")).await.unwrap();
        let look = json!({"box_id": "s", "paths": ["/tmp/f"]});
        let found = host.call::<FileStat>(look).await.unwrap();
        let found = serde_json::to_value(found).unwrap().to_string();
        assert!(found.contains("\"size\":2"), "{found}");
        let gone = json!({"box_id": "s", "force": true});
        host.call::<BoxDelete>(gone).await.unwrap();
        host.kill().await;
    })
    .await;
}

#[tokio::test]
async fn a_stopped_box_of_another_version_keeps_its_files() {
    on_each_machine(async |machine| {
        let directory = machine.directory();
        let host = Host::start(machine, directory.path()).await.unwrap();
        let made = json!({"spec": {"box_id": "s", "persistent": true}});
        host.call::<BoxCreate>(made).await.unwrap();
        let write = json!({"box_id": "s", "path": "/tmp/f", "data": "aGk="});
        host.call::<FileWrite>(write).await.unwrap();
        let to = |to: &str| json!({"box_id": "s", "to": to});
        host.call::<BoxTransition>(to("stopped")).await.unwrap();
        host.kill().await;
        let mut records = std::fs::read_dir(directory.path().join("stopped")).unwrap();
        let record = records.next().unwrap().unwrap().path();
        let whole = std::fs::read_to_string(&record).unwrap();
        let mut newer: Value = serde_json::from_str(&whole).unwrap();
        newer["version"] = json!(99);
        std::fs::write(&record, newer.to_string()).unwrap();
        let host = Host::start(machine, directory.path()).await.unwrap();
        let found = host.call::<BoxGet>(json!({"box_id": "s"})).await;
        assert_eq!(code(found.unwrap_err()), Code::NotFound);
        // The end of a stopped box makes the server look for layers that nothing uses.
        let other = json!({"spec": {"box_id": "other", "persistent": true}});
        host.call::<BoxCreate>(other).await.unwrap();
        let stopped = json!({"box_id": "other", "to": "stopped"});
        host.call::<BoxTransition>(stopped).await.unwrap();
        host.call::<BoxDelete>(json!({"box_id": "other", "force": true}))
            .await
            .unwrap();
        host.kill().await;
        std::fs::write(&record, whole).unwrap();
        let host = Host::start(machine, directory.path()).await.unwrap();
        host.call::<BoxTransition>(to("running")).await.unwrap();
        let look = json!({"box_id": "s", "paths": ["/tmp/f"]});
        let found = host.call::<FileStat>(look).await.unwrap();
        let found = serde_json::to_value(found).unwrap().to_string();
        assert!(found.contains("\"size\":2"), "{found}");
        let gone = json!({"box_id": "s", "force": true});
        host.call::<BoxDelete>(gone).await.unwrap();
        host.kill().await;
    })
    .await;
}

#[tokio::test]
async fn a_box_keeps_its_unique_id_across_stops_and_servers() {
    on_each_machine(async |machine| {
        let directory = machine.directory();
        let host = Host::start(machine, directory.path()).await.unwrap();
        let made = json!({"spec": {"box_id": "s", "persistent": true}});
        let made = host.call::<BoxCreate>(made).await.unwrap().info;
        let to = |to: &str| json!({"box_id": "s", "to": to});
        host.call::<BoxTransition>(to("stopped")).await.unwrap();
        host.kill().await;
        let host = Host::start(machine, directory.path()).await.unwrap();
        host.call::<BoxTransition>(to("running")).await.unwrap();
        host.kill().await;
        let host = Host::start(machine, directory.path()).await.unwrap();
        host.adopts(1).await;
        let found = host.call::<BoxGet>(json!({"box_id": "s"})).await;
        let found = found.unwrap().info;
        assert_eq!(found.unique_id, made.unique_id);
        assert_ne!(found.backend_id, made.backend_id);
        host.call::<BoxTransition>(to("stopped")).await.unwrap();
        host.kill().await;
        // A record of an earlier version has none; the addresses of its box contain another id.
        let mut records = std::fs::read_dir(directory.path().join("stopped")).unwrap();
        let record = records.next().unwrap().unwrap().path();
        let mut older: Value =
            serde_json::from_str(&std::fs::read_to_string(&record).unwrap()).unwrap();
        older.as_object_mut().unwrap().remove("unique_id").unwrap();
        std::fs::write(&record, older.to_string()).unwrap();
        let host = Host::start(machine, directory.path()).await.unwrap();
        let started = host.call::<BoxTransition>(to("running")).await.unwrap();
        assert_eq!(started.info.unique_id, found.backend_id);
        assert_ne!(started.info.backend_id, found.backend_id);
        host.call::<BoxDelete>(json!({"box_id": "s", "force": true}))
            .await
            .unwrap();
        host.kill().await;
    })
    .await;
}
