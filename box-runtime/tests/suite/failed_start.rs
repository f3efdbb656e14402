//! Boxes whose creator wants to find them even if they cannot start, so that a caller that did not
//! wait can read the reason. They outlive the runtime before they have started.

use std::path::Path;
use std::time::Duration;

use box_protocol::actions::{BoxCreateParams, BoxListParams, IfExists};
use box_protocol::error::{Detail, Ended};
use box_protocol::{BoxError, BoxInfo, BoxState, Code, Lifetime, Name, SpecDraft};
use box_runtime::fake::InjectedFault;
use box_test_wait::eventually;
use serde_json::json;
use tokio::time::sleep;

use crate::fixture::{Fixture, code, fixture, fixture_with, seconds, settle};

const REASON: &str = "no such image";

/// Asks for a box whose start fails, and returns the box that stays.
async fn fail(w: &Fixture, spec: SpecDraft) -> BoxInfo {
    let id = spec.box_id.clone().unwrap();
    w.backend
        .next_start(InjectedFault::Fail(BoxError::not_found(REASON)));
    let params = BoxCreateParams {
        keep_failed: true,
        ..BoxCreateParams::new(spec)
    };
    let error = w.runtime.create(&w.caller, params).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::NotFound, REASON));
    w.get(&id).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_box_that_cannot_start_stays_with_the_reason_if_asked_for() {
    let w = fixture();
    let info = fail(&w, SpecDraft::new("a")).await;
    assert_eq!(info.state, BoxState::Failed);
    assert_eq!(info.reason.as_deref(), Some(REASON));
    let failed = BoxListParams {
        state: vec![BoxState::Failed],
        ..BoxListParams::default()
    };
    assert_eq!(w.runtime.list(&w.caller, &failed).await.unwrap().total, 1);
    assert_eq!(w.backend.running(), 0);
    // A call into the box gets the reason, and not the code of the start.
    let error = w.commands("a").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains(REASON), "{error:?}");
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.ended, Some(Ended::Failed));
    // Without the setting, nothing stays.
    w.backend
        .next_start(InjectedFault::Fail(BoxError::not_found(REASON)));
    assert_eq!(code(w.create(SpecDraft::new("b")).await), Code::NotFound);
    assert_eq!(code(w.get("b").await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_box_that_could_not_start_can_be_deleted_and_started_again() {
    let w = fixture();
    fail(&w, SpecDraft::new("a")).await;
    let params = BoxCreateParams {
        if_exists: IfExists::Fail,
        ..BoxCreateParams::new(SpecDraft::new("a"))
    };
    let taken = w.runtime.create(&w.caller, params).await;
    assert_eq!(code(taken), Code::Conflict);
    let again = w.create(SpecDraft::new("a")).await.unwrap();
    assert_eq!(again.info.state, BoxState::Running);
    assert_eq!((again.info.reason, again.existed), (None, false));
    fail(&w, SpecDraft::new("b")).await;
    w.delete("b").await.unwrap();
    assert_eq!(code(w.get("b").await), Code::NotFound);
    fail(&w, SpecDraft::new("c")).await;
    w.force_delete("c").await.unwrap();
    assert_eq!(w.ids().await, ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_box_that_could_not_start_is_deleted_after_its_idle_time_or_an_hour() {
    let w = fixture_with(|config| config.idle_ttl = seconds(300));
    fail(&w, SpecDraft::new("default")).await;
    let years = json!({"idle_ms": 100_000_000_000_u64, "on_idle": "stop"});
    let lifetime: Lifetime = serde_json::from_value(years).unwrap();
    let spec = SpecDraft {
        lifetime: Some(lifetime),
        ..SpecDraft::new("years")
    };
    fail(&w, spec).await;
    sleep(seconds(290)).await;
    assert_eq!(w.ids().await, ["default", "years"]);
    sleep(seconds(20)).await;
    assert_eq!(w.ids().await, ["years"]);
    sleep(seconds(3600)).await;
    assert!(w.ids().await.is_empty());
}

fn with_state(directory: &Path) -> Fixture {
    fixture_with(|config| config.state_dir = Some(directory.to_owned()))
}

/// Starts a runtime on a copy of what another has on disk now, as after a crash.
async fn after_crash(directory: &Path, copy: &Path) -> Fixture {
    let w = crashed(directory, copy);
    w.runtime.adopt().await.unwrap();
    settle().await;
    w
}

/// The same runtime before it has adopted the boxes.
fn crashed(directory: &Path, copy: &Path) -> Fixture {
    let records = directory.join("stopped");
    std::fs::create_dir(copy.join("stopped")).unwrap();
    for record in std::fs::read_dir(records).into_iter().flatten().flatten() {
        let to = copy.join("stopped").join(record.file_name());
        std::fs::copy(record.path(), to).unwrap();
    }
    with_state(copy)
}

fn records(directory: &Path) -> usize {
    let records = std::fs::read_dir(directory.join("stopped"));
    records.map_or(0, Iterator::count)
}

/// Starts to create a box whose start never returns, and returns when a caller has seen it.
async fn hang(w: &Fixture, spec: SpecDraft) -> BoxInfo {
    let box_id = spec.box_id.clone().unwrap();
    create_unseen(w, spec, InjectedFault::Hang);
    see(w, &box_id).await
}

/// Returns a box as soon as it exists.
async fn see(w: &Fixture, box_id: &str) -> BoxInfo {
    loop {
        match w.get(box_id).await {
            Ok(info) => return info,
            Err(_) => settle().await,
        }
    }
}

/// Starts to create a box, and does not wait for its start.
fn create_unseen(w: &Fixture, spec: SpecDraft, start: InjectedFault) {
    w.backend.next_start(start);
    let params = BoxCreateParams {
        keep_failed: true,
        ..BoxCreateParams::new(spec)
    };
    let (runtime, caller) = (w.runtime.clone(), w.caller.clone());
    tokio::spawn(async move { runtime.create(&caller, params).await });
}

#[tokio::test]
async fn a_box_that_a_crash_interrupted_in_its_start_starts_again() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path()).with_token("ann");
    let spec = SpecDraft {
        name: Some(Name::new("report").unwrap()),
        labels: Some([("team".to_owned(), "a".to_owned())].into()),
        ..SpecDraft::new("a")
    };
    let starting = hang(&w, spec).await;
    assert_eq!(starting.state, BoxState::Starting);
    // Without the setting, a box that has not started is gone.
    w.backend.next_start(InjectedFault::Hang);
    let other = w.with_caller(w.caller.clone());
    tokio::spawn(async move { other.create(SpecDraft::new("b")).await });
    settle().await;
    assert_eq!(w.get("b").await.unwrap().state, BoxState::Starting);

    let next = after_crash(before.path(), after.path())
        .await
        .with_token("ann");
    assert_eq!(code(next.get("b").await), Code::NotFound);
    let mut info = next.get("a").await.unwrap();
    while info.state == BoxState::Starting {
        settle().await;
        info = next.get("a").await.unwrap();
    }
    assert_eq!(info.state, BoxState::Running, "{info:?}");
    assert_eq!(
        (info.unique_id, info.name),
        (starting.unique_id, starting.name)
    );
    assert_eq!(info.labels, starting.labels);
    assert_eq!(next.backend.starts(), ["a"]);
    assert_eq!(
        next.backend.specs()[0].name.as_ref().unwrap().as_str(),
        "report"
    );
    // A box that has started has a record of its backend instead.
    assert_eq!(records(after.path()), 0);
}

#[tokio::test]
async fn a_starting_box_has_a_record_once_a_caller_has_seen_it() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path());
    create_unseen(&w, SpecDraft::new("a"), InjectedFault::Hang);
    while w.backend.starts().is_empty() {
        settle().await;
    }
    // Its creator got no answer, so the next server does not start it. Figures name no box.
    assert_eq!(w.runtime.states().await, [BoxState::Starting]);
    assert_eq!(records(before.path()), 0);
    let next = after_crash(before.path(), after.path()).await;
    assert_eq!(code(next.get("a").await), Code::NotFound);
    assert!(next.backend.starts().is_empty());
    assert_eq!(w.ids().await, ["a"]);
    assert_eq!(records(before.path()), 1);
}

