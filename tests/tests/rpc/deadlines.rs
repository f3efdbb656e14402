//! A deadline travels as remaining time. The callee enforces it, and otherwise the caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use box_rpc::{
    Call, CallError, Caller, Code, Codecs, Empty, Handle, Limits, Options, Router, RpcError,
    Session,
};
use box_test_wait::eventually;
use box_tests::actions::{Echo, Number, Probe, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use box_tests::raw::Raw;
use box_transports::queue;
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

/// A server whose `wait` never ends, and which records that it was dropped.
#[derive(Default)]
struct Endless {
    dropped: Arc<AtomicBool>,
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Handle<Wait> for Endless {
    async fn handle(&self, _: Number, _: Call<Wait>) -> Result<Number, RpcError> {
        let _dropped = SetOnDrop(Arc::clone(&self.dropped));
        std::future::pending().await
    }
}

impl Handle<Echo> for Endless {
    async fn handle(&self, text: Text, _: Call<Echo>) -> Result<Text, RpcError> {
        Ok(text)
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_handler_ends_before_its_peer_reads_the_response() {
    let server = Arc::new(Endless::default());
    let (ours, theirs) = queue::pair(1);
    let mut limits = Limits::in_process();
    limits.queue_slots = 1;
    let options = Options {
        limits,
        codecs: Codecs::JSON_RPC,
        ..Options::new(Caller::Local)
    };
    let router = Router::builder(Arc::clone(&server))
        .on::<Wait>()
        .on::<Echo>()
        .build();
    let _session = Session::start(ours, router, options);
    let mut raw = Raw::over(Box::new(theirs), Dialect::JsonRpc, None);
    let late = json!({"n": 1, "_meta": {"deadline_ms": 200}});
    raw.call(1, "wait", &late).await;
    // The peer reads none of these responses, so the response to the late call has no room.
    for id in 2..20 {
        raw.call(id, "echo", &json!({"text": "x"})).await;
    }
    assert!(!server.dropped.load(Ordering::Relaxed));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(server.dropped.load(Ordering::Relaxed));
}
