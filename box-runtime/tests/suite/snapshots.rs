//! Snapshots, forks, checkpoints and stopped boxes, through the runtime.

use std::sync::Arc;

use box_catalog::{Catalog, Limits, NewItem};
use box_protocol::actions::{
    BoxCheckpointParams, BoxForkParams, BoxRollbackParams, BoxSnapshotParams, BoxTransitionParams,
    CatalogDeleteParams, CatalogGetParams, CatalogListParams, CatalogPutParams, TargetState,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState, SnapshotContent};
use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxInfo, BoxState, Checkpoint, Code, Labels, Name, SpecDraft};
use box_runtime::LayerKind;
use box_runtime::fake::InjectedFault;
use serde_json::json;

use super::catalog::params;
use super::fixture::{Fixture, code, fixture_with, id, seconds, settle};

/// A runtime with a state directory.
fn with_state(directory: &tempfile::TempDir) -> Fixture {
    with_catalog(directory).0
}

fn with_catalog(directory: &tempfile::TempDir) -> (Fixture, Arc<Catalog>) {
    with_limits(directory, Limits::default())
}

fn with_limits(directory: &tempfile::TempDir, limits: Limits) -> (Fixture, Arc<Catalog>) {
    let catalog = Catalog::open(&directory.path().join("catalog"), limits).unwrap();
    let catalog = Arc::new(catalog);
    let w = fixture_with(|config| {
        config.catalog = Some(Arc::clone(&catalog));
        config.state_dir = Some(directory.path().to_owned());
    });
    (w, catalog)
}

async fn snapshot(w: &Fixture, box_id: &str, name: &str) -> Result<CatalogItem, BoxError> {
    let params: BoxSnapshotParams = params(json!({"box_id": box_id, "name": name}));
    w.runtime.snapshot(&w.caller, params).await
}

async fn fork(w: &Fixture, box_id: &str, count: u32) -> Result<Vec<BoxInfo>, BoxError> {
    let params: BoxForkParams = params(json!({"box_id": box_id, "count": count, "prefix": "f"}));
    Ok(w.runtime.fork(&w.caller, params).await?.items)
}

async fn checkpoint(w: &Fixture, box_id: &str) -> Result<Checkpoint, BoxError> {
    let params: BoxCheckpointParams = params(json!({"box_id": box_id}));
    w.runtime.checkpoint(&w.caller, params).await
}

async fn rollback(w: &Fixture, box_id: &str) -> Result<BoxInfo, BoxError> {
    let params: BoxRollbackParams = params(json!({"box_id": box_id}));
    w.runtime.rollback(&w.caller, params).await
}

async fn move_to(w: &Fixture, box_id: &str, to: TargetState) -> Result<BoxInfo, BoxError> {
    let params = BoxTransitionParams {
        box_id: id(box_id),
        to,
    };
    Ok(w.runtime.transition(&w.caller, params).await?.info)
}

fn content(item: &CatalogItem) -> &SnapshotContent {
    let ItemContent::Snapshot(content) = &item.content else {
        panic!("{item:?}");
    };
    content
}

/// A snapshot of the caller with this size.
fn sized(w: &Fixture, size_bytes: u64) -> NewItem {
    NewItem {
        owner: w.caller.name().to_string(),
        name: Name::new("used").unwrap(),
        tags: Vec::new(),
        labels: Labels::default(),
        state: ItemState::Ready,
        size_bytes: Some(size_bytes),
        content: ItemContent::Snapshot(SnapshotContent::default()),
    }
}

/// The names in a directory of the state directory.
fn names(directory: &tempfile::TempDir, of: &str) -> Vec<String> {
    let entries = std::fs::read_dir(directory.path().join(of));
    let entries = entries.into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.collect()
}

