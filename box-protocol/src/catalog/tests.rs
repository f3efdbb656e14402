use serde_json::{Value, from_value, json, to_value};

use super::*;
use crate::actions::CatalogPutParams;
use crate::invalid::Invalid;

fn item(content: &Value) -> CatalogItem {
    let item = json!({"id": "i", "name": "n", "owner": "me", "state": "ready", "created_at": 1,
        "updated_at": 2, "content": content, "newer_than_this_build": true});
    from_value(item).unwrap()
}

#[test]
fn an_item_decodes_with_minimal_and_full_members() {
    for (kind, content) in [
        (CatalogKind::Volume, json!({"volume": {"size_mb": 64}})),
        (
            CatalogKind::Volume,
            json!({"volume": {"size_mb": 64, "shared": true, "enforced": true}}),
        ),
        (
            CatalogKind::Template,
            json!({"template": {"spec": {"memory_mb": 64, "note": [1]}}}),
        ),
        (
            CatalogKind::Pool,
            json!({"pool": {"template": "t", "size": 3, "max_age_sec": 60, "ready": 2}}),
        ),
        (
            CatalogKind::Image,
            json!({"image": {"digest": "sha256:0", "names": ["docker.io/library/debian:12"]}}),
        ),
        (CatalogKind::Snapshot, json!({"snapshot": {}})),
        (
            CatalogKind::Snapshot,
            json!({"snapshot": {"source_box": "b", "image": "sha256:0", "layers": ["l"], "entries": 3}}),
        ),
    ] {
        let item = item(&content);
        assert_eq!(item.kind(), kind);
        assert_eq!((item.used_by, item.tags.len()), (0, 0));
        let written = to_value(&item).unwrap();
        assert_eq!(written["content"].as_object().unwrap().len(), 1);
        assert_eq!(from_value::<CatalogItem>(written.clone()).unwrap(), item);
        crate::schema::tests::assert_fits::<CatalogItem>(&written);
    }
    let of_box = item(&json!({"snapshot": {"source_box": "b"}}));
    assert_eq!(of_box.source_box().map(BoxId::as_str), Some("b"));
    assert!(from_value::<ItemContent>(json!({"moon": {}})).is_err());
}

#[test]
fn every_kind_has_its_name_on_the_wire() {
    for kind in CatalogKind::ALL {
        assert_eq!(to_value(kind).unwrap(), json!(kind.as_str()));
        let subject = crate::error::Subject::from(kind);
        assert_eq!(to_value(subject).unwrap(), json!(kind.as_str()));
    }
}

#[test]
fn drafts_and_changes_have_rules() {
    let draft = |content: Value| from_value::<ItemDraft>(content).unwrap();
    let volume = draft(json!({"volume": {}}));
    assert_eq!(volume, ItemDraft::Volume(VolumeDraft::default()));
    assert_eq!(
        (volume.kind(), volume.check()),
        (CatalogKind::Volume, Ok(()))
    );
    let refused = |rule: Result<(), Invalid>| rule.unwrap_err().to_string();
    assert_eq!(
        refused(draft(json!({"volume": {"size_mb": 15}})).check()),
        "size_mb: must be between 16 and 8388608, not 15"
    );
    let template = draft(json!({"template": {"spec": {"box_id": "s"}}}));
    assert_eq!(template.kind(), CatalogKind::Template);
    assert_eq!(
        refused(template.check()),
        "box_id: belongs to a request; a template cannot set it"
    );
    let change = |content: Value| from_value::<ItemChange>(content).unwrap();
    let grown = change(json!({"volume": {"size_mb": 1_u64 << 40}}));
    assert_eq!(grown.kind(), CatalogKind::Volume);
    assert!(grown.check().is_err());
    assert!(change(json!({"volume": {"shared": true}})).check().is_ok());
    let spec = change(json!({"template": {"spec": {"memory_mb": 1}}}));
    assert_eq!(
        refused(spec.check()),
        "memory_mb: 1 is below the minimum of 32"
    );
    let pool = draft(json!({"pool": {"template": "t", "size": 4}}));
    assert_eq!((pool.kind(), pool.check()), (CatalogKind::Pool, Ok(())));
    let empty = draft(json!({"pool": {"template": "t", "size": 0}}));
    assert_eq!(
        refused(empty.check()),
        "size: must be between 1 and 100, not 0"
    );
    let ageless = change(json!({"pool": {"max_age_sec": 0}}));
    assert_eq!(
        refused(ageless.check()),
        "max_age_sec: must be greater than 0"
    );
    for wrong in [
        json!({"image": {}}),
        json!({"volume": {"size": 5}}),
        json!({"volume": {}, "template": {"spec": {}}}),
    ] {
        assert!(from_value::<ItemDraft>(wrong).is_err());
    }
}

#[test]
fn tags_are_names_and_few() {
    let tags = |count: usize| -> Vec<Name> {
        (0..count)
            .map(|number| Name::new(format!("t{number}")).unwrap())
            .collect()
    };
    assert_eq!(check_tags(&tags(64)), Ok(()));
    assert_eq!(check_tags(&tags(65)).unwrap_err().field(), "tags");
    let put = json!({"name": "n", "tags": ["a/b"], "content": {"volume": {}}});
    assert!(from_value::<CatalogPutParams>(put).is_err());
}

#[test]
fn a_snapshot_of_an_image_names_the_image() {
    let read = |value| serde_json::from_value::<ItemDraft>(value).unwrap();
    let draft = read(json!({"snapshot": {"image": "python:3.12"}}));
    assert_eq!(
        (draft.kind(), draft.check()),
        (CatalogKind::Snapshot, Ok(()))
    );
    let blank = read(json!({"snapshot": {"image": " "}}));
    assert_eq!(blank.check().unwrap_err().field(), "image");
}
