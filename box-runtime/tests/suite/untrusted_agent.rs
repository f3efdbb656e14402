//! An agent runs beside the guest: the runtime checks everything that it sends.

use box_protocol::{BoxError, BoxState, Code, CommandId, Exit, ExitWhy};
use box_runtime::fake::Reply;

use super::fixture::{code, fixture, seconds, settle};

#[tokio::test(start_paused = true)]
async fn an_invalid_answer_fails_the_box_and_the_next_call_makes_another() {
    let w = fixture();
    let lies: Vec<(&str, Reply)> = vec![
        (
            "another command's end",
            Reply::default().tamper(|mut reported| {
                reported.command_id = CommandId::fresh();
                reported
            }),
        ),
        (
            "no end",
            Reply::default().tamper(|mut reported| {
                reported.exit = None;
                reported
            }),
        ),
        ("an impossible code", Reply::default().exit(70_000)),
        ("a negative code", Reply::default().exit(-1)),
        ("an impossible signal", Reply::default().signal(i32::MAX)),
        (
            "an unobserved end",
            Reply::default().tamper(|mut reported| {
                reported.exit = Some(Exit {
                    code: None,
                    signal: None,
                    why: ExitWhy::Lost,
                });
                reported
            }),
        ),
        (
            "a message beyond its limit",
            Reply::default().tamper(|mut reported| {
                let stdout = vec![0; 16 * 1024 * 1024];
                reported.collected = Some(box_protocol::actions::Collected {
                    stdout: stdout.into(),
                    ..Default::default()
                });
                reported
            }),
        ),
        (
            "an internal error",
            Reply::refuse(BoxError::internal("oops")),
        ),
        (
            "an unknown box",
            Reply::refuse(BoxError::not_found("box x not found")),
        ),
    ];
    for (at, (lie, reply)) in lies.into_iter().enumerate() {
        w.backend.next_command(reply);
        assert_eq!(code(w.exec("s", "job").await), Code::Unavailable, "{lie}");
        let info = w.get("s").await.unwrap();
        assert_eq!(info.state, BoxState::Failed, "{lie}");
        assert!(info.reason.is_some());
        assert_eq!(w.backend.running(), 0);
        w.exec("s", "again").await.unwrap();
        assert_eq!(w.get("s").await.unwrap().state, BoxState::Running);
        assert_eq!(w.backend.starts().len(), at + 2);
    }
}

#[tokio::test(start_paused = true)]
async fn excess_output_is_truncated_and_counted() {
    let w = fixture();
    w.backend
        .next_command(Reply::default().tamper(|mut reported| {
            let stdout = vec![b'x'; 1024 * 1024 + 10];
            reported.collected = Some(box_protocol::actions::Collected {
                stdout: stdout.into(),
                ..Default::default()
            });
            reported.dropped.stdout = u64::MAX - 3;
            reported
        }));
    let result = w.exec("s", "job").await.unwrap();
    assert_eq!(
        (result.stdout.len(), result.stdout_dropped),
        (1024 * 1024, u64::MAX)
    );
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_dies_during_an_exec_fails_the_box() {
    let w = fixture();
    w.backend
        .next_command(Reply::default().takes(seconds(1)).disconnects());
    let error = w.exec("s", "job").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let info = w.get("s").await.unwrap();
    assert_eq!(
        (info.state, info.reason.as_deref()),
        (BoxState::Failed, Some(error.message()))
    );
    w.exec("s", "again").await.unwrap();
    assert_eq!(w.backend.starts().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_dies_while_idle_fails_the_box_at_once() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    w.backend.cut_agent("s");
    settle().await;
    assert_eq!(w.get("s").await.unwrap().state, BoxState::Failed);
    assert_eq!(w.backend.stops(), ["s"]);
    w.exec("s", "true").await.unwrap();
    assert_eq!(w.get("s").await.unwrap().reason, None);
}

#[tokio::test(start_paused = true)]
async fn a_failed_box_is_forgotten_in_time_and_can_be_deleted() {
    let w = fixture();
    for box_id in ["a", "b"] {
        w.exec(box_id, "true").await.unwrap();
        w.backend.cut_agent(box_id);
    }
    settle().await;
    w.delete("a").await.unwrap();
    assert_eq!(w.ids().await, ["b"]);
    tokio::time::sleep(seconds(301)).await;
    assert_eq!(w.ids().await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_about_the_command_leaves_the_box() {
    let w = fixture();
    let long = format!("no such directory\n{}", "x".repeat(10_000));
    w.backend.next_command(Reply::refuse(
        BoxError::validation(long).with_detail(&"secret"),
    ));
    let error = w.exec("s", "job").await.unwrap_err();
    assert_eq!(error.code(), Code::Validation);
    assert_eq!(error.message().chars().count(), 512);
    assert!(!error.message().contains('\n') && error.detail::<String>().is_none());
    assert_eq!(w.get("s").await.unwrap().state, BoxState::Running);
}

#[tokio::test(start_paused = true)]
async fn a_failed_persistent_box_is_forgotten_unless_it_is_made_again() {
    let w = fixture();
    for box_id in ["a", "b"] {
        let persistent = super::fixture::spec(box_id, "true").persistent(true);
        w.exec_spec(persistent).await.unwrap();
        w.backend.cut_agent(box_id);
    }
    settle().await;
    let persistent = super::fixture::spec("b", "true").persistent(true);
    w.exec_spec(persistent).await.unwrap();
    tokio::time::sleep(seconds(400)).await;
    assert_eq!(w.ids().await, ["b"]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_another_contract_is_refused() {
    let w = fixture();
    w.backend.set_contract(3);
    assert_eq!(code(w.exec("s", "true").await), Code::Unavailable);
    assert_eq!((w.backend.running(), w.ids().await.len()), (0, 0));
}