/// Waits until a directory of the state directory has this many entries.
async fn has(directory: &tempfile::TempDir, of: &str, count: usize) {
    let waiting = async {
        while names(directory, of).len() != count {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let limit = std::time::Duration::from_mins(1);
    let found = tokio::time::timeout(limit, waiting).await;
    assert!(found.is_ok(), "{of}: {:?}", names(directory, of));
}

#[tokio::test]
async fn a_box_begins_on_the_layers_of_its_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    let item = snapshot(&w, "a", "s").await.unwrap();
    let layers = &content(&item).layers;
    assert_eq!((layers.len(), item.size_bytes), (1, Some(4096)));
    assert_eq!(content(&item).source_box, Some(id("a")));
    let from = |box_id: &str| SpecDraft::new(box_id).snapshot("s".parse().unwrap());
    w.create(from("b")).await.unwrap();
    let used = w.backend.layers_used();
    assert_eq!((used[0].0.len(), used[1].0.len()), (0, 1));
    assert_eq!(used[1].0[0].kind, LayerKind::Directory);
    // A snapshot of that box has both layers.
    let second = snapshot(&w, "b", "t").await.unwrap();
    assert_eq!(content(&second).layers[1..], layers[..]);
    let delete =
        |item: &str| -> CatalogDeleteParams { params(json!({"kind": "snapshot", "item": item})) };
    let refused = w.runtime.delete_item(&w.caller, delete("s")).await;
    assert_eq!(code(refused), Code::Conflict);
    w.delete("b").await.unwrap();
    w.runtime.delete_item(&w.caller, delete("s")).await.unwrap();
    // The second snapshot still names the layer of the first.
    assert_eq!(names(&directory, "layers").len(), 2);
    w.runtime.delete_item(&w.caller, delete("t")).await.unwrap();
    has(&directory, "layers", 0).await;
    assert_eq!(code(w.create(from("c")).await), Code::NotFound);
    let both = from("c").image("debian");
    let error = w.create(both).await.unwrap_err();
    assert_eq!(
        error.message(),
        "image: a snapshot has its own image; omit it"
    );
    // Snapshots belong to their caller.
    snapshot(&w, "a", "s").await.unwrap();
    let other = w.with_token("other");
    assert_eq!(code(other.create(from("d")).await), Code::NotFound);
    assert_eq!(code(snapshot(&other, "a", "mine").await), Code::NotFound);
}

#[tokio::test]
async fn a_failed_snapshot_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    for _ in 0..2 {
        let full = BoxError::capacity("the disk is full");
        w.backend.next_layer(InjectedFault::Fail(full));
        assert_eq!(code(snapshot(&w, "a", "s").await), Code::Capacity);
    }
    w.backend
        .next_layer(InjectedFault::Fail(BoxError::capacity("full")));
    assert_eq!(code(fork(&w, "a", 2).await), Code::Capacity);
    has(&directory, "layers", 0).await;
    let listed = CatalogListParams::of(CatalogKind::Snapshot);
    let listed = w.runtime.list_items(&w.caller, listed).await.unwrap();
    assert_eq!((listed.total, w.list().await.len()), (0, 1));
    snapshot(&w, "a", "s").await.unwrap();
}

#[tokio::test]
async fn a_snapshot_beyond_the_size_of_its_owner_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits {
        max_snapshots_mb_per_owner: Some(1),
        ..Limits::default()
    };
    let (w, catalog) = with_limits(&directory, limits);
    w.create(SpecDraft::new("a")).await.unwrap();
    // A layer of the scripted backend has 4096 bytes.
    let used = catalog.insert(sized(&w, (1 << 20) - 4095)).unwrap();
    let error = snapshot(&w, "a", "s").await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.limit.as_deref(), Some("max_snapshots_mb_per_owner"));
    has(&directory, "layers", 0).await;
    let listed = CatalogListParams::of(CatalogKind::Snapshot);
    let listed = w.runtime.list_items(&w.caller, listed).await.unwrap();
    assert_eq!(listed.total, 1);
    // Also of a stopped box, of which nothing is copied.
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    assert_eq!(code(snapshot(&w, "a", "s").await), Code::Capacity);
    catalog.remove(CatalogKind::Snapshot, &used.id).unwrap();
    snapshot(&w, "a", "s").await.unwrap();
}

