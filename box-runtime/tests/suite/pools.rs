//! Pools: boxes that start and are prepared before a caller asks for them.

use std::sync::Arc;

use box_catalog::{Catalog, Limits};
use box_protocol::actions::{CatalogDeleteParams, CatalogGetParams};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState};
use box_protocol::{BoxError, Code, Name, SpecDraft};
use box_runtime::fake::Reply;
use box_runtime::{Caller, RuntimeConfig};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::catalog::{params, put, update, with_catalog};
use super::fixture::{Fixture, code, fixture_with, seconds, settle};

fn with_pools(
    directory: &tempfile::TempDir,
    configure: impl FnOnce(&mut RuntimeConfig),
) -> Fixture {
    let catalog = Catalog::open(directory.path(), Limits::default()).unwrap();
    fixture_with(|config| {
        config.catalog = Some(Arc::new(catalog));
        configure(config);
    })
}

/// A template `t` with this spec, and a pool `p` of it.
async fn pool(w: &Fixture, spec: Value, size: u32) {
    let template = json!({"template": {"spec": spec}});
    put(w, json!({"name": "t", "content": template}))
        .await
        .unwrap();
    let pool = json!({"pool": {"template": "t", "size": size}});
    put(w, json!({"name": "p", "content": pool})).await.unwrap();
}

async fn get(w: &Fixture) -> CatalogItem {
    let params: CatalogGetParams = params(json!({"kind": "pool", "item": "p"}));
    w.runtime.item(&w.caller, params).await.unwrap()
}

async fn ready(w: &Fixture) -> u64 {
    match get(w).await.content {
        ItemContent::Pool(pool) => pool.ready,
        other => panic!("{other:?}"),
    }
}

/// Waits until this many boxes are ready.
async fn filled(w: &Fixture, size: u64) {
    while ready(w).await != size {
        settle().await;
    }
}

async fn delete(w: &Fixture, kind: &str, item: &str) -> Result<(), BoxError> {
    let params: CatalogDeleteParams = params(json!({"kind": kind, "item": item}));
    w.runtime.delete_item(&w.caller, params).await.map(drop)
}

