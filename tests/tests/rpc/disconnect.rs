//! A lost peer is noticed at once. A peer that only stops sending is still served.

use std::time::Duration;

use box_rpc::Empty;
use box_test_wait::eventually;
use box_tests::actions::{Number, Probe, Wait};
use box_tests::every_transport;
use box_tests::fixture::Setup;
use serde_json::json;

every_transport!(a_peer_that_only_stops_sending_is_still_served);

every_transport!(two_clients: what_a_vanished_peer_asked_for_is_cancelled_at_once);

/// Longer than any test waits, so that anything that ends earlier had another cause.
const NEVER: Duration = Duration::from_mins(10);

async fn a_peer_that_only_stops_sending_is_still_served(setup: Setup) {
    let mut raw = setup.raw().await;
    // Long enough for several checks whether the peer is connected.
    raw.call(1, "wait", &json!({"n": 1500})).await;
    raw.close_input().await;
    assert_eq!(raw.answer().await.result(), json!({"n": 1500}));
}

async fn what_a_vanished_peer_asked_for_is_cancelled_at_once(setup: Setup) {
    let drain = u64::try_from(NEVER.as_millis()).unwrap();
    let setup = setup.server(|limits| limits.drain_ms = Some(drain));
    let (dying, living) = setup.start_twice().await;
    let seen = async || living.peer.call::<Probe>(&Empty {}).await.unwrap();
    let peer = dying.peer.clone();
    let waiting = tokio::spawn(async move { peer.call::<Wait>(&Number { n: drain }).await });
    eventually("the call runs", async || seen().await.begun == 1).await;
    // As if its process were killed: no message is sent, and both directions are closed.
    drop(dying);
    waiting.await.unwrap().unwrap_err();
    eventually("the call is cancelled", async || seen().await.dropped == 1).await;
}