#[tokio::test]
async fn a_checkpoint_counts_towards_the_size_of_all_snapshots() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits {
        max_snapshots_mb_per_owner: Some(1),
        ..Limits::default()
    };
    let (w, catalog) = with_limits(&directory, limits);
    // One layer of the scripted backend fits, and a part of another one.
    catalog.insert(sized(&w, (1 << 20) - 5000)).unwrap();
    w.create(SpecDraft::new("a")).await.unwrap();
    let kept = checkpoint(&w, "a").await.unwrap();
    for _ in 0..2 {
        let error = checkpoint(&w, "a").await.unwrap_err();
        assert_eq!(error.code(), Code::Capacity);
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.limit.as_deref(), Some("max_snapshots_mb_per_owner"));
    }
    assert_eq!(w.get("a").await.unwrap().checkpoints, [kept]);
    assert_eq!(code(snapshot(&w, "a", "s").await), Code::Capacity);
    has(&directory, "layers", 1).await;
    // Of a stopped box, nothing is copied.
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    assert_eq!(code(checkpoint(&w, "a").await), Code::Capacity);
    assert_eq!(code(snapshot(&w, "a", "s").await), Code::Capacity);
    // Another owner has a limit of its own, and checkpoints end with their box.
    let other = w.with_token("other");
    other.create(SpecDraft::new("a")).await.unwrap();
    checkpoint(&other, "a").await.unwrap();
    w.delete("a").await.unwrap();
    w.create(SpecDraft::new("b")).await.unwrap();
    checkpoint(&w, "b").await.unwrap();
}

#[tokio::test]
async fn too_many_checkpoints_are_refused_with_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    for _ in 0..64 {
        checkpoint(&w, "a").await.unwrap();
    }
    let error = checkpoint(&w, "a").await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert_eq!(
        error.message(),
        "checkpoints: the box has 64, which is the maximum; fork the box, because a fork begins with none, or delete it"
    );
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.limit.as_deref(), detail.max),
        (Some("checkpoints"), Some(64))
    );
}

#[tokio::test]
async fn a_fork_makes_all_boxes_or_none() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a").memory_mb(64)).await.unwrap();
    let made = fork(&w, "a", 3).await.unwrap();
    let ids: Vec<_> = made.iter().map(|info| info.box_id.as_str()).collect();
    assert_eq!(ids, ["f-1", "f-2", "f-3"]);
    assert!(made.iter().all(|info| info.memory_mb == 64));
    assert_eq!(names(&directory, "layers").len(), 1, "one copy for all");
    for id in ids {
        w.delete(id).await.unwrap();
    }
    has(&directory, "layers", 0).await;
    w.backend
        .next_start(InjectedFault::Fail(BoxError::capacity("full")));
    assert_eq!(code(fork(&w, "a", 3).await), Code::Capacity);
    assert_eq!(w.list().await.len(), 1);
    has(&directory, "layers", 0).await;
    assert_eq!(code(fork(&w, "a", 101).await), Code::Validation);
}