#[tokio::test]
async fn a_start_with_directories_of_the_host_is_not_repeated_without_its_caller() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path());
    let spec = SpecDraft {
        host_path: Some("/srv/data".to_owned()),
        ..SpecDraft::new("a")
    };
    hang(&w, spec).await;
    let next = after_crash(before.path(), after.path()).await;
    let info = next.get("a").await.unwrap();
    assert_eq!(info.state, BoxState::Failed);
    let reason = info.reason.unwrap();
    assert!(reason.contains("create it again"), "{reason}");
    assert!(!reason.contains("/srv/data") && next.backend.starts().is_empty());
}

#[tokio::test]
async fn a_start_that_ends_three_servers_fails() {
    let directories: [_; 4] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let [first, second, third, fourth] = directories.each_ref().map(tempfile::TempDir::path);
    let mut servers = vec![with_state(first)];
    hang(&servers[0], SpecDraft::new("a")).await;
    for (before, after) in [(first, second), (second, third)] {
        let w = crashed(before, after);
        w.backend.next_start(InjectedFault::Hang);
        w.runtime.adopt().await.unwrap();
        assert_eq!(w.get("a").await.unwrap().state, BoxState::Starting);
        servers.push(w);
    }
    let last = after_crash(third, fourth).await;
    let info = last.get("a").await.unwrap();
    assert_eq!(info.state, BoxState::Failed);
    assert!(info.reason.unwrap().contains("ended 3 times"));
    assert!(last.backend.starts().is_empty());
}

