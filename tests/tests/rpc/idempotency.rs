//! A call with a key runs once, however often it is sent.

use box_rpc::{CallError, Code, Empty, Peer};
use box_test_wait::eventually;
use box_tests::actions::{Number, Probe, Run, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use futures::future::join_all;
use serde_json::json;

every_transport!(
    a_repeat_returns_the_first_outcome_and_does_not_run,
    repeats_at_the_same_time_share_one_run,
    another_action_or_no_key_runs_again,
    other_parameters_under_the_same_key_are_a_conflict,
    a_withdrawn_call_ends_its_run_and_is_not_run_again,
);
every_transport!(two_clients: a_call_with_a_key_outlives_its_connection);

async fn runs(fixture: &box_tests::fixture::Fixture, name: &str) -> u64 {
    fixture
        .peer
        .call::<Probe>(&Empty {})
        .await
        .unwrap()
        .runs
        .get(name)
        .copied()
        .unwrap_or(0)
}

async fn a_repeat_returns_the_first_outcome_and_does_not_run(setup: Setup) {
    let fixture = setup.start().await;
    let job = Text::new("job");
    for _ in 0..5 {
        let answer = fixture
            .peer
            .request::<Run>(&job)
            .key("k1")
            .call()
            .await
            .unwrap();
        assert_eq!(answer.n, 1);
    }
    assert_eq!(runs(&fixture, "job").await, 1);
}

async fn repeats_at_the_same_time_share_one_run(setup: Setup) {
    let fixture = setup.start().await;
    let calls = (0..20).map(|_| {
        let peer = fixture.peer.clone();
        async move {
            peer.request::<Run>(&Text::new("shared"))
                .key("k2")
                .call()
                .await
                .unwrap()
                .n
        }
    });
    assert_eq!(join_all(calls).await, vec![1; 20]);
    assert_eq!(runs(&fixture, "shared").await, 1);
}

async fn another_action_or_no_key_runs_again(setup: Setup) {
    let fixture = setup.start().await;
    let job = Text::new("again");
    fixture
        .peer
        .request::<Run>(&job)
        .key("k3")
        .call()
        .await
        .unwrap();
    fixture
        .peer
        .request::<Run>(&job)
        .key("k4")
        .call()
        .await
        .unwrap();
    fixture.peer.call::<Run>(&job).await.unwrap();
    let waited = fixture
        .peer
        .request::<Wait>(&Number { n: 1 })
        .key("k3")
        .call()
        .await
        .unwrap();
    assert_eq!((runs(&fixture, "again").await, waited.n), (3, 1));
}

async fn other_parameters_under_the_same_key_are_a_conflict(setup: Setup) {
    let fixture = setup.start().await;
    fixture
        .peer
        .request::<Run>(&Text::new("one"))
        .key("k5")
        .call()
        .await
        .unwrap();
    let error = fixture
        .peer
        .request::<Run>(&Text::new("two"))
        .key("k5")
        .call()
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Conflict, "{error}");
    assert_eq!(runs(&fixture, "two").await, 0);
}

async fn a_call_with_a_key_outlives_its_connection(setup: Setup) {
    let (first, second) = setup.start_twice().await;
    let peer = first.peer.clone();
    let job = Text::new("survivor");
    let call = tokio::spawn({
        let job = job.clone();
        async move { peer.request::<Run>(&job).key("k6").call().await }
    });
    eventually("it runs", async || runs(&second, "survivor").await == 1).await;
    drop(first);
    let _ = call.await.unwrap();
    let answer = second
        .peer
        .request::<Run>(&job)
        .key("k6")
        .call()
        .await
        .unwrap();
    assert_eq!((answer.n, runs(&second, "survivor").await), (1, 1));
    assert_eq!(
        second.peer.call::<Probe>(&Empty {}).await.unwrap().dropped,
        0
    );
}

async fn a_withdrawn_call_ends_its_run_and_is_not_run_again(setup: Setup) {
    let fixture = setup.start().await;
    let seen = async || fixture.peer.call::<Probe>(&Empty {}).await.unwrap();
    let wait = |peer: Peer| async move {
        let params = Number { n: 60_000 };
        peer.request::<Wait>(&params).key("w").call().await
    };
    let call = tokio::spawn(wait(fixture.peer.clone()));
    eventually("it runs", async || seen().await.begun == 1).await;
    call.abort();
    eventually("the run is dropped", async || seen().await.dropped == 1).await;
    let error = wait(fixture.peer.clone()).await.unwrap_err();
    let CallError::Refused(refusal) = error else {
        panic!("{error:?}")
    };
    // Also in LangBot's dialect, where the cancelled call itself was not answered.
    assert_eq!(refusal.code(), Code::Cancelled, "the first outcome");
    assert!(refusal.message().contains("cancelled"), "{refusal}");
    assert_eq!(seen().await.begun, 1, "the repeat did not run");
}

#[tokio::test]
async fn a_key_and_a_stream_do_not_go_together() {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    raw.call(
        1,
        "count",
        &json!({"n": 3, "_meta": {"key": "k", "credit": 4}}),
    )
    .await;
    let error = raw.answer().await.error();
    assert_eq!(error.code, Code::Validation);
    assert!(error.message.contains("key"), "{error:?}");
    for key in [String::new(), "x".repeat(300)] {
        raw.call(2, "echo", &json!({"text": "x", "_meta": {"key": key}}))
            .await;
        assert_eq!(raw.answer().await.error().code, Code::Validation);
    }
}
