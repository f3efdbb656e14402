//! How commands end, and what remains of them.

use std::time::Duration;

use box_protocol::actions::CommandChunk;
use box_protocol::{Code, CommandState, ExitWhy};
use box_runtime::Caller;
use box_test_wait::eventually;
use box_tests::machine::{gone, mark, parent_of, processes_with};
use serde_json::json;
use tokio::sync::mpsc;

use super::{attach, get, run, text, with_box};

#[tokio::test]
async fn commands_end_at_their_timeout_and_at_their_unread_limit() {
    with_box(async |machine| {
        let seconds = mark();
        let stubborn =
            format!("trap '' TERM; (setsid sleep {seconds} &); sleep {seconds}; sleep {seconds}");
        let timed = json!({"command_id": "timed", "timeout_ms": 300});
        run(machine, text(&stubborn, timed)).await.unwrap();
        let (_, info, _) = attach(machine, "timed", json!({"view": "none"}))
            .await
            .unwrap();
        assert_eq!(
            (info.exit.unwrap().why, info.exit.unwrap().code),
            (ExitWhy::Timeout, None)
        );
        gone(&seconds).await;
        let alone = json!({"command_id": "alone", "detached_ms": 300});
        run(machine, text(&stubborn, alone)).await.unwrap();
        attach(machine, "alone", json!({"until": {"ms": 500}}))
            .await
            .unwrap();
        assert_eq!(
            get(machine, "alone").await.unwrap().state,
            CommandState::Running,
            "a client has read it"
        );
        eventually("it ends", async || {
            let exit = get(machine, "alone").await.unwrap().exit;
            exit.is_some_and(|exit| {
                assert_eq!(exit.why, ExitWhy::Idle);
                true
            })
        })
        .await;
        gone(&seconds).await;
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_disconnects_ends_its_command_unless_asked_otherwise() {
    with_box(async |machine| {
        for (keep, left) in [("kill", 0), ("keep", 1)] {
            let seconds = mark();
            let params = text(
                &format!("exec sleep {seconds}"),
                json!({"on_disconnect": keep, "attach": {}}),
            );
            let (sender, mut chunks) = mpsc::channel(4);
            let runtime = machine.runtime.clone();
            let call = tokio::spawn(async move {
                runtime
                    .start_command(&Caller::Local, params, Some(sender))
                    .await
            });
            assert!(matches!(
                chunks.recv().await,
                Some(CommandChunk::Started(_))
            ));
            eventually("it runs", async || processes_with(&seconds) == 1).await;
            call.abort();
            if left == 0 {
                gone(&seconds).await;
            } else {
                tokio::time::sleep(Duration::from_millis(300)).await;
                assert_eq!(processes_with(&seconds), 1);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn calls_about_expired_records_name_the_expiry() {
    with_box(async |machine| {
        let short = json!({"command_id": "short", "retain_ms": 100});
        run(machine, text("echo x", short)).await.unwrap();
        attach(machine, "short", json!({"view": "none"}))
            .await
            .unwrap();
        eventually("the record expires", async || {
            get(machine, "short").await.is_err()
        })
        .await;
        let error = get(machine, "short").await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        let detail: box_protocol::error::Detail = error.detail().unwrap();
        assert!(detail.expired);
        let error = get(machine, "never-there").await.unwrap_err();
        assert!(
            !error
                .detail::<box_protocol::error::Detail>()
                .unwrap_or_default()
                .expired
        );
    })
    .await;
}

/// The number of descriptors of the parent of the process with this argument.
fn descriptors_of_parent(argument: &str) -> Option<usize> {
    let descriptors = format!("/proc/{}/fd", parent_of(argument)?);
    Some(std::fs::read_dir(descriptors).ok()?.count())
}

/// Waits for the agent that started this process, and counts its descriptors.
async fn descriptors_of_agent(argument: &str) -> usize {
    let mut count = None;
    eventually("the agent is found", async || {
        count = descriptors_of_parent(argument);
        count.is_some()
    })
    .await;
    count.unwrap()
}

#[tokio::test]
async fn commands_that_are_kept_hold_no_descriptor() {
    with_box(async |machine| {
        let seconds = mark();
        let sleep = json!({"argv": ["sleep", seconds]});
        let asleep = super::start(sleep, json!({"on_disconnect": "keep"}));
        run(machine, asleep).await.unwrap();
        let before = descriptors_of_agent(&seconds).await;
        for number in 0..60 {
            let id = format!("kept-{number}");
            let more = json!({"command_id": id, "retain_ms": -1, "stdin": "open"});
            run(machine, super::start(json!({"argv": ["true"]}), more))
                .await
                .unwrap();
            attach(machine, &id, json!({"view": "none"})).await.unwrap();
        }
        assert_eq!(
            get(machine, "kept-0").await.unwrap().state,
            CommandState::Exited
        );
        eventually("as few as before", async || {
            descriptors_of_parent(&seconds).is_some_and(|now| now <= before + 3)
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn children_that_hold_the_output_of_many_commands_hold_few_descriptors() {
    with_box(async |machine| {
        let seconds = mark();
        let asleep = super::start(json!({"argv": ["sleep", seconds]}), json!({}));
        run(machine, asleep).await.unwrap();
        let before = descriptors_of_agent(&seconds).await;
        for number in 0..100 {
            let id = format!("left-{number}");
            let left = text("sleep 86605 &", json!({"command_id": id}));
            run(machine, left).await.unwrap();
            attach(machine, &id, json!({"view": "none"})).await.unwrap();
        }
        let most = before + 128 + 5;
        eventually("few descriptors are open", async || {
            descriptors_of_parent(&seconds).is_some_and(|now| now <= most)
        })
        .await;
        let flood = text(
            "yes | head -c 300000 | wc -c",
            json!({"command_id": "after"}),
        );
        let (got, _) = super::read_through(machine, flood).await;
        assert_eq!(got.text().trim(), "300000");
    })
    .await;
}