fn of(id: &str, mut spec: Value) -> SpecDraft {
    spec["box_id"] = json!(id);
    serde_json::from_value(spec).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_request_takes_a_prepared_box_and_the_pool_is_refilled() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let prepare = json!({"commands": [{"text": "install"}]});
    pool(&w, json!({"memory_mb": 64, "prepare": prepare}), 2).await;
    filled(&w, 2).await;
    assert!(
        w.list().await.is_empty(),
        "waiting boxes belong to no caller"
    );
    let waiting = w.backend.starts();
    let made = w
        .create(of(
            "s",
            json!({"template": "t", "name": "work", "labels": {"a": "b"}}),
        ))
        .await
        .unwrap();
    assert!(!made.existed);
    assert_eq!(made.info.pool, Some(Name::new("p").unwrap()));
    assert_eq!(made.info.pool_missed, None);
    assert_eq!(
        (made.info.memory_mb, made.info.labels["a"].as_str()),
        (64, "b")
    );
    // The same box: the command runs in the one that was started first.
    w.exec_spec(of("s", json!({"template": "t", "cmd": "ls"})))
        .await
        .unwrap();
    let (in_box, _) = w
        .backend
        .execs()
        .into_iter()
        .find(|(_, text)| text == "ls")
        .unwrap();
    assert_eq!(in_box, waiting[0]);
    filled(&w, 2).await;
    assert_eq!(w.backend.starts().len(), 3);
    let installs = w
        .backend
        .execs()
        .into_iter()
        .filter(|(_, text)| text == "install");
    assert_eq!(installs.count(), 3, "once in each box");
    let by_pool = w.create(of("q", json!({"pool": "p"}))).await.unwrap();
    assert_eq!(by_pool.info.pool, Some(Name::new("p").unwrap()));
    filled(&w, 2).await;
    w.delete("s").await.unwrap();
    w.delete("q").await.unwrap();
    assert_eq!(w.backend.running(), 2);
    delete(&w, "pool", "p").await.unwrap();
    assert_eq!(w.backend.running(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_fits_no_waiting_box_gets_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    pool(&w, json!({"memory_mb": 64}), 1).await;
    filled(&w, 1).await;
    let content = json!({"volume": {}});
    put(&w, json!({"name": "v", "content": content}))
        .await
        .unwrap();
    for (more, reason) in [
        (
            json!({"memory_mb": 128}),
            "pool p: the request has another memory_mb than its boxes",
        ),
        (
            json!({"defaults": {"env": {"A": "1"}}}),
            "pool p: the request has another defaults than its boxes",
        ),
        (
            json!({"volumes": [{"volume": "v", "mount_path": "/v"}]}),
            "pool p: a box with volumes is always new",
        ),
    ] {
        let mut spec = json!({"template": "t"});
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let made = w.create(of("s", spec)).await.unwrap();
        assert_eq!(made.info.pool_missed.as_deref(), Some(reason));
        assert_eq!(made.info.pool, None);
        w.delete("s").await.unwrap();
    }
    let unpooled = w.create(of("s", json!({"memory_mb": 64}))).await.unwrap();
    assert_eq!(
        (unpooled.info.pool, unpooled.info.pool_missed),
        (None, None)
    );
    w.create(of("a", json!({"template": "t"}))).await.unwrap();
    w.backend.on_command("x", Reply::default());
    let missing = w.create(of("b", json!({"pool": "other"}))).await;
    assert_eq!(code(missing), Code::NotFound);
    let (alice, spec) = (w.with_token("alice"), of("b", json!({"pool": "p"})));
    assert_eq!(code(alice.create(spec).await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn old_and_dead_boxes_and_those_of_an_old_template_are_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    pool(&w, json!({"memory_mb": 64}), 2).await;
    filled(&w, 2).await;
    sleep(seconds(3700)).await;
    filled(&w, 2).await;
    assert_eq!((w.backend.starts().len(), w.backend.running()), (4, 2));
    let dead = w.backend.starts().pop().unwrap();
    w.backend.cut_agent(&dead);
    sleep(seconds(20)).await;
    filled(&w, 2).await;
    assert_eq!(w.backend.starts().len(), 5);
    let change = json!({"kind": "template", "item": "t",
        "content": {"template": {"spec": {"memory_mb": 128}}}});
    update(&w, change).await.unwrap();
    while w.backend.starts().len() < 7 {
        settle().await;
    }
    filled(&w, 2).await;
    let made = w.create(of("s", json!({"template": "t"}))).await.unwrap();
    assert_eq!((made.info.memory_mb, made.info.pool.is_some()), (128, true));
    let smaller = json!({"kind": "pool", "item": "p", "name": "small",
        "content": {"pool": {"size": 1}}});
    update(&w, smaller).await.unwrap();
    while w.backend.running() != 2 {
        settle().await;
    }
    let refused = delete(&w, "template", "t").await.unwrap_err();
    assert_eq!(
        refused.message(),
        "template t: used by 1 pool; delete it first"
    );
    delete(&w, "pool", "small").await.unwrap();
    delete(&w, "template", "t").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_cannot_be_filled_reports_the_reason_and_retries() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    w.backend
        .on_command("install", Reply::stdout("no network").exit(1));
    let prepare = json!({"commands": [{"text": "install"}]});
    pool(&w, json!({"prepare": prepare}), 1).await;
    sleep(seconds(30)).await;
    let failed = get(&w).await;
    assert_eq!(failed.state, ItemState::Failed);
    let reason = "prepare: command 1 of 1 exited with code 1: no network";
    assert_eq!(failed.reason.as_deref(), Some(reason));
    assert!(w.backend.starts().len() < 8, "with growing pauses");
    assert_eq!(w.backend.running(), 0);
    w.backend.on_command("install", Reply::default());
    sleep(seconds(120)).await;
    filled(&w, 1).await;
    assert_eq!(get(&w).await.state, ItemState::Ready);
}

#[tokio::test(start_paused = true)]
async fn waiting_boxes_give_way_to_boxes_of_callers() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_pools(&directory, |config| config.max_boxes = 3);
    pool(&w, json!({}), 5).await;
    filled(&w, 3).await;
    sleep(seconds(60)).await;
    assert_eq!(w.backend.running(), 3);
    for id in ["a", "b", "c"] {
        w.create(SpecDraft::new(id)).await.unwrap();
    }
    filled(&w, 0).await;
    assert_eq!(w.backend.running(), 3);
    assert_eq!(code(w.create(SpecDraft::new("d")).await), Code::Capacity);
    w.delete("a").await.unwrap();
    filled(&w, 1).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_boxes_count_towards_the_limit_of_their_owner() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_pools(&directory, |config| config.max_boxes_per_caller = Some(2));
    let alice = w.with_token("alice");
    pool(&alice, json!({}), 5).await;
    filled(&alice, 2).await;
    sleep(seconds(60)).await;
    assert_eq!((ready(&alice).await, w.backend.running()), (2, 2));
    let made = alice.create(of("s", json!({"pool": "p"}))).await.unwrap();
    assert!(made.info.pool.is_some());
    sleep(seconds(60)).await;
    assert_eq!((ready(&alice).await, w.backend.running()), (1, 2));
    alice.create(SpecDraft::new("t")).await.unwrap();
    filled(&alice, 0).await;
    assert_eq!(w.backend.running(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_pool_waits_for_the_policy_layer_and_ends_with_its_runtime() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_pools(&directory, |config| config.decided_pools = true);
    pool(&w, json!({"memory_mb": 4096}), 1).await;
    sleep(seconds(60)).await;
    assert_eq!((ready(&w).await, w.backend.starts().len()), (0, 0));
    let made = w.create(of("s", json!({"template": "t"}))).await.unwrap();
    let missed = made.info.pool_missed.as_deref();
    assert_eq!(missed, Some("pool p: its spec is not decided yet"));
    w.delete("s").await.unwrap();
    let decided = json!({"kind": "pool", "item": "p",
        "content": {"pool": {"spec": {"memory_mb": 64}}}});
    update(&w, decided.clone()).await.unwrap();
    filled(&w, 1).await;
    assert_eq!(w.backend.specs().pop().unwrap().memory_mb, 64);
    let refused = json!({"kind": "pool", "item": "p",
        "content": {"pool": {"refused": "the policy forbids it"}}});
    update(&w, refused).await.unwrap();
    while w.backend.running() > 0 {
        settle().await;
    }
    let failed = get(&w).await;
    assert_eq!(failed.reason.as_deref(), Some("the policy forbids it"));
    let made = w.create(of("s", json!({"template": "t"}))).await.unwrap();
    let missed = made.info.pool_missed.as_deref();
    assert_eq!(
        missed,
        Some("pool p: it has no boxes: the policy forbids it")
    );
    w.delete("s").await.unwrap();
    update(&w, decided).await.unwrap();
    filled(&w, 1).await;
    let backend = w.backend.clone();
    drop(w);
    while backend.running() > 0 {
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_an_earlier_process_is_filled_again_and_a_shutdown_empties_it() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    pool(&w, json!({}), 1).await;
    filled(&w, 1).await;
    let all = serde_json::from_value(json!({"within_ms": 5000})).unwrap();
    w.runtime.shutdown(&Caller::Local, all).await.unwrap();
    assert_eq!(w.backend.stops().len(), 1);
    filled(&w, 1).await;
    drop(w);
    let w = loop {
        match Catalog::open(directory.path(), Limits::default()) {
            Ok(catalog) => {
                break fixture_with(|config| config.catalog = Some(Arc::new(catalog)));
            }
            Err(error) => assert_eq!(error, box_catalog::Error::Locked),
        }
        settle().await;
    };
    assert!(w.backend.starts().is_empty());
    w.runtime.adopt().await.unwrap();
    filled(&w, 1).await;
    assert_eq!(get(&w).await.kind(), CatalogKind::Pool);
    let mounts = json!({"template": {"spec": {"volumes": [{"volume": "v", "mount_path": "/v"}]}}});
    put(&w, json!({"name": "m", "content": mounts}))
        .await
        .unwrap();
    let refused = json!({"name": "r", "content": {"pool": {"template": "m", "size": 1}}});
    let refused = put(&w, refused).await.unwrap_err();
    assert_eq!(
        refused.message(),
        "template: its boxes mount volumes, so they cannot wait in a pool"
    );
}