#[tokio::test]
async fn the_reason_of_a_box_that_could_not_start_survives_a_crash() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path());
    let failed = fail(&w, SpecDraft::new("a")).await;
    let next = after_crash(before.path(), after.path()).await;
    let info = next.get("a").await.unwrap();
    assert_eq!((info.state, info.since), (BoxState::Failed, failed.since));
    assert_eq!(info.reason.as_deref(), Some(REASON));
    let error = next.commands("a").await.unwrap_err();
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.ended, Some(Ended::Failed));
    assert!(next.backend.starts().is_empty());
    next.delete("a").await.unwrap();
    assert_eq!(records(after.path()), 0);
}

#[tokio::test]
async fn the_reason_of_a_box_that_a_caller_saw_start_survives_a_crash() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = fixture_with(|config| {
        config.state_dir = Some(before.path().to_owned());
        config.start_timeout = Duration::from_millis(500);
    });
    let seen = hang(&w, SpecDraft::new("a")).await;
    assert_eq!(seen.state, BoxState::Starting);
    eventually("the start fails", async || {
        w.get("a").await.unwrap().state == BoxState::Failed
    })
    .await;
    // A caller that sees the failure sees the same after a crash.
    let next = after_crash(before.path(), after.path()).await;
    let info = next.get("a").await.unwrap();
    assert_eq!(info.state, BoxState::Failed);
    assert_eq!(info.reason, w.get("a").await.unwrap().reason);
    assert!(next.backend.starts().is_empty());
}

#[tokio::test]
async fn a_box_that_is_deleted_while_it_starts_leaves_no_record() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(directory.path());
    for _ in 0..20 {
        hang(&w, SpecDraft::new("a")).await;
        assert_eq!(records(directory.path()), 1);
        w.force_delete("a").await.unwrap();
        assert_eq!(records(directory.path()), 0);
    }
}

#[tokio::test]
async fn a_box_that_is_deleted_at_any_moment_of_its_start_leaves_no_record() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(directory.path());
    w.backend.set_persist_time(Duration::from_millis(30));
    let (mut was_written, mut has_run) = (false, false);
    for moment in 0..16 {
        let slow = InjectedFault::Slow(Duration::from_millis(60));
        create_unseen(&w, SpecDraft::new("a"), slow);
        see(&w, "a").await;
        was_written |= records(directory.path()) == 1;
        sleep(Duration::from_millis(10 * moment)).await;
        has_run |= w.get("a").await.unwrap().state == BoxState::Running;
        w.force_delete("a").await.unwrap();
        assert_eq!(records(directory.path()), 0, "{moment}");
    }
    assert!(was_written && has_run, "{was_written} {has_run}");
}

#[tokio::test]
async fn a_failed_box_of_an_earlier_server_starts_with_its_own_settings() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path());
    let spec = SpecDraft {
        dirs: Some(vec!["/data".to_owned()]),
        ..SpecDraft::new("a")
    };
    let failed = fail(&w, spec).await;
    let next = after_crash(before.path(), after.path()).await;
    // A restart that the server does not survive leaves the box as starting.
    next.backend.next_start(InjectedFault::Hang);
    let (runtime, caller) = (next.runtime.clone(), next.caller.clone());
    let again = BoxCreateParams::new(SpecDraft::new("a"));
    tokio::spawn(async move { runtime.create(&caller, again).await });
    eventually("the box starts again", async || {
        next.get("a").await.unwrap().state == BoxState::Starting
    })
    .await;
    let third = tempfile::tempdir().unwrap();
    let last = after_crash(after.path(), third.path()).await;
    eventually("the box runs", async || {
        last.get("a").await.unwrap().state == BoxState::Running
    })
    .await;
    for starts in [next.backend.specs(), last.backend.specs()] {
        let dirs: Vec<_> = starts.iter().map(|spec| spec.dirs.clone()).collect();
        assert_eq!(dirs, [Some(vec!["/data".to_owned()])]);
    }
    // A box that replaces a dead one is another box.
    assert_ne!(last.get("a").await.unwrap().unique_id, failed.unique_id);
}

#[tokio::test]
async fn a_start_that_cannot_be_counted_is_not_repeated() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let w = with_state(before.path());
    hang(&w, SpecDraft::new("a")).await;
    let next = crashed(before.path(), after.path());
    let stopped = after.path().join("stopped");
    for record in std::fs::read_dir(&stopped).unwrap() {
        // A directory where the new record would be written.
        let path = record.unwrap().path().with_extension("new");
        std::fs::create_dir(path).unwrap();
    }
    next.runtime.adopt().await.unwrap();
    let info = next.get("a").await.unwrap();
    assert_eq!(info.state, BoxState::Failed);
    let reason = info.reason.unwrap();
    assert!(reason.contains("cannot be written"), "{reason}");
    assert!(next.backend.starts().is_empty());
}
