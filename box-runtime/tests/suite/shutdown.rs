//! Shutdown ends every box, in bounded time.

use box_protocol::Code;
use box_protocol::actions::SystemShutdownParams;
use box_runtime::fake::{InjectedFault, Reply};
use tokio::time::Instant;

use super::fixture::{code, fixture, seconds, settle};

#[tokio::test(start_paused = true)]
async fn every_box_is_ended_and_the_runtime_serves_again() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    for box_id in ["a", "b"] {
        w.exec(box_id, "true").await.unwrap();
    }
    let running = w.begin("c", "sleep").await;
    assert_eq!(w.shutdown().await.ended, 3);
    assert_eq!((w.backend.running(), w.ids().await.len()), (0, 0));
    assert_eq!(code(running.await.unwrap()), Code::Unavailable);
    w.exec("a", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn new_calls_are_refused_during_a_shutdown_but_health_answers() {
    let w = fixture();
    w.exec("a", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Slow(seconds(5)));
    let (down, ()) = tokio::join!(w.shutdown(), async {
        settle().await;
        for box_id in ["a", "new"] {
            let error = w.exec(box_id, "true").await.unwrap_err();
            assert_eq!(error.code(), Code::Unavailable);
            assert_eq!(error.message(), "the runtime is shutting down");
        }
        assert!(w.runtime.health().await.available);
        assert_eq!(w.runtime.status(&w.caller).await.unwrap().active_boxes, 1);
    });
    assert_eq!(down.ended, 1);
}

#[tokio::test(start_paused = true)]
async fn waiting_calls_are_refused_at_the_close() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    let running = w.begin("s", "sleep").await;
    let waiting = w.begin("s", "never").await;
    w.shutdown().await;
    assert_eq!(code(running.await.unwrap()), Code::Unavailable);
    assert_eq!(code(waiting.await.unwrap()), Code::Unavailable);
    assert_eq!(w.backend.execs().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_box_that_does_not_end_is_abandoned_at_the_deadline() {
    let w = fixture();
    w.exec("a", "true").await.unwrap();
    w.exec("b", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Hang);
    let begun = Instant::now();
    let params = SystemShutdownParams {
        exit: false,
        within_ms: Some(3000),
    };
    let down = w.runtime.shutdown(&w.caller, params).await.unwrap();
    assert_eq!((begun.elapsed(), down.ended), (seconds(3), 1));
    assert_eq!(w.ids().await, [""; 0]);
    for box_id in ["a", "b"] {
        w.exec(box_id, "true").await.unwrap();
    }
    tokio::time::sleep(seconds(60)).await;
    assert_eq!(w.ids().await, ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn concurrent_shutdowns_all_answer() {
    let w = fixture();
    w.exec("a", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Slow(seconds(1)));
    let (first, second) = tokio::join!(w.shutdown(), w.shutdown());
    assert_eq!((first.ended, second.ended), (1, 1));
    assert_eq!(w.shutdown().await.ended, 0);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_times_out_ends_the_wait_of_the_others() {
    let w = fixture();
    w.exec("a", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Hang);
    let begun = Instant::now();
    let within = |within_ms| SystemShutdownParams {
        exit: false,
        within_ms: Some(within_ms),
    };
    let (first, second) = tokio::join!(
        w.runtime.shutdown(&w.caller, within(9000)),
        w.runtime.shutdown(&w.caller, within(2000)),
    );
    assert_eq!((first.unwrap().ended, second.unwrap().ended), (0, 0));
    assert_eq!(begun.elapsed(), seconds(2));
}
