//! All processes of a command end with it when it must end, and not before.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use box_protocol::actions::{BoxDeleteParams, BoxListParams, FileWrite, FileWriteParams};
use box_protocol::error::{Detail, Ended};
use box_protocol::{Blob, BoxError, BoxId, BoxState, Code, ExecutionStatus, Killed, SpecDraft};
use box_runtime::native::NativeBackend;
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use box_test_wait::eventually;
use box_tests::machine::{
    Machine, PROGRAM, gone, mark, on_each_machine, params, printed, processes_with, spec,
};
use serde_json::json;

/// Starts processes that ignore signals, each `sleep` with this argument, and waits without end.
fn stubborn(seconds: &str) -> String {
    format!(
        "trap '' TERM HUP INT; \
         sleep {seconds} & \
         setsid sleep {seconds} & \
         (setsid sh -c 'trap \"\" TERM; (sleep {seconds} &) ; sleep {seconds}' &) ; \
         sleep {seconds}; sleep {seconds}"
    )
}

async fn boxes(machine: &Machine) -> Vec<String> {
    let all = BoxListParams::default();
    let listed = machine.runtime.list(&Caller::Local, &all).await.unwrap();
    listed
        .items
        .iter()
        .map(|info| info.box_id.to_string())
        .collect()
}

#[tokio::test]
async fn a_timeout_kills_everything_and_deletes_the_box() {
    on_each_machine(async |machine| {
        let seconds = mark();
        let asked = spec(json!({"box_id": "slow", "timeout_sec": 1, "cmd": stubborn(&seconds)}));
        let asked = json!({"spec": asked, "on_timeout": "drop_box"});
        let asked = serde_json::from_value(asked).unwrap();
        let result = machine.runtime.exec(&Caller::Local, asked).await.unwrap();
        assert_eq!(
            (result.status, result.exit_code),
            (ExecutionStatus::TimedOut, None)
        );
        assert_eq!(processes_with(&seconds), 0);
        assert_eq!(boxes(machine).await, Vec::<String>::new());
    })
    .await;
}

#[tokio::test]
async fn a_shell_does_not_report_that_its_child_was_killed() {
    on_each_machine(async |machine| {
        // A shell whose child dies first writes `Killed` before it ends itself.
        for _ in 0..5 {
            let asked = json!({"spec": spec(json!({"box_id": "quiet", "timeout_sec": 1,
                "cmd": "bash -c 'bash -c \"sleep 1000; true\"; true'; true"}))});
            let asked = serde_json::from_value(asked).unwrap();
            let result = machine.runtime.exec(&Caller::Local, asked).await.unwrap();
            assert_eq!(result.status, ExecutionStatus::TimedOut);
            let notice = "Command timed out after 1 seconds.";
            assert_eq!(result.stderr, notice, "{}", machine.name);
        }
        delete(machine, "quiet").await;
    })
    .await;
}

#[tokio::test]
async fn a_timeout_that_spares_the_box_kills_the_tree_and_nothing_else() {
    on_each_machine(async |machine| {
        let (mine, other) = (mark(), mark());
        printed(
            &machine
                .exec(
                    "kept",
                    &format!("sleep {other} > /dev/null 2>&1 & echo started"),
                )
                .await,
        );
        let asked = json!({"spec": spec(json!({"box_id": "kept", "timeout_sec": 1,
            "cmd": stubborn(&mine)}))});
        let asked = serde_json::from_value(asked).unwrap();
        let result = machine.runtime.exec(&Caller::Local, asked).await.unwrap();
        assert_eq!(result.status, ExecutionStatus::TimedOut);
        assert_eq!(result.killed, Some(Killed::Command));
        gone(&mine).await;
        assert_eq!(processes_with(&other), 1);
        printed(&machine.exec("kept", "true").await);
        delete(machine, "kept").await;
        assert_eq!(processes_with(&other), 0);
    })
    .await;
}