#[tokio::test]
async fn a_stopped_box_is_layers_and_a_record() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    let created = w.get("a").await.unwrap().created_at;
    assert_eq!(
        move_to(&w, "a", TargetState::Stopped).await.unwrap().state,
        BoxState::Stopped
    );
    assert_eq!(
        (w.backend.running(), names(&directory, "stopped").len()),
        (0, 1)
    );
    assert_eq!(code(w.exec("a", "true").await), Code::Conflict);
    assert_eq!(w.commands("a").await.unwrap().len(), 0);
    // Nothing is copied.
    let item = snapshot(&w, "a", "s").await.unwrap();
    fork(&w, "a", 2).await.unwrap();
    assert_eq!(
        (
            content(&item).layers.len(),
            names(&directory, "layers").len()
        ),
        (1, 1)
    );
    w.backend
        .next_start(InjectedFault::Fail(BoxError::capacity("full")));
    let refused = move_to(&w, "a", TargetState::Running).await;
    assert_eq!(code(refused), Code::Capacity);
    assert_eq!(w.get("a").await.unwrap().state, BoxState::Stopped);
    move_to(&w, "a", TargetState::Running).await.unwrap();
    assert_eq!(names(&directory, "stopped"), [""; 0]);
    assert_eq!(w.get("a").await.unwrap().created_at, created);
    w.exec("a", "true").await.unwrap();
    assert_eq!(w.backend.layers_used().last().unwrap().0.len(), 1);
    w.delete("a").await.unwrap();
}

#[tokio::test]
async fn a_disk_is_used_again_unless_something_else_uses_it() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.backend.set_stopped_kind(LayerKind::Disk);
    w.create(SpecDraft::new("a")).await.unwrap();
    for _ in 0..2 {
        move_to(&w, "a", TargetState::Stopped).await.unwrap();
        move_to(&w, "a", TargetState::Running).await.unwrap();
        let (layers, disk) = w.backend.layers_used().pop().unwrap();
        assert!(layers.is_empty() && disk.is_some());
    }
    assert_eq!(names(&directory, "layers").len(), 1);
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    snapshot(&w, "a", "s").await.unwrap();
    move_to(&w, "a", TargetState::Running).await.unwrap();
    let (layers, disk) = w.backend.layers_used().pop().unwrap();
    assert_eq!((layers.len(), disk), (1, None));
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_during_a_start_has_the_disk_of_the_stopped_box() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.backend.set_stopped_kind(LayerKind::Disk);
    w.create(SpecDraft::new("a")).await.unwrap();
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    // The runtime asks the backend again before the start.
    tokio::time::sleep(seconds(2)).await;
    w.backend
        .set_probe_trouble(Some(InjectedFault::Slow(seconds(1))));
    let (runtime, caller) = (w.runtime.clone(), w.caller.clone());
    let to_start = BoxTransitionParams {
        box_id: id("a"),
        to: TargetState::Running,
    };
    let starting = tokio::spawn(async move { runtime.transition(&caller, to_start).await });
    settle().await;
    assert_eq!(w.get("a").await.unwrap().state, BoxState::Starting);
    let item = snapshot(&w, "a", "s").await.unwrap();
    let checkpoint = checkpoint(&w, "a").await.unwrap();
    starting.await.unwrap().unwrap();
    assert_eq!((content(&item).layers.len(), checkpoint.entries), (1, 1));
    let (layers, disk) = w.backend.layers_used().pop().unwrap();
    assert!(layers.is_empty() && disk.is_some());
    // A start that fails leaves the box as it was.
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    w.backend
        .set_probe_trouble(Some(InjectedFault::Fail(BoxError::unavailable("no"))));
    tokio::time::sleep(seconds(2)).await;
    let refused = move_to(&w, "a", TargetState::Running).await;
    assert_eq!(code(refused), Code::Unavailable);
    assert_eq!(w.get("a").await.unwrap().state, BoxState::Stopped);
    assert_eq!(
        content(&snapshot(&w, "a", "t").await.unwrap()).layers.len(),
        1
    );
}

/// The layers stay few, however often a box is stopped, kept as a snapshot and started from it.
#[tokio::test]
async fn generations_of_stopped_boxes_have_few_layers() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("box-0")).await.unwrap();
    for generation in 1..40 {
        let before = format!("box-{}", generation - 1);
        move_to(&w, &before, TargetState::Stopped).await.unwrap();
        let name = format!("s-{generation}");
        let item = snapshot(&w, &before, &name).await.unwrap();
        assert!(content(&item).layers.len() <= 16, "{item:?}");
        let spec = SpecDraft::new(format!("box-{generation}"));
        w.create(spec.snapshot(name.parse().unwrap()))
            .await
            .unwrap();
    }
    let used = w.backend.layers_used();
    assert!(used.iter().all(|(layers, _)| layers.len() <= 24));
    // A fork of a stopped box begins with few layers, too.
    let made = fork(&w, "box-15", 1).await.unwrap();
    assert_eq!(made[0].state, BoxState::Running);
    let (layers, _) = w.backend.layers_used().pop().unwrap();
    assert!(layers.len() <= 16, "{layers:?}");
}

