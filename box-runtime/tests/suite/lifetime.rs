//! Idle boxes end by themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::actions::BoxUpdateParams;
use box_protocol::{
    BoxError, BoxState, Code, ExecStatus, Lifetime, LifetimeAction, LifetimeChange, SpecDraft,
    UnixMs,
};
use box_runtime::fake::{InjectedFault, Reply};
use tokio::time::sleep;

use super::fixture::{Fixture, code, fixture, fixture_with, id, seconds, spec};

fn with_lifetime(box_id: &str, lifetime: Lifetime) -> SpecDraft {
    let mut spec = spec(box_id, "true");
    spec.lifetime = Some(lifetime);
    spec
}

async fn exists(w: &Fixture, box_id: &str) -> bool {
    w.get(box_id).await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn an_idle_box_lives_five_minutes() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    sleep(seconds(299)).await;
    assert!(exists(&w, "s").await);
    sleep(seconds(2)).await;
    assert_eq!(code(w.get("s").await), Code::NotFound);
    assert_eq!(w.backend.stops(), ["s"]);
    assert_eq!(w.backend.running(), 0);
}

#[tokio::test(start_paused = true)]
async fn use_restarts_the_idle_time_and_inspection_does_not() {
    let w = fixture_with(|config| config.idle_ttl = seconds(100));
    w.exec("s", "true").await.unwrap();
    w.exec("unused", "true").await.unwrap();
    for _ in 0..5 {
        sleep(seconds(90)).await;
        w.exec("s", "true").await.unwrap();
        let _ = w.get("unused").await;
        w.list().await;
    }
    assert_eq!(w.ids().await, ["s"]);
    assert_eq!(w.backend.starts(), ["s", "unused"]);
    sleep(seconds(90)).await;
    w.create(SpecDraft::new("s")).await.unwrap();
    sleep(seconds(90)).await;
    assert!(exists(&w, "s").await);
}

#[tokio::test(start_paused = true)]
async fn a_busy_box_is_never_reaped() {
    let w = fixture_with(|config| config.idle_ttl = seconds(10));
    w.backend
        .next_command(Reply::default().takes(seconds(1000)));
    let running = w
        .begin_exec(super::fixture::exec_of(spec("s", "job").timeout_sec(2000)))
        .await;
    sleep(seconds(900)).await;
    assert!(exists(&w, "s").await);
    assert_eq!(running.await.unwrap().unwrap().exit_code, Some(0));
    sleep(seconds(9)).await;
    assert!(exists(&w, "s").await);
    sleep(seconds(2)).await;
    assert!(!exists(&w, "s").await);
}