async fn delete(machine: &Machine, session: &str) {
    let asked: BoxDeleteParams =
        serde_json::from_value(json!({"box_id": session, "force": true})).unwrap();
    machine.runtime.delete(&Caller::Local, asked).await.unwrap();
}

#[tokio::test]
async fn a_dropped_call_kills_the_tree_and_the_box_lives() {
    on_each_machine(async |machine| {
        let seconds = mark();
        printed(&machine.exec("dropped", "echo before > /tmp/f").await);
        let asked = params(SpecDraft::new("dropped").cmd(stubborn(&seconds)));
        let call = tokio::spawn(machine.runtime.exec(&Caller::Local, asked));
        eventually("they run", async || processes_with(&seconds) >= 5).await;
        call.abort();
        // Served only once nothing of the previous call remains.
        assert_eq!(
            printed(&machine.exec("dropped", "cat /tmp/f").await),
            "before"
        );
        gone(&seconds).await;
    })
    .await;
}

#[tokio::test]
async fn deleting_a_box_ends_a_running_command() {
    on_each_machine(async |machine| {
        let seconds = mark();
        let asked = params(SpecDraft::new("deleted").cmd(stubborn(&seconds)));
        let call = tokio::spawn(machine.runtime.exec(&Caller::Local, asked));
        eventually("they run", async || processes_with(&seconds) >= 5).await;
        delete(machine, "deleted").await;
        assert_eq!(processes_with(&seconds), 0);
        assert!(call.await.unwrap().is_err());
    })
    .await;
}

#[tokio::test]
async fn a_background_child_with_open_stdout_does_not_delay_the_result() {
    on_each_machine(async |machine| {
        let result = machine.exec("held", "sleep 86406 & echo $!").await;
        let pid = printed(&result).to_owned();
        let flood = machine.exec("held", "yes & echo first; exit 0").await;
        assert_eq!(flood.exit_code, Some(0));
        assert!(flood.stdout.contains("first"));
        // These processes belong to the box and continue. The child may not have become `yes` yet.
        let look = format!("kill -0 {pid} && until pgrep -x yes > /dev/null; do sleep 0.05; done");
        printed(&machine.exec("held", &look).await);
    })
    .await;
}

#[tokio::test]
async fn boxes_die_with_their_runtime() {
    on_each_machine(async |machine| {
        let seconds = mark();
        let other = Machine::new(machine.name, machine.user());
        let script = format!("sleep {seconds} > /dev/null 2>&1 & echo ok");
        printed(&other.exec("owned", &script).await);
        eventually("it runs", async || processes_with(&seconds) == 1).await;
        drop(other);
        eventually("the box is gone", async || processes_with(&seconds) == 0).await;
    })
    .await;
}

