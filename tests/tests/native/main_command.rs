//! The main command, which starts with a box.

use std::time::Duration;

use box_protocol::actions::{BoxCreateParams, BoxListParams, TargetState};
use box_protocol::{BoxError, Code, CommandInfo, CommandState, ExitWhy, Role};
use box_runtime::Caller;
use box_test_wait::eventually;
use box_tests::machine::{Machine, on_each_machine, printed};
use serde_json::json;

async fn create(machine: &Machine, argv: &[&str], ends_box: bool) -> Result<(), BoxError> {
    let spec = json!({"box_id": "m", "main": {"argv": argv, "ends_box": ends_box},
        "defaults": {"cwd": "/tmp", "env": {"A": "1"}}});
    let params: BoxCreateParams = serde_json::from_value(json!({"spec": spec})).unwrap();
    let created = machine.runtime.create(&Caller::Local, params).await;
    created.map(drop)
}

async fn main_of(machine: &Machine) -> Result<CommandInfo, BoxError> {
    let key = json!({"box_id": "m", "command_id": "main"});
    let key = serde_json::from_value(key).unwrap();
    machine.runtime.get_command(&Caller::Local, key).await
}

async fn move_to(machine: &Machine, to: TargetState) {
    let params = serde_json::from_value(json!({"box_id": "m", "to": to})).unwrap();
    let moved = machine.runtime.transition(&Caller::Local, params).await;
    assert!(moved.unwrap().changed);
}

/// Waits until the box is gone.
async fn gone(machine: &Machine) {
    eventually(
        "the box is gone",
        async || matches!(main_of(machine).await, Err(error) if error.code() == Code::NotFound),
    )
    .await;
}

#[tokio::test]
async fn a_box_can_start_with_a_main_command_and_end_with_it() {
    on_each_machine(async |machine| {
        let script = "echo $A; pwd; while [ ! -e /tmp/enough ]; do sleep 0.05; done";
        create(machine, &["sh", "-c", script], true).await.unwrap();
        let info = main_of(machine).await.unwrap();
        assert_eq!((info.role, info.state), (Role::Main, CommandState::Running));
        assert_eq!(printed(&machine.exec("m", "echo beside").await), "beside");
        // Read until all of it has arrived: the command continues.
        let said = async {
            let reads = json!({"box_id": "m", "command_id": "main"});
            let reads = serde_json::from_value(reads).unwrap();
            let (sender, mut chunks) = tokio::sync::mpsc::channel(64);
            let caller = Caller::Local;
            let reading = machine.runtime.attach_command(&caller, reads, sender);
            let mut text = String::new();
            let collecting = async {
                while text.lines().count() < 2 {
                    match chunks.recv().await {
                        Some(box_protocol::actions::CommandChunk::Text(piece)) => {
                            text.push_str(&piece.data);
                        }
                        Some(_) => {}
                        None => break,
                    }
                }
            };
            tokio::select! {
                ended = reading => panic!("{ended:?}"),
                () = collecting => {}
            }
            text
        };
        assert_eq!(said.await, "1\n/tmp\n");
        // Stopping the box does not count as the end of its command, and starting the box restarts
        // the command.
        move_to(machine, TargetState::Stopped).await;
        move_to(machine, TargetState::Running).await;
        let again = main_of(machine).await.unwrap();
        assert_eq!(again.state, CommandState::Running);
        assert!(again.created_at >= info.created_at);
        printed(&machine.exec("m", "touch /tmp/enough").await);
        gone(machine).await;
    })
    .await;
}

#[tokio::test]
async fn a_box_can_outlive_its_main_command_which_must_start() {
    on_each_machine(async |machine| {
        create(machine, &["sh", "-c", "exit 3"], false)
            .await
            .unwrap();
        eventually("the command ends", async || {
            main_of(machine).await.unwrap().exit.is_some()
        })
        .await;
        let exit = main_of(machine).await.unwrap().exit.unwrap();
        assert_eq!((exit.code, exit.why), (Some(3), ExitWhy::Exit));
        assert_eq!(printed(&machine.exec("m", "echo lives").await), "lives");
        let params = serde_json::from_value(json!({"box_id": "m", "force": true})).unwrap();
        machine
            .runtime
            .delete(&Caller::Local, params)
            .await
            .unwrap();
        let error = create(machine, &["/no/such/program"], true)
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        assert_eq!(main_of(machine).await.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn the_record_of_a_box_has_its_main_command_and_the_time_of_its_state() {
    on_each_machine(async |machine| {
        create(machine, &["sleep", "600"], false).await.unwrap();
        let id = box_protocol::BoxId::new("m").unwrap();
        let info = async || machine.runtime.get(&Caller::Local, &id).await.unwrap();
        let running = info().await;
        assert_eq!(running.main.clone().unwrap().argv, ["sleep", "600"]);
        assert!(running.since >= running.created_at, "{running:?}");
        printed(&machine.exec("m", "true").await);
        assert_eq!(
            info().await.since,
            running.since,
            "a use is no change of state"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
        move_to(machine, TargetState::Stopped).await;
        let stopped = info().await;
        assert!(stopped.since > running.since, "{stopped:?}");
        let all = BoxListParams::default();
        let listed = machine.runtime.list(&Caller::Local, &all);
        let listed = listed.await.unwrap().items;
        assert_eq!(
            (listed[0].since, &listed[0].main),
            (stopped.since, &stopped.main)
        );
    })
    .await;
}
