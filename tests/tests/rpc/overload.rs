//! Both sides are at their limits and call each other: no deadlock.

use box_rpc::Code;
use box_tests::actions::{Back, Text};
use box_tests::every_transport;
use box_tests::fixture::Setup;
use futures::future::join_all;

every_transport!(two_saturated_peers_that_call_each_other_do_not_lock_up);

async fn two_saturated_peers_that_call_each_other_do_not_lock_up(setup: Setup) {
    let small = |limits: &mut box_tests::fixture::TestLimits| {
        limits.in_flight = Some(4);
        limits.queue_slots = Some(2);
    };
    let fixture = setup.server(small).client(small).start().await;
    let text = Text::new("x".repeat(20_000));
    let calls = (0..64).map(|_| {
        let (peer, text) = (fixture.peer.clone(), text.clone());
        async move {
            loop {
                match peer.call::<Back>(&text).await {
                    Ok(answer) => return assert_eq!(answer, text),
                    // Either side refuses at once, which prevents the deadlock.
                    Err(error) => assert_eq!(error.code(), Code::Overloaded, "{error}"),
                }
                tokio::task::yield_now().await;
            }
        }
    });
    join_all(calls).await;
}
