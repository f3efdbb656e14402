//! A deadline travels as remaining time. The callee enforces it, and otherwise the caller.

use std::time::Duration;

use box_rpc::{CallError, Code, Empty};
use box_test_wait::eventually;
use box_tests::actions::{Number, Probe, Wait};
use box_tests::every_transport;
use box_tests::fixture::Setup;
use serde_json::json;
use tokio::time::Instant;

every_transport!(
    the_callee_ends_a_call_that_is_late,
    a_call_in_time_is_not_disturbed
);

async fn the_callee_ends_a_call_that_is_late(setup: Setup) {
    let fixture = setup.start().await;
    let late = fixture
        .peer
        .request::<Wait>(&Number { n: 60_000 })
        .deadline(Duration::from_millis(50))
        .call()
        .await;
    let Err(CallError::Refused(error)) = late else {
        panic!("{late:?}")
    };
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains("50 ms"), "{error}");
    eventually("the handler is dropped", async || {
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().dropped == 1
    })
    .await;
}

async fn a_call_in_time_is_not_disturbed(setup: Setup) {
    let fixture = setup.start().await;
    let call = fixture
        .peer
        .request::<Wait>(&Number { n: 10 })
        .deadline(Duration::from_secs(30))
        .call();
    assert_eq!(call.await.unwrap().n, 10);
}

#[tokio::test(start_paused = true)]
async fn a_callee_that_ignores_the_deadline_is_given_up_and_cancelled() {
    let (session, mut raw) =
        box_tests::fixture::against_a_script(box_tests::fixture::Dialect::JsonRpc).await;
    let begun = Instant::now();
    let peer = session.peer();
    let call = tokio::spawn(async move {
        peer.request::<Wait>(&Number { n: 1 })
            .deadline(Duration::from_secs(5))
            .call()
            .await
    });
    let request = raw.receive().await;
    assert_eq!(request["params"]["_meta"], json!({"deadline_ms": 5000}));
    assert_eq!(
        call.await.unwrap().unwrap_err(),
        CallError::Timeout(Duration::from_secs(5))
    );
    let waited = begun.elapsed();
    assert!(
        waited >= Duration::from_secs(5) && waited < Duration::from_secs(6),
        "{waited:?}"
    );
    let cancel = raw.receive().await;
    assert_eq!(
        (&cancel["method"], &cancel["params"]["id"]),
        (&json!("$/cancel"), &request["id"])
    );
}

#[tokio::test(start_paused = true)]
async fn the_deadline_runs_while_the_call_waits_for_its_place() {
    let (session, _raw) =
        box_tests::fixture::against_a_script_with(box_tests::fixture::Dialect::JsonRpc, |limits| {
            limits.queue_slots = 1;
            limits.frame = Duration::from_hours(1);
        })
        .await;
    // The peer reads nothing: the queue fills.
    let fill = |peer: box_rpc::Peer| async move { peer.call::<Wait>(&Number { n: 1 }).await };
    let calls: Vec<_> = (0..200)
        .map(|_| tokio::spawn(fill(session.peer())))
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begun = Instant::now();
    let late = session
        .peer()
        .request::<Wait>(&Number { n: 1 })
        .deadline(Duration::from_secs(1))
        .call()
        .await
        .unwrap_err();
    assert_eq!(late, CallError::Timeout(Duration::from_secs(1)));
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    let eternal = session.peer();
    let eternal = tokio::spawn(async move {
        eternal
            .request::<Wait>(&Number { n: 1 })
            .deadline(Duration::MAX)
            .call()
            .await
    });
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(
        !eternal.is_finished(),
        "a deadline beyond the clock's range is none"
    );
    drop((calls, eternal));
}
