//! A dropped call is cancelled on the other side, once, and frees its slot.

use std::time::Duration;

use box_rpc::Empty;
use box_test_wait::eventually;
use box_tests::actions::{Number, Probe, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use serde_json::json;

every_transport!(
    a_dropped_call_ends_its_handler,
    a_cancelled_call_frees_its_slot,
    cancelling_an_unknown_call_does_nothing,
    a_cancelled_call_is_answered_as_its_dialect_says,
);

async fn a_dropped_call_ends_its_handler(setup: Setup) {
    let fixture = setup.start().await;
    let long = Number { n: 60_000 };
    let call = fixture.peer.call::<Wait>(&long);
    assert!(
        tokio::time::timeout(Duration::from_millis(100), call)
            .await
            .is_err()
    );
    eventually("the handler is dropped", async || {
        let seen = fixture.peer.call::<Probe>(&Empty {}).await.unwrap();
        (seen.begun, seen.dropped, seen.finished) == (1, 1, 0)
    })
    .await;
    assert_eq!(fixture.peer.in_flight(), 0);
}

async fn a_cancelled_call_frees_its_slot(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.in_flight = Some(2))
        .start()
        .await;
    let long = Number { n: 60_000 };
    for _ in 0..20 {
        let call = fixture.peer.call::<Wait>(&long);
        assert!(
            tokio::time::timeout(Duration::from_millis(10), call)
                .await
                .is_err()
        );
        eventually("a slot is free", async || {
            fixture.peer.call::<Probe>(&Empty {}).await.is_ok()
        })
        .await;
    }
    eventually("all are dropped", async || {
        let seen = fixture.peer.call::<Probe>(&Empty {}).await.unwrap();
        seen.begun == seen.dropped
    })
    .await;
}

async fn cancelling_an_unknown_call_does_nothing(setup: Setup) {
    let mut raw = setup.raw().await;
    raw.cancel(77).await;
    raw.call(1, "echo", &json!({"text": "on"})).await;
    if raw.dialect == Dialect::LangBot {
        assert_eq!(raw.answer().await.result(), json!({"cancelled": false}));
    }
    assert_eq!(raw.answer().await.result(), json!({"text": "on"}));
}

async fn a_cancelled_call_is_answered_as_its_dialect_says(setup: Setup) {
    let mut raw = setup.raw().await;
    raw.call(5, "wait", &json!({"n": 60_000})).await;
    raw.cancel(5).await;
    let answer = raw.answer().await;
    if raw.dialect == Dialect::LangBot {
        // The cancel is answered, the cancelled action is not.
        assert_eq!(answer.result(), json!({"cancelled": true}));
        raw.call(6, "echo", &json!({"text": "next"})).await;
        assert_eq!(raw.answer().await.result(), json!({"text": "next"}));
    } else {
        assert_eq!(answer.id, json!(5));
        assert_eq!(answer.error().code, box_rpc::Code::Cancelled);
    }
}
