//! Items of the catalog, through the runtime.

use std::sync::Arc;

use box_catalog::{Catalog, Limits};
use box_protocol::actions::{
    CatalogDeleteParams, CatalogGetParams, CatalogListParams, CatalogPutParams, CatalogUpdateParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent};
use box_protocol::{BoxError, Code};
use serde_json::{Value, json};

use super::fixture::{Fixture, code, fixture, fixture_with};

pub(crate) fn params<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

pub(crate) fn with_catalog(directory: &tempfile::TempDir) -> Fixture {
    let limits = Limits {
        items_per_owner: 5,
        ..Limits::default()
    };
    let catalog = Catalog::open(directory.path(), limits).unwrap();
    fixture_with(|config| config.catalog = Some(Arc::new(catalog)))
}

pub(crate) async fn put(w: &Fixture, value: Value) -> Result<CatalogItem, BoxError> {
    let params: CatalogPutParams = params(value);
    w.runtime.put_item(&w.caller, params).await
}

async fn template(w: &Fixture, name: &str) -> Result<CatalogItem, BoxError> {
    let content = json!({"template": {"spec": {"memory_mb": 64, "note": {"by": name}}}});
    put(w, json!({"name": name, "content": content})).await
}

async fn get(w: &Fixture, item: &str) -> Result<CatalogItem, BoxError> {
    let params: CatalogGetParams = params(json!({"kind": "template", "item": item}));
    w.runtime.item(&w.caller, params).await
}

pub(crate) async fn update(w: &Fixture, value: Value) -> Result<CatalogItem, BoxError> {
    let params: CatalogUpdateParams = params(value);
    w.runtime.update_item(&w.caller, params).await
}

async fn delete(w: &Fixture, item: &str) -> Result<(), BoxError> {
    let params: CatalogDeleteParams = params(json!({"kind": "template", "item": item}));
    w.runtime.delete_item(&w.caller, params).await.map(drop)
}

async fn names(w: &Fixture) -> Vec<String> {
    let params = CatalogListParams::of(CatalogKind::Template);
    let listed = w.runtime.list_items(&w.caller, params).await.unwrap();
    listed
        .items
        .iter()
        .map(|item| item.name.to_string())
        .collect()
}

#[tokio::test]
async fn an_item_is_created_changed_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let item = template(&w, "small").await.unwrap();
    assert_eq!((item.kind(), item.used_by), (CatalogKind::Template, 0));
    assert_eq!(get(&w, "small").await.unwrap(), item);
    let change = json!({"kind": "template", "item": "small", "name": "tiny", "tags": ["t"],
        "labels": {"a": "b"}, "content": {"template": {"spec": {"memory_mb": 32}}}});
    let changed = update(&w, change).await.unwrap();
    let ItemContent::Template(content) = &changed.content else {
        panic!("{changed:?}");
    };
    assert_eq!(content.spec.memory_mb, Some(32));
    assert_eq!(code(get(&w, "small").await), Code::NotFound);
    for name in ["tiny", "t", item.id.as_str()] {
        assert_eq!(get(&w, name).await.unwrap(), changed, "{name}");
    }
    let untagged =
        json!({"kind": "template", "item": "tiny", "untag": ["t"], "labels": {"a": null}});
    let untagged = update(&w, untagged).await.unwrap();
    assert!(untagged.tags.is_empty() && untagged.labels.is_empty());
    delete(&w, "tiny").await.unwrap();
    assert_eq!(code(delete(&w, "tiny").await), Code::NotFound);
}

#[tokio::test]
async fn items_of_other_owners_do_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    let of_alice = template(&alice, "t").await.unwrap();
    template(&bob, "t").await.unwrap();
    assert_eq!(get(&alice, "t").await.unwrap().owner, "alice");
    for item in [of_alice.id.as_str(), "t@alice"] {
        assert_eq!(code(get(&bob, item).await), Code::NotFound);
        assert_eq!(code(delete(&bob, item).await), Code::NotFound);
        let change = json!({"kind": "template", "item": item, "name": "mine"});
        assert_eq!(code(update(&bob, change).await), Code::NotFound);
        assert_eq!(get(&w, item).await.unwrap().owner, "alice");
    }
    assert_eq!(
        (names(&alice).await, names(&w).await.len()),
        (vec!["t".to_owned()], 2)
    );
    assert_eq!(code(get(&w, "t").await), Code::NotFound);
    delete(&w, "t@alice").await.unwrap();
    assert_eq!((names(&alice).await.len(), names(&bob).await.len()), (0, 1));
}

#[tokio::test]
async fn invalid_items_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    for (content, message) in [
        (
            json!({"template": {"spec": {"box_id": "b"}}}),
            "box_id: belongs to a request; a template cannot set it",
        ),
        (
            json!({"template": {"spec": {"cpus": 0}}}),
            "cpus: must be greater than 0",
        ),
        (
            json!({"volume": {"size_mb": 1}}),
            "size_mb: must be between 16 and 8388608, not 1",
        ),
    ] {
        let refused = put(&w, json!({"name": "n", "content": content})).await;
        assert_eq!(refused.unwrap_err().message(), message);
    }
    template(&w, "taken").await.unwrap();
    assert_eq!(code(template(&w, "taken").await), Code::Conflict);
    let other_kind = json!({"kind": "template", "item": "taken", "content": {"volume": {}}});
    assert_eq!(code(update(&w, other_kind).await), Code::Validation);
    for number in 0..4 {
        template(&w, &format!("t{number}")).await.unwrap();
    }
    assert_eq!(code(template(&w, "sixth").await), Code::Capacity);
    let image: CatalogGetParams = params(json!({"kind": "image", "item": "debian"}));
    assert_eq!(
        code(w.runtime.item(&w.caller, image).await),
        Code::Unsupported
    );
    assert_eq!(code(template(&fixture(), "t").await), Code::Unsupported);
}

#[tokio::test]
async fn items_outlive_the_runtime_and_a_damaged_one_is_listed() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let item = template(&w, "kept").await.unwrap();
    let lost = template(&w, "lost").await.unwrap();
    let catalog = w.runtime;
    drop((catalog, w.backend));
    let path = directory.path().join(format!("template/{}.json", lost.id));
    std::fs::write(path, "not JSON").unwrap();
    let w = loop {
        // The runtime gives the store back when its last task has ended.
        match Catalog::open(directory.path(), Limits::default()) {
            Ok(catalog) => {
                break fixture_with(|config| config.catalog = Some(Arc::new(catalog)));
            }
            Err(error) => assert_eq!(error, box_catalog::Error::Locked),
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    };
    assert_eq!(get(&w, "kept").await.unwrap(), item);
    let error = get(&w, lost.id.as_str()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains(lost.id.as_str()), "{error}");
    let all = CatalogListParams::of(CatalogKind::Template);
    let listed = w.runtime.list_items(&w.caller, all.clone()).await.unwrap();
    assert_eq!((listed.items.len(), listed.damaged), (1, vec![lost.id]));
    let alice = w.with_token("alice");
    let listed = alice.runtime.list_items(&alice.caller, all).await.unwrap();
    assert_eq!((listed.items.len(), listed.damaged.len()), (0, 0));
}
