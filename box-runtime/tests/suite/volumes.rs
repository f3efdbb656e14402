//! Volumes: their data, the boxes that mount them, and their uses.

use box_protocol::actions::{CatalogDeleteParams, CatalogGetParams};
use box_protocol::catalog::{CatalogItem, ItemContent, ItemState};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, ItemId, SpecDraft};
use serde_json::{Value, json};

use super::catalog::{params, put, update, with_catalog};
use super::fixture::{Fixture, code, settle};

async fn volume(w: &Fixture, name: &str) -> CatalogItem {
    let content = json!({"volume": {"size_mb": 64}});
    let made = put(w, json!({"name": name, "content": content})).await;
    made.unwrap()
}

async fn get(w: &Fixture, item: &str) -> Result<CatalogItem, BoxError> {
    let params: CatalogGetParams = params(json!({"kind": "volume", "item": item}));
    w.runtime.item(&w.caller, params).await
}

async fn delete(w: &Fixture, item: &str) -> Result<(), BoxError> {
    let params: CatalogDeleteParams = params(json!({"kind": "volume", "item": item}));
    w.runtime.delete_item(&w.caller, params).await.map(drop)
}

fn with_volumes(id: &str, volumes: Value) -> SpecDraft {
    SpecDraft::new(id).volumes(serde_json::from_value(volumes).unwrap())
}

fn writer(id: &str) -> SpecDraft {
    with_volumes(id, json!([{"volume": "data", "mount_path": "/data"}]))
}

fn reader(id: &str) -> SpecDraft {
    with_volumes(
        id,
        json!([{"volume": "data", "mount_path": "/data", "ro": true}]),
    )
}

#[tokio::test]
async fn a_volume_is_made_resized_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let made = volume(&w, "data").await;
    assert_eq!(made.state, ItemState::Ready);
    let ItemContent::Volume(content) = &made.content else {
        panic!("{made:?}");
    };
    assert!(content.enforced && !content.shared);
    assert_eq!(w.backend.volumes_made(), [(made.id.clone(), 64 << 20)]);
    assert_eq!(get(&w, "data").await.unwrap().size_bytes, Some(4096));
    let resize = |size: u64| {
        json!({"kind": "volume", "item": "data", "name": "big",
            "content": {"volume": {"size_mb": size, "shared": true}}})
    };
    w.backend
        .set_volume_error(Some(BoxError::capacity("the disk is full")));
    assert_eq!(code(update(&w, resize(128)).await), Code::Capacity);
    assert_eq!(get(&w, "data").await.unwrap().content, made.content);
    w.backend.set_volume_error(None);
    let resized = update(&w, resize(128)).await.unwrap();
    let ItemContent::Volume(content) = &resized.content else {
        panic!("{resized:?}");
    };
    assert_eq!((content.size_mb, content.shared), (128, true));
    assert_eq!(w.backend.volumes_made(), [(made.id, 128 << 20)]);
    delete(&w, "big").await.unwrap();
    assert!(w.backend.volumes_made().is_empty());
    assert_eq!(code(get(&w, "big").await), Code::NotFound);
}

#[tokio::test]
async fn a_volume_that_cannot_be_made_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    w.backend
        .set_volume_error(Some(BoxError::unavailable("no loop device")));
    let content = json!({"volume": {}});
    let failed = put(&w, json!({"name": "data", "content": content})).await;
    assert_eq!(failed.unwrap_err().message(), "no loop device");
    assert!(w.backend.volumes_made().is_empty());
    assert_eq!(code(get(&w, "data").await), Code::NotFound);
    w.backend.set_volume_error(None);
    volume(&w, "data").await;
}

