//! Boxes that cannot start and stay, so that a caller that did not wait can read the reason.

use box_protocol::actions::{BoxCreateParams, BoxListParams, IfExists};
use box_protocol::error::{Detail, Ended};
use box_protocol::{BoxError, BoxInfo, BoxState, Code, Lifetime, SpecDraft};
use box_runtime::fake::Trouble;
use serde_json::json;
use tokio::time::sleep;

use crate::fixture::{Fixture, code, fixture, fixture_with, seconds};

const REASON: &str = "no such image";

/// Asks for a box whose start fails, and returns the box that stays.
async fn fail(w: &Fixture, spec: SpecDraft) -> BoxInfo {
    let id = spec.box_id.clone().unwrap();
    w.backend
        .next_start(Trouble::Fail(BoxError::not_found(REASON)));
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
        .next_start(Trouble::Fail(BoxError::not_found(REASON)));
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
