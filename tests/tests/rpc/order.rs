//! Calls start in the order in which the client sent them.

use box_rpc::Empty;
use box_test_wait::eventually;
use box_tests::actions::{Note, Probe, Text};
use box_tests::every_transport;
use box_tests::fixture::Setup;

every_transport!(calls_start_in_the_order_they_were_sent);

async fn calls_start_in_the_order_they_were_sent(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.in_flight = Some(2000))
        .start()
        .await;
    let expected: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
    for text in &expected {
        fixture.peer.notify::<Note>(&Text::new(text)).await.unwrap();
    }
    eventually("all notes are there", async || {
        fixture
            .peer
            .call::<Probe>(&Empty {})
            .await
            .unwrap()
            .notes
            .len()
            == 1000
    })
    .await;
    assert_eq!(
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().notes,
        expected
    );
}
