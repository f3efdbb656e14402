//! `box.delete`, and calls at the same time.

use box_protocol::{BoxError, Code, ExecStatus, SpecDraft};
use box_runtime::fake::{InjectedFault, Reply};
use tokio::time::Instant;

use super::fixture::{code, fixture, seconds, settle};

#[tokio::test(start_paused = true)]
async fn a_deleted_box_is_gone_before_the_answer() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    assert_eq!(w.delete("s").await.unwrap().deleted.as_str(), "s");
    assert_eq!(w.ids().await, [""; 0]);
    assert_eq!(w.backend.stops(), ["s"]);
    assert_eq!(code(w.delete("s").await), Code::NotFound);
    assert_eq!(code(w.get("s").await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_delete_waits_for_a_running_exec() {
    let w = fixture();
    w.backend.next_command(Reply::default().takes(seconds(10)));
    let running = w.begin("s", "job").await;
    let begun = Instant::now();
    w.delete("s").await.unwrap();
    assert!(begun.elapsed() > seconds(9));
    assert_eq!(running.await.unwrap().unwrap().exit_code, Some(0));
}

#[tokio::test(start_paused = true)]
async fn force_does_not_wait() {
    let w = fixture();
    w.backend.next_command(Reply::hang());
    let running = w.begin("s", "job").await;
    let begun = Instant::now();
    w.force_delete("s").await.unwrap();
    assert!(begun.elapsed() < seconds(1));
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert_eq!(error.message(), "box s was deleted");
    assert_eq!(
        (w.backend.killed(), w.backend.running()),
        (vec!["job".to_owned()], 0)
    );
}

#[tokio::test(start_paused = true)]
async fn force_ends_a_start_that_hangs() {
    let w = fixture();
    w.backend.next_start(InjectedFault::Hang);
    let starting = w.begin("s", "job").await;
    w.force_delete("s").await.unwrap();
    let error = starting.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert!(error.message().contains("was deleted"), "{error}");
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_forced_delete_also_ends_earlier_requests() {
    let w = fixture();
    w.backend.next_start(InjectedFault::Slow(seconds(5)));
    let create = w.create(SpecDraft::new("s"));
    let (making, waiting, deleted) = tokio::join!(create, w.exec("s", "job"), async {
        settle().await;
        w.force_delete("s").await
    });
    deleted.unwrap();
    for refused in [making.map(drop), waiting.map(drop)] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        assert!(error.message().contains("was deleted"), "{error}");
    }
    settle().await;
    assert_eq!(w.ids().await, [""; 0], "the box is not running");
    assert_eq!(w.backend.running(), 0);
    // Later calls get a new box.
    w.exec("s", "next").await.unwrap();
    assert_eq!(w.ids().await, ["s"]);
}

#[tokio::test(start_paused = true)]
async fn an_exec_behind_a_delete_gets_a_new_box_with_its_own_spec() {
    let w = fixture();
    w.backend.next_command(Reply::default().takes(seconds(10)));
    let running = w.begin("s", "job").await;
    let other = super::fixture::spec("s", "next").cpus(2.0);
    let (deleted, next) = tokio::join!(w.delete("s"), async {
        settle().await;
        w.exec_spec(other).await
    });
    deleted.unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(next.unwrap().stdout, "executed: next");
    assert_eq!(w.backend.starts(), ["s", "s"]);
    assert!((w.get("s").await.unwrap().cpus - 2.0).abs() < f64::EPSILON);
}

#[tokio::test(start_paused = true)]
async fn an_exec_during_the_stop_waits_for_it_and_gets_a_new_box() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Slow(seconds(5)));
    let (deleted, next) = tokio::join!(w.delete("s"), async {
        settle().await;
        assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Closing);
        w.exec("s", "next").await
    });
    deleted.unwrap();
    next.unwrap();
    assert_eq!(w.backend.starts(), ["s", "s"]);
    assert_eq!(w.backend.stops(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn concurrent_deletes_delete_once() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    w.backend.next_stop(InjectedFault::Slow(seconds(1)));
    let (first, second) = tokio::join!(w.delete("s"), w.delete("s"));
    first.unwrap();
    assert_eq!(code(second), Code::NotFound);
    assert_eq!(w.backend.stops(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_stop_is_reported_and_the_box_removed() {
    let w = fixture();
    for (trouble, expected) in [
        (InjectedFault::Hang, Code::Timeout),
        (InjectedFault::Panic, Code::Internal),
        (
            InjectedFault::Fail(BoxError::unavailable("daemon away")),
            Code::Unavailable,
        ),
    ] {
        w.exec("s", "true").await.unwrap();
        w.backend.next_stop(trouble);
        assert_eq!(code(w.delete("s").await), expected);
        assert_eq!(w.ids().await, [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_box_is_stopped_even_if_the_call_is_cancelled() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    w.backend.kill_box("s");
    w.backend.next_stop(InjectedFault::Hang);
    let waiting = w.begin("s", "job").await;
    w.force_delete("s").await.unwrap();
    assert_eq!(w.backend.stops(), ["s"]);
    assert_eq!(waiting.await.unwrap().unwrap_err().code(), Code::Conflict);
    assert_eq!(w.backend.running(), 0);
}
