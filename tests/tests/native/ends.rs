//! Everything a command has started ends with it when it is to end, and not before.

use std::time::{Duration, Instant};

use box_protocol::actions::{BoxDeleteParams, BoxListParams};
use box_protocol::{ExecutionStatus, SpecDraft};
use box_runtime::Caller;
use serde_json::json;

use super::support::{Machine, eventually, on_each_machine, params, printed, processes_with, spec};

/// Starts processes that do not want to end, each `sleep` with this argument, and waits for ever itself.
fn stubborn(seconds: &str) -> String {
    format!(
        "trap '' TERM HUP INT; \
         sleep {seconds} & \
         setsid sleep {seconds} & \
         (setsid sh -c 'trap \"\" TERM; (sleep {seconds} &) ; sleep {seconds}' &) ; \
         sleep {seconds}; sleep {seconds}"
    )
}

async fn sessions(machine: &Machine) -> Vec<String> {
    let all = BoxListParams::default();
    let listed = machine.runtime.list(&Caller::local(), &all).await.unwrap();
    listed
        .items
        .iter()
        .map(|info| info.session_id.to_string())
        .collect()
}

#[tokio::test]
async fn a_timeout_kills_everything_and_drops_the_session() {
    on_each_machine(async |machine| {
        let seconds = format!("86401.{}", machine.uid);
        let asked =
            spec(json!({"session_id": "slow", "timeout_sec": 1, "cmd": stubborn(&seconds)}));
        let begun = Instant::now();
        let result = machine.exec_spec(asked).await.unwrap();
        assert_eq!(
            (result.status, result.exit_code),
            (ExecutionStatus::TimedOut, None)
        );
        assert!(
            begun.elapsed() < Duration::from_secs(3),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(processes_with(&seconds), 0);
        assert_eq!(sessions(machine).await, Vec::<String>::new());
    })
    .await;
}

#[tokio::test]
async fn a_timeout_that_spares_the_box_kills_the_tree_and_nothing_else() {
    on_each_machine(async |machine| {
        let (mine, other) = (
            format!("86402.{}", machine.uid),
            format!("86403.{}", machine.uid),
        );
        printed(
            &machine
                .exec(
                    "kept",
                    &format!("sleep {other} > /dev/null 2>&1 & echo started"),
                )
                .await,
        );
        let asked = json!({"spec": spec(json!({"session_id": "kept", "timeout_sec": 1,
            "cmd": stubborn(&mine)})), "on_timeout": "kill"});
        let asked = serde_json::from_value(asked).unwrap();
        let result = machine.runtime.exec(&Caller::local(), asked).await.unwrap();
        assert_eq!(result.status, ExecutionStatus::TimedOut);
        assert_eq!((processes_with(&mine), processes_with(&other)), (0, 1));
        printed(&machine.exec("kept", "true").await);
        delete(machine, "kept").await;
        assert_eq!(processes_with(&other), 0);
    })
    .await;
}

async fn delete(machine: &Machine, session: &str) {
    let asked: BoxDeleteParams =
        serde_json::from_value(json!({"session_id": session, "force": true})).unwrap();
    machine
        .runtime
        .delete(&Caller::local(), asked)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_dropped_call_kills_the_tree_and_the_box_lives() {
    on_each_machine(async |machine| {
        let seconds = format!("86404.{}", machine.uid);
        printed(&machine.exec("dropped", "echo before > /tmp/f").await);
        let asked = params(SpecDraft::new("dropped").cmd(stubborn(&seconds)));
        let call = tokio::spawn(machine.runtime.exec(&Caller::local(), asked));
        eventually("they run", || processes_with(&seconds) >= 5).await;
        call.abort();
        // Served only once nothing is left of the call before it.
        assert_eq!(
            printed(&machine.exec("dropped", "cat /tmp/f").await),
            "before"
        );
        assert_eq!(processes_with(&seconds), 0);
    })
    .await;
}

#[tokio::test]
async fn deleting_a_box_ends_a_running_command() {
    on_each_machine(async |machine| {
        let seconds = format!("86405.{}", machine.uid);
        let asked = params(SpecDraft::new("deleted").cmd(stubborn(&seconds)));
        let call = tokio::spawn(machine.runtime.exec(&Caller::local(), asked));
        eventually("they run", || processes_with(&seconds) >= 5).await;
        delete(machine, "deleted").await;
        assert_eq!(processes_with(&seconds), 0);
        assert!(call.await.unwrap().is_err());
    })
    .await;
}

#[tokio::test]
async fn a_background_child_that_holds_stdout_does_not_hold_the_call() {
    on_each_machine(async |machine| {
        let begun = Instant::now();
        let result = machine.exec("held", "sleep 86406 & echo $!").await;
        let pid = printed(&result).to_owned();
        let flood = machine.exec("held", "yes & echo first; exit 0").await;
        assert_eq!(flood.exit_code, Some(0));
        assert!(flood.stdout.contains("first"));
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        // They belong to the box, and go on.
        printed(
            &machine
                .exec(
                    "held",
                    &format!("kill -0 {pid} && pgrep -x yes > /dev/null"),
                )
                .await,
        );
    })
    .await;
}

#[tokio::test]
async fn boxes_die_with_their_runtime() {
    on_each_machine(async |machine| {
        let seconds = format!("86407.{}", machine.uid);
        let other = Machine::new(machine.name, machine.user());
        let script = format!("sleep {seconds} > /dev/null 2>&1 & echo ok");
        printed(&other.exec("owned", &script).await);
        eventually("it runs", || processes_with(&seconds) == 1).await;
        drop(other);
        eventually("the box is gone", || processes_with(&seconds) == 0).await;
    })
    .await;
}