#[tokio::test]
async fn an_abandoned_box_is_cleaned_up() {
    on_each_machine(async |machine| {
        let state = tempfile::tempdir().unwrap();
        let mut native = machine.config();
        native.state_dir = Some(state.path().to_owned());
        let mut config = RuntimeConfig::with(NativeBackend::new(native));
        config.stop_timeout = Duration::ZERO;
        let (runtime, caller) = (BoxRuntime::start(config), Caller::Local);
        let spec = json!({"spec": {"box_id": "given-up"}});
        let create = serde_json::from_value(spec).unwrap();
        runtime.create(&caller, create).await.unwrap();
        let left = || state.path().read_dir().unwrap().count();
        assert_eq!(left(), 1);
        let delete = json!({"box_id": "given-up", "force": true});
        let delete = serde_json::from_value(delete).unwrap();
        // The deletion may finish before the deadline.
        if let Err(error) = runtime.delete(&caller, delete).await {
            assert_eq!(error.code(), Code::Timeout, "{error:?}");
        }
        eventually("nothing is left of it", async || left() == 0).await;
        let exit = serde_json::from_value(json!({"exit": true})).unwrap();
        runtime.shutdown(&caller, exit).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_fork_server_that_starts_slowly_is_started_once() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let (script, starts) = (dir.path().join("slow"), dir.path().join("starts"));
        let text = format!(
            "#!/bin/sh\necho >> {}\nsleep 2\nexec {} \"$@\"\n",
            starts.display(),
            PROGRAM.display()
        );
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut native = machine.config();
        native.program = script;
        let mut config = RuntimeConfig::with(NativeBackend::new(native));
        config.probe_timeout = Duration::from_millis(300);
        let (runtime, caller) = (BoxRuntime::start(config), Caller::Local);
        let mut refused = 0;
        loop {
            let spec = json!({"spec": {"box_id": "slow"}});
            let create = serde_json::from_value(spec).unwrap();
            match runtime.create(&caller, create).await {
                Ok(_) => break,
                Err(error) => assert_eq!(error.code(), Code::Unavailable, "{error:?}"),
            }
            refused += 1;
            assert!(refused < 50, "it never starts");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        assert!(refused > 0, "it was slow");
        assert_eq!(std::fs::read_to_string(starts).unwrap().lines().count(), 1);
        let exit = serde_json::from_value(json!({"exit": true})).unwrap();
        runtime.shutdown(&caller, exit).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_box_whose_files_fill_its_memory_fails_for_lack_of_memory() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.memory").await {
            return;
        }
        // The private files of the box are memory. They leave less than its agent may need.
        let fill = "head -c 100M /dev/zero > /tmp/full 2>/dev/null; echo full";
        let small = |cmd: &str| spec(json!({"box_id": "m", "memory_mb": 32, "cmd": cmd}));
        let filled = machine.exec_spec(small(fill)).await.unwrap();
        assert_eq!(printed(&filled), "full", "the box lives");
        let (runtime, caller) = (&machine.runtime, Caller::Local);
        let id = BoxId::new("m").unwrap();
        let get = async || runtime.get(&caller, &id).await;
        assert_eq!(get().await.unwrap().state, BoxState::Running);
        // Each call takes memory of the agent, which is the only process in the box.
        let write = |number: usize| {
            let data = Blob::from("x".repeat(3 << 20).into_bytes());
            let asked = json!({"box_id": "m", "path": format!("/tmp/w{number}"), "data": data});
            let asked: FileWriteParams = serde_json::from_value(asked).unwrap();
            let caller = &caller;
            async move { runtime.forward::<FileWrite>(caller, &asked).await }
        };
        let mut ended = None;
        for _ in 0..20 {
            let results = futures::future::join_all((0..12).map(write)).await;
            let mut errors = results.into_iter().filter_map(Result::err);
            let of_memory = |error: &BoxError| {
                let detail = error.detail::<Detail>();
                detail.is_some_and(|detail| detail.ended == Some(Ended::Memory))
            };
            ended = errors.find(of_memory);
            if ended.is_some() {
                break;
            }
        }
        let ended = ended.expect("the kernel ends the box");
        assert_eq!(ended.code(), Code::Capacity);
        let reason = "memory exceeded: 32 MiB; the kernel ended the box";
        assert_eq!(ended.message(), reason);
        let info = get().await.unwrap();
        assert_eq!(info.state, BoxState::Failed);
        assert_eq!(info.reason.as_deref(), Some(reason));
        let (sender, mut events) = tokio::sync::mpsc::channel(64);
        let asked = serde_json::from_value(json!({"box_id": "m"})).unwrap();
        runtime.events(&caller, asked, Some(sender)).await.unwrap();
        let mut answer = Vec::new();
        while let Some(event) = events.recv().await {
            answer.push((event.kind.clone(), event.message.clone()));
        }
        let failed = ("failed".to_owned(), reason.to_owned());
        assert!(answer.contains(&failed), "{answer:?}");
    })
    .await;
}