#[tokio::test(start_paused = true)]
async fn a_persistent_box_is_never_reaped() {
    let w = fixture();
    w.exec_spec(spec("s", "true").persistent(true))
        .await
        .unwrap();
    sleep(Duration::from_hours(5)).await;
    assert!(exists(&w, "s").await);
    w.exec_spec(spec("s", "true").persistent(true))
        .await
        .unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_box_can_set_its_idle_time() {
    let w = fixture();
    let lifetime = Lifetime {
        idle_ms: Some(1_000_000),
        ..Lifetime::default()
    };
    w.exec_spec(with_lifetime("s", lifetime)).await.unwrap();
    sleep(seconds(990)).await;
    assert!(exists(&w, "s").await);
    sleep(seconds(11)).await;
    assert!(!exists(&w, "s").await);
}

#[tokio::test(start_paused = true)]
async fn a_box_expires_even_while_it_is_busy() {
    let w = fixture();
    let at = UnixMs(UnixMs::now().0 + 60_000);
    let lifetime = Lifetime {
        expires_at: Some(at),
        ..Lifetime::default()
    };
    w.backend.on_command("sleep", Reply::hang());
    let mut draft = with_lifetime("s", lifetime)
        .cmd("sleep")
        .persistent(true)
        .timeout_sec(1000);
    draft.cmd = Some("sleep".to_owned());
    let running = w.begin_exec(super::fixture::exec_of(draft)).await;
    sleep(seconds(50)).await;
    assert!(!running.is_finished());
    sleep(seconds(15)).await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert_eq!(error.message(), "box s expired: it reached its expires_at");
    assert!(!exists(&w, "s").await);
    assert_eq!(w.backend.stops(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_new_lifetime_applies_at_once() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    let update = |idle_ms| BoxUpdateParams {
        box_id: id("s"),
        name: None,
        labels: BTreeMap::new(),
        note: None,
        lifetime: Some(LifetimeChange {
            idle_ms: Some(Some(idle_ms)),
            ..LifetimeChange::default()
        }),
        extra_mounts: None,
        defaults: None,
        network_policy: None,
    };
    w.runtime
        .update(&w.caller, update(1_000_000))
        .await
        .unwrap();
    sleep(seconds(400)).await;
    assert!(exists(&w, "s").await);
    w.runtime.update(&w.caller, update(500_000)).await.unwrap();
    sleep(seconds(99)).await;
    assert!(exists(&w, "s").await);
    sleep(seconds(2)).await;
    assert!(!exists(&w, "s").await);
}

#[tokio::test(start_paused = true)]
async fn a_slow_health_answer_counts_as_use() {
    let w = fixture_with(|config| config.idle_ttl = seconds(10));
    w.exec("s", "true").await.unwrap();
    w.backend.set_health_trouble(Some(InjectedFault::Hang));
    // In the middle of the query to the backend.
    sleep(seconds(12)).await;
    assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Idle);
    w.exec("s", "true").await.unwrap();
    sleep(seconds(120)).await;
    assert!(exists(&w, "s").await);
    assert_eq!(w.backend.starts(), ["s"]);
    w.backend.set_health_trouble(None);
    sleep(seconds(20)).await;
    assert!(!exists(&w, "s").await);
}

fn stopping(box_id: &str) -> SpecDraft {
    let lifetime = Lifetime {
        idle_ms: Some(10_000),
        on_idle: LifetimeAction::Stop,
        wake: true,
        ..Lifetime::default()
    };
    with_lifetime(box_id, lifetime)
}

#[tokio::test(start_paused = true)]
async fn a_failed_stop_keeps_the_files_and_is_retried() {
    let w = fixture();
    w.create(stopping("s")).await.unwrap();
    for trouble in [
        InjectedFault::Hang,
        InjectedFault::Fail(BoxError::internal("stuck")),
    ] {
        w.backend.set_clear_trouble(Some(trouble));
        sleep(seconds(60)).await;
        assert_eq!(w.get("s").await.unwrap().backend_id, "backend-s");
        assert_eq!(w.backend.stops(), [""; 0]);
    }
    let mut events = w.events("s").await;
    events.dedup();
    assert_eq!(events, ["started", "unstopped"]);
    w.backend.set_clear_trouble(None);
    sleep(seconds(30)).await;
    assert_eq!(w.get("s").await.unwrap().state, BoxState::Stopped);
    assert_eq!(w.backend.stops(), [""; 0]);
}

fn expiring(box_id: &str, on_expiry: LifetimeAction) -> SpecDraft {
    let lifetime = Lifetime {
        expires_at: Some(UnixMs(UnixMs::now().0 + 60_000)),
        on_expiry,
        wake: true,
        ..Lifetime::default()
    };
    with_lifetime(box_id, lifetime).persistent(true)
}

async fn state(w: &Fixture, box_id: &str) -> BoxState {
    w.get(box_id).await.unwrap().state
}

#[tokio::test(start_paused = true)]
async fn an_idle_box_can_be_paused_and_a_call_resumes_it() {
    let w = fixture();
    let lifetime = Lifetime {
        idle_ms: Some(10_000),
        on_idle: LifetimeAction::Pause,
        wake: true,
        ..Lifetime::default()
    };
    w.create(with_lifetime("s", lifetime)).await.unwrap();
    sleep(seconds(9)).await;
    assert_eq!(state(&w, "s").await, BoxState::Running);
    sleep(seconds(2)).await;
    assert_eq!(state(&w, "s").await, BoxState::Paused);
    sleep(Duration::from_hours(5)).await;
    assert_eq!(state(&w, "s").await, BoxState::Paused, "until it is used");
    w.exec("s", "true").await.unwrap();
    assert_eq!(state(&w, "s").await, BoxState::Running);
    sleep(seconds(11)).await;
    assert_eq!(state(&w, "s").await, BoxState::Paused);
    let events = ["started", "paused", "resumed", "paused"];
    assert_eq!(w.events("s").await, events);
}

#[tokio::test(start_paused = true)]
async fn an_expired_box_can_be_kept_and_used_again() {
    let w = fixture();
    for (id, action, kept) in [
        ("stops", LifetimeAction::Stop, BoxState::Stopped),
        ("pauses", LifetimeAction::Pause, BoxState::Paused),
    ] {
        w.create(expiring(id, action)).await.unwrap();
        sleep(seconds(55)).await;
        assert_eq!(state(&w, id).await, BoxState::Running);
        sleep(seconds(10)).await;
        assert_eq!(state(&w, id).await, kept);
        let lifetime = w.get(id).await.unwrap().lifetime.unwrap();
        assert_eq!((lifetime.expires_at, lifetime.on_expiry), (None, action));
        // The expiry has passed, so the woken box stays.
        let call = spec(id, "true").persistent(true);
        w.exec_spec(call).await.unwrap();
        sleep(Duration::from_hours(5)).await;
        assert_eq!(state(&w, id).await, BoxState::Running);
        assert_eq!(
            w.events(id).await.last().unwrap(),
            if kept == BoxState::Stopped {
                "started"
            } else {
                "resumed"
            }
        );
    }
    // A stopped box has no sandbox, so its start makes a new one.
    assert_eq!(w.backend.starts(), ["stops", "stops", "pauses"]);
}

#[tokio::test(start_paused = true)]
async fn an_expiry_that_keeps_the_box_waits_for_its_exec() {
    let w = fixture();
    w.backend
        .on_command("job", Reply::default().takes(seconds(100)));
    for (id, action, kept) in [
        ("stops", LifetimeAction::Stop, BoxState::Stopped),
        ("pauses", LifetimeAction::Pause, BoxState::Paused),
    ] {
        let job = expiring(id, action).cmd("job").timeout_sec(1000);
        let running = w.begin_exec(super::fixture::exec_of(job)).await;
        sleep(seconds(90)).await;
        assert_eq!(state(&w, id).await, BoxState::Running);
        assert_eq!(running.await.unwrap().unwrap().exit_code, Some(0));
        sleep(seconds(1)).await;
        assert_eq!(state(&w, id).await, kept);
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_box_that_cannot_be_stopped_is_stopped_later() {
    let w = fixture();
    w.create(expiring("s", LifetimeAction::Stop)).await.unwrap();
    let stuck = InjectedFault::Fail(BoxError::internal("stuck"));
    w.backend.set_clear_trouble(Some(stuck));
    sleep(seconds(70)).await;
    assert_eq!(state(&w, "s").await, BoxState::Running);
    assert_eq!(w.events("s").await, ["started", "unstopped"]);
    w.backend.set_clear_trouble(None);
    sleep(seconds(70)).await;
    assert_eq!(state(&w, "s").await, BoxState::Stopped);
}

#[tokio::test(start_paused = true)]
async fn listing_commands_neither_wakes_a_box_nor_keeps_it_alive() {
    let w = fixture_with(|config| config.idle_ttl = seconds(10));
    w.exec("s", "true").await.unwrap();
    w.create(stopping("stopped")).await.unwrap();
    for _ in 0..6 {
        sleep(seconds(4)).await;
        let _ = w.commands("s").await;
        w.commands("stopped").await.unwrap();
    }
    assert!(!exists(&w, "s").await);
    assert_eq!(w.get("stopped").await.unwrap().state, BoxState::Stopped);
    assert_eq!(w.events("stopped").await, ["started", "stopped"]);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_hangs_has_an_end_and_can_be_deleted() {
    let w = fixture();
    let mut draft = stopping("s");
    let main = serde_json::json!({"argv": ["main"]});
    draft.main = Some(serde_json::from_value(main).unwrap());
    w.create(draft.clone()).await.unwrap();
    sleep(seconds(12)).await;
    assert_eq!(w.get("s").await.unwrap().state, BoxState::Stopped);
    w.backend.on_command("main", Reply::hang());
    let woken = w.begin("s", "true").await;
    w.force_delete("s").await.unwrap();
    // The call came before the end, so it makes no new box.
    assert_eq!(woken.await.unwrap().unwrap_err().code(), Code::Conflict);
    draft.box_id = Some("t".to_owned());
    assert_eq!(code(w.create(draft).await), Code::Timeout);
    assert_eq!(w.ids().await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn the_last_handle_ends_every_box() {
    let w = fixture();
    w.exec("a", "true").await.unwrap();
    w.exec("b", "true").await.unwrap();
    let Fixture {
        backend, runtime, ..
    } = w;
    let router = runtime.router();
    drop(runtime);
    sleep(seconds(1)).await;
    assert_eq!(backend.running(), 2);
    drop(router);
    sleep(seconds(1)).await;
    assert_eq!(backend.running(), 0);
}