/// Earlier versions made snapshots that no backend can start.
#[tokio::test]
async fn a_box_begins_on_a_snapshot_with_too_many_layers() {
    let directory = tempfile::tempdir().unwrap();
    let (w, catalog) = with_catalog(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    let item = snapshot(&w, "a", "s").await.unwrap();
    let many = catalog.update(CatalogKind::Snapshot, &item.id, |item| {
        if let ItemContent::Snapshot(content) = &mut item.content {
            content.layers = vec![content.layers[0].clone(); 40];
        }
        Ok(())
    });
    many.unwrap();
    w.create(SpecDraft::new("b").snapshot("s".parse().unwrap()))
        .await
        .unwrap();
    let merged: Vec<_> = w.backend.merged().iter().map(|(of, _)| of.len()).collect();
    assert_eq!(merged, [32, 9]);
    assert_eq!(w.backend.layers_used()[1].0.len(), 1);
    move_to(&w, "b", TargetState::Stopped).await.unwrap();
    move_to(&w, "b", TargetState::Running).await.unwrap();
    assert_eq!(w.backend.layers_used()[2].0.len(), 2);
}

#[tokio::test]
async fn own_layers_are_merged() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    for _ in 0..8 {
        move_to(&w, "a", TargetState::Stopped).await.unwrap();
        move_to(&w, "a", TargetState::Running).await.unwrap();
    }
    let merged = w.backend.merged();
    assert_eq!((merged.len(), merged[0].0.len()), (1, 8));
    assert_eq!(w.backend.layers_used().pop().unwrap().0.len(), 1);
    has(&directory, "layers", 1).await;
}

#[tokio::test]
async fn a_box_returns_to_its_newest_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    assert_eq!(code(rollback(&w, "a").await), Code::NotFound);
    let first = checkpoint(&w, "a").await.unwrap();
    let second = checkpoint(&w, "a").await.unwrap();
    assert_eq!(
        (first.name.as_str(), second.name.as_str()),
        ("checkpoint-1", "checkpoint-2")
    );
    assert_eq!(w.get("a").await.unwrap().checkpoints, [first, second]);
    assert_eq!(rollback(&w, "a").await.unwrap().state, BoxState::Running);
    assert_eq!(w.backend.layers_used().pop().unwrap().0.len(), 1);
    assert_eq!(names(&directory, "stopped"), [""; 0]);
    // A box that has failed returns, too.
    w.backend.cut_agent("a");
    while w.get("a").await.unwrap().state != BoxState::Failed {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(rollback(&w, "a").await.unwrap().state, BoxState::Running);
    w.exec("a", "true").await.unwrap();
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    assert_eq!(rollback(&w, "a").await.unwrap().state, BoxState::Stopped);
    w.delete("a").await.unwrap();
    has(&directory, "layers", 0).await;
    assert_eq!(names(&directory, "stopped"), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_during_a_stop_waits_for_the_end_of_the_processes() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    w.backend
        .set_clear_trouble(Some(InjectedFault::Slow(seconds(1))));
    let (runtime, caller) = (w.runtime.clone(), w.caller.clone());
    let to_stop = BoxTransitionParams {
        box_id: id("a"),
        to: TargetState::Stopped,
    };
    let stopping = tokio::spawn(async move { runtime.transition(&caller, to_stop).await });
    settle().await;
    let item = snapshot(&w, "a", "s").await.unwrap();
    stopping.await.unwrap().unwrap();
    // It is the layer of the stopped box, not a copy.
    assert_eq!(
        names(&directory, "layers"),
        [content(&item).layers[0].as_str()]
    );
}

#[tokio::test]
async fn a_box_keeps_its_host_name_when_it_starts_again() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    let spec: SpecDraft = params(json!({"box_id": "a", "name": "web"}));
    w.create(spec).await.unwrap();
    move_to(&w, "a", TargetState::Stopped).await.unwrap();
    move_to(&w, "a", TargetState::Running).await.unwrap();
    let specs = w.backend.specs();
    let names: Vec<_> = specs.iter().map(|spec| spec.name.as_ref()).collect();
    assert_eq!(names, [Some(&"web".parse().unwrap()); 2]);
}