#[tokio::test]
async fn one_box_writes_and_others_read_unless_the_volume_is_shared() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let data = volume(&w, "data").await;
    let made = w.create(writer("a")).await.unwrap();
    assert_eq!(made.info.volumes[0].mount_path, "/data");
    w.create(reader("b")).await.unwrap();
    let refused = w.create(writer("c")).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            Code::Conflict,
            "volumes: data is mounted read-write by box a; mount it with ro, delete that box, or \
             make the volume shared"
        )
    );
    assert_eq!(code(w.get("c").await), Code::NotFound);
    assert_eq!(get(&w, "data").await.unwrap().used_by, 2);
    let shared = json!({"kind": "volume", "item": "data", "content": {"volume": {"shared": true}}});
    update(&w, shared).await.unwrap();
    w.create(writer("c")).await.unwrap();
    let mounted = w.backend.volumes_mounted();
    let mounted: Vec<_> = mounted.iter().flatten().collect();
    assert!(mounted.iter().all(|volume| volume.id == data.id));
    assert_eq!(mounted[0].bytes, 64 << 20);
    w.delete("a").await.unwrap();
    w.delete("b").await.unwrap();
    w.delete("c").await.unwrap();
    assert_eq!(get(&w, "data").await.unwrap().used_by, 0);
}

#[tokio::test]
async fn a_volume_in_use_is_neither_deleted_nor_resized() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    volume(&w, "data").await;
    w.create(writer("a")).await.unwrap();
    let refused = delete(&w, "data").await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            Code::Conflict,
            "volume data: used by 1 box; delete it first"
        )
    );
    assert_eq!(refused.detail::<Detail>().unwrap().used_by, Some(1));
    w.create(reader("b")).await.unwrap();
    let refused = delete(&w, "data").await.unwrap_err();
    assert_eq!(
        refused.message(),
        "volume data: used by 2 boxes; delete them first"
    );
    let resize = json!({"kind": "volume", "item": "data", "content": {"volume": {"size_mb": 65}}});
    assert_eq!(code(update(&w, resize).await), Code::Conflict);
    // Other changes are possible, and the box keeps its volume under its new name.
    let rename = json!({"kind": "volume", "item": "data", "name": "other"});
    update(&w, rename).await.unwrap();
    assert_eq!(code(delete(&w, "other").await), Code::Conflict);
    for id in ["a", "b"] {
        w.delete(id).await.unwrap();
    }
    delete(&w, "other").await.unwrap();
}

#[tokio::test]
async fn a_failed_box_releases_its_volumes_and_gets_them_back_at_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let data = volume(&w, "data").await;
    w.create(writer("a")).await.unwrap();
    w.backend.kill_box("a");
    // The runtime notices the lost connection at once, and otherwise only at its next check.
    w.backend.cut_agent("a");
    while get(&w, "data").await.unwrap().used_by > 0 {
        settle().await;
    }
    let rename = json!({"kind": "volume", "item": "data", "name": "other"});
    update(&w, rename).await.unwrap();
    w.create(writer("a")).await.unwrap();
    let mounted = w.backend.volumes_mounted();
    assert_eq!(mounted[1][0].id, data.id, "by id, not by name");
    assert_eq!(get(&w, "other").await.unwrap().used_by, 1);
}

#[tokio::test]
async fn volumes_of_other_owners_and_missing_ones_are_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    let of_alice = volume(&alice, "data").await;
    for spec in [
        writer("b"),
        with_volumes("b", json!([{"volume": of_alice.id, "mount_path": "/data"}])),
        with_volumes(
            "b",
            json!([{"volume": "data@alice", "mount_path": "/data"}]),
        ),
    ] {
        let refused = bob.create(spec).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
        assert_eq!(code(bob.get("b").await), Code::NotFound);
    }
    alice.create(writer("a")).await.unwrap();
    // The same volume twice is one use.
    let twice = json!([{"volume": "data", "mount_path": "/x", "sub_path": "x", "ro": true},
        {"volume": of_alice.id, "mount_path": "/y", "ro": true}]);
    alice.create(with_volumes("twice", twice)).await.unwrap();
    assert_eq!(get(&alice, "data").await.unwrap().used_by, 2);
    let other = alice.create(reader("a")).await.unwrap_err();
    assert_eq!(other.code(), Code::Conflict, "{other}");
}

#[tokio::test]
async fn data_without_an_item_is_removed_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let data = volume(&w, "data").await;
    w.backend.leave_volume(ItemId::fresh());
    w.runtime.adopt().await.unwrap();
    let left = w.backend.volumes_made();
    assert_eq!(left, [(data.id, 64 << 20)]);
}
