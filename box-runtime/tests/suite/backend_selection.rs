//! The first available backend makes the box. Without one, the call is `unavailable`.

use std::sync::Arc;

use box_protocol::error::Detail;
use box_protocol::{Code, Network, SpecDraft};
use box_runtime::fake::FakeBackend;
use box_runtime::{Availability, BoxRuntime, Caller, Capabilities, Facts, RuntimeConfig};

use super::fixture::{Fixture, code, exec_of, fixture, seconds, settle, spec};

#[tokio::test(start_paused = true)]
async fn without_a_backend_calls_fail_and_the_next_call_checks_again() {
    let w = fixture();
    w.backend.set_availability(Availability::Unavailable {
        reason: "the daemon does not answer".to_owned(),
        missing: vec!["userns".to_owned()],
    });
    let error = w.exec("s", "true").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert_eq!(
        error.message(),
        "no backend is available: fake: the daemon does not answer (missing: userns)"
    );
    assert!(w.backend.starts().is_empty() && w.ids().await.is_empty());
    let health = w.runtime.health().await;
    assert_eq!((health.name, health.available), (None, false));
    assert_eq!(health.missing, ["userns"]);
    w.backend.set_availability(Availability::full());
    w.exec("s", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_first_available_backend_is_used() {
    let (first, second) = (FakeBackend::named("first"), FakeBackend::named("second"));
    let backends: Vec<Arc<dyn box_runtime::Backend>> =
        vec![Arc::new(first.clone()), Arc::new(second.clone())];
    let w = Fixture {
        backend: second.clone(),
        runtime: BoxRuntime::start(RuntimeConfig::new(backends)),
        caller: Caller::Local,
    };
    first.set_availability(Availability::unavailable("off"));
    assert_eq!(w.exec("a", "true").await.unwrap().backend_name, "second");
    first.set_availability(Availability::full());
    tokio::time::sleep(seconds(2)).await;
    assert_eq!(w.runtime.health().await.name.as_deref(), Some("first"));
    assert_eq!(w.exec("b", "true").await.unwrap().backend_name, "first");
    // A box stays with the backend that made it.
    assert_eq!(w.exec("a", "true").await.unwrap().backend_name, "second");
}

#[tokio::test(start_paused = true)]
async fn availability_is_checked_at_most_once_a_second() {
    let w = fixture();
    for _ in 0..10 {
        w.runtime.health().await;
    }
    assert_eq!(w.backend.probes(), 1);
    tokio::time::sleep(seconds(1)).await;
    w.runtime.health().await;
    assert_eq!(w.backend.probes(), 2);
}

#[tokio::test(start_paused = true)]
async fn no_backend_at_all_is_lasting() {
    let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
    let error = runtime
        .exec(&Caller::Local, exec_of(spec("s", "true")))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.detail::<Detail>().unwrap().lasting);
}

#[tokio::test(start_paused = true)]
async fn a_missing_network_is_refused_unless_it_is_best_effort() {
    let w = fixture();
    w.backend.set_capabilities(Capabilities::default());
    let error = w
        .exec_spec(spec("s", "true").network(Network::On))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert_eq!(
        error.detail::<Detail>().unwrap().field.as_deref(),
        Some("network")
    );
    let mut relaxed = SpecDraft::new("s").network(Network::On);
    relaxed.best_effort = Some(vec!["network".to_owned()]);
    w.backend.set_facts(Facts {
        degraded: vec!["network".to_owned()],
        ..Facts::default()
    });
    assert_eq!(w.create(relaxed).await.unwrap().info.degraded, ["network"]);
    let (to, mut reported) = tokio::sync::mpsc::channel(8);
    let all = serde_json::from_value(serde_json::json!({})).unwrap();
    let events = w.runtime.events(&Caller::Local, all, Some(to)).await;
    assert_eq!(events.unwrap().lost, 0);
    let mut last = None;
    while let Some(event) = reported.recv().await {
        last = Some((event.kind, event.message));
    }
    let degraded = ("degraded".to_owned(), "without network".to_owned());
    assert_eq!(last, Some(degraded));
}

#[tokio::test(start_paused = true)]
async fn health_reports_missing_features() {
    let w = fixture();
    w.backend.set_availability(Availability::Available {
        degraded: vec!["disk_quota".to_owned()],
        missing: vec!["landlock".to_owned()],
    });
    let health = w.runtime.health().await;
    assert!(health.available);
    assert_eq!(
        (health.degraded, health.missing),
        (vec!["disk_quota".to_owned()], vec!["landlock".to_owned()])
    );
}

#[tokio::test(start_paused = true)]
async fn status_counts_boxes_and_free_capacity() {
    let w = fixture();
    let status = w.runtime.status(&w.caller).await.unwrap();
    assert_eq!(
        (status.active_boxes, status.backend.name.as_deref()),
        (0, Some("fake"))
    );
    assert_eq!((status.idle_ttl_sec, status.limits["max_boxes"]), (300, 64));
    w.exec("obs-1", "true").await.unwrap();
    let status = w.runtime.status(&w.caller).await.unwrap();
    assert_eq!((status.active_boxes, status.capacity.remaining), (1, 63));
    let stranger = w.runtime.status(&Caller::token("stranger")).await.unwrap();
    assert_eq!((stranger.active_boxes, stranger.capacity.used), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn callers_that_wait_for_a_probe_share_its_answer() {
    let w = fixture();
    w.backend
        .set_probe_trouble(Some(box_runtime::fake::InjectedFault::Slow(seconds(2))));
    w.backend.set_availability(Availability::unavailable("off"));
    let calls = (0..10).map(|at| {
        let w = &w;
        async move { w.exec(&format!("s{at}"), "true").await }
    });
    let results = futures::future::join_all(calls).await;
    assert!(
        results
            .into_iter()
            .all(|result| code(result) == Code::Unavailable)
    );
    assert!(w.backend.probes() <= 2, "{}", w.backend.probes());
    settle().await;
}