#[tokio::test]
async fn a_failed_snapshot_leaves_the_tag_of_the_good_one() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    let tagged = |name: &str| -> BoxSnapshotParams {
        params(json!({"box_id": "a", "name": name, "tags": ["latest"]}))
    };
    let good = w.runtime.snapshot(&w.caller, tagged("good")).await.unwrap();
    w.backend
        .next_layer(InjectedFault::Fail(BoxError::capacity("full")));
    let failed = w.runtime.snapshot(&w.caller, tagged("bad")).await;
    assert_eq!(code(failed), Code::Capacity);
    let find = || -> CatalogGetParams { params(json!({"kind": "snapshot", "item": "latest"})) };
    let found = w.runtime.item(&w.caller, find()).await.unwrap();
    assert_eq!(found.id, good.id);
    // A build of an image that fails stays, without the tag.
    let build = |name: &str| -> CatalogPutParams {
        let image = "127.0.0.1:9/none:1";
        params(json!({"name": name, "tags": ["latest"], "content": {"snapshot": {"image": image}}}))
    };
    w.runtime
        .put_item(&w.caller, build("image"))
        .await
        .unwrap_err();
    let found = w.runtime.item(&w.caller, find()).await.unwrap();
    assert_eq!(found.id, good.id);
    let spec = SpecDraft::new("b").snapshot("image".parse().unwrap());
    let error = w.create(spec).await.unwrap_err();
    assert!(error.message().contains("image was not made"), "{error:?}");
    let next = w.runtime.snapshot(&w.caller, tagged("next")).await.unwrap();
    let found = w.runtime.item(&w.caller, find()).await.unwrap();
    assert_eq!(found.id, next.id);
}

#[tokio::test]
async fn a_failed_snapshot_stays_if_asked_for_until_the_next_with_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    w.backend
        .next_layer(InjectedFault::Fail(BoxError::capacity("full")));
    let kept = json!({"box_id": "a", "name": "kept", "tags": ["latest"], "keep_failed": true});
    let refused = w.runtime.snapshot(&w.caller, params(kept)).await;
    assert_eq!(code(refused), Code::Capacity);
    let all = CatalogListParams::of(CatalogKind::Snapshot);
    let listed = w.runtime.list_items(&w.caller, all.clone()).await.unwrap();
    let [failed] = &*listed.items else {
        panic!("{:?}", listed.items);
    };
    assert_eq!(failed.state, ItemState::Failed);
    assert_eq!(failed.reason.as_deref(), Some("full"));
    assert!(content(failed).layers.is_empty());
    let again = snapshot(&w, "a", "kept").await.unwrap();
    let listed = w.runtime.list_items(&w.caller, all).await.unwrap();
    assert_eq!(listed.items, [again]);
}

#[tokio::test]
async fn a_checkpoint_has_no_name_that_a_diff_understands_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_state(&directory);
    w.create(SpecDraft::new("a")).await.unwrap();
    for name in ["image", "workspace"] {
        let params: BoxCheckpointParams = params(json!({"box_id": "a", "name": name}));
        let refused = w.runtime.checkpoint(&w.caller, params).await;
        assert_eq!(code(refused), Code::Validation);
    }
}
