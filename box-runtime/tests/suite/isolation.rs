//! A fault of one box has no effect on another.

use box_protocol::{BoxState, Code};
use box_runtime::fake::{InjectedFault, Reply};
use tokio::time::Instant;

use super::fixture::{code, fixture, fixture_with, seconds, settle};

#[tokio::test(start_paused = true)]
async fn a_stuck_start_delays_no_other_box() {
    let w = fixture_with(|config| config.start_timeout = seconds(30));
    w.backend.next_start(InjectedFault::Hang);
    let stuck = w.begin("stuck", "true").await;
    let begun = Instant::now();
    for box_id in ["a", "b", "c"] {
        w.exec(box_id, "true").await.unwrap();
        w.delete(box_id).await.unwrap();
    }
    assert!(begun.elapsed() < seconds(1));
    assert_eq!(w.get("stuck").await.unwrap().state, BoxState::Starting);
    let error = stuck.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert_eq!(
        error.message(),
        "backend fake did not start the box within 30 s"
    );
    assert_eq!(w.ids().await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_stuck_stop_delays_no_other_box() {
    let w = fixture();
    w.exec("stuck", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Hang);
    let begun = Instant::now();
    let (stuck, other) = tokio::join!(w.delete("stuck"), async {
        settle().await;
        w.exec("a", "true").await.unwrap();
        begun.elapsed()
    });
    assert!(other < seconds(1));
    assert_eq!(code(stuck), Code::Timeout);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_backend_affects_one_box() {
    let w = fixture();
    w.backend
        .on_command("sleep", Reply::default().takes(seconds(5)));
    let running = w.begin("fine", "sleep").await;
    w.backend.next_start(InjectedFault::Panic);
    let error = w.exec("bad", "true").await.unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("fake"), "{error}");
    assert_eq!(running.await.unwrap().unwrap().exit_code, Some(0));
    w.exec("bad", "true").await.unwrap();
    assert_eq!(w.ids().await, ["bad", "fine"]);
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_hangs_or_panics_is_an_unavailable_backend() {
    let w = fixture();
    w.exec("there", "true").await.unwrap();
    tokio::time::sleep(seconds(2)).await;
    for trouble in [InjectedFault::Hang, InjectedFault::Panic] {
        w.backend.set_probe_trouble(Some(trouble));
        let (health, there, new) = tokio::join!(
            w.runtime.health(),
            w.exec("there", "true"),
            w.exec("new", "true")
        );
        assert!(!health.available);
        there.unwrap();
        assert_eq!(code(new), Code::Unavailable);
    }
}
