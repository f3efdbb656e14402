use box_protocol::catalog::{SnapshotContent, VolumeContent};
use box_protocol::{BoxError, Code, error::Detail};

use super::*;

const ME: Viewer<'_> = Viewer {
    owner: "me",
    sees_all: false,
};
const YOU: Viewer<'_> = Viewer {
    owner: "you",
    sees_all: false,
};
const ALL: Viewer<'_> = Viewer {
    owner: "local",
    sees_all: true,
};

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn volume(owner: &str, text: &str) -> NewItem {
    NewItem {
        owner: owner.to_owned(),
        name: name(text),
        tags: Vec::new(),
        labels: Labels::new(),
        state: ItemState::Ready,
        size_bytes: None,
        content: ItemContent::Volume(VolumeContent {
            size_mb: 64,
            shared: false,
            enforced: false,
        }),
    }
}

fn open(directory: &tempfile::TempDir) -> Catalog {
    Catalog::open(directory.path(), Limits::default()).unwrap()
}

fn find(catalog: &Catalog, viewer: Viewer<'_>, item: &str) -> Result<CatalogItem> {
    catalog.find(viewer, CatalogKind::Volume, &ItemRef::new(item).unwrap())
}

fn tagged(catalog: &Catalog, item: &CatalogItem, tag: &str) -> Result<CatalogItem> {
    catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.tags.push(name(tag));
        Ok(())
    })
}

fn all() -> Filter {
    Filter {
        kind: CatalogKind::Volume,
        name: None,
        tag: None,
        state: Vec::new(),
        labels: Labels::new(),
        source_box: None,
        after: None,
        limit: None,
    }
}

#[test]
fn items_are_found_by_id_name_and_tag_also_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let item = catalog.insert(volume("me", "data")).unwrap();
    let item = tagged(&catalog, &item, "latest").unwrap();
    let renamed = catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.name = name("other");
        Ok(())
    });
    let item = renamed.unwrap();
    drop(catalog);
    let catalog = open(&directory);
    for by in [item.id.as_str(), "other", "latest"] {
        assert_eq!(find(&catalog, ME, by).unwrap(), item, "{by}");
    }
    assert!(find(&catalog, ME, "data").is_err());
    catalog.remove(CatalogKind::Volume, &item.id).unwrap();
    for by in [item.id.as_str(), "other", "latest"] {
        let error = BoxError::from(find(&catalog, ME, by).unwrap_err());
        assert_eq!(error.code(), Code::NotFound);
        assert_eq!(error.message(), format!("volume {by} not found"));
    }
    assert_eq!(
        catalog.remove(CatalogKind::Volume, &item.id),
        Err(Error::not_found(CatalogKind::Volume, item.id.as_str()))
    );
}

#[test]
fn items_of_another_owner_do_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let mine = catalog.insert(volume("me", "data")).unwrap();
    let yours = catalog.insert(volume("you", "data")).unwrap();
    assert_eq!(find(&catalog, ME, "data").unwrap(), mine);
    assert_eq!(find(&catalog, YOU, "data").unwrap(), yours);
    assert!(find(&catalog, YOU, mine.id.as_str()).is_err());
    assert!(find(&catalog, YOU, "data@me").is_err());
    assert_eq!(catalog.list(ME, &all()).items, std::slice::from_ref(&mine));
    assert_eq!(catalog.list(ALL, &all()).total, 2);
    assert_eq!(find(&catalog, ALL, mine.id.as_str()).unwrap(), mine);
    assert_eq!(find(&catalog, ALL, "data@you").unwrap(), yours);
    assert!(find(&catalog, ALL, "data").is_err());
}

#[test]
fn names_are_unique_and_tags_move() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let one = catalog.insert(volume("me", "one")).unwrap();
    let two = catalog.insert(volume("me", "two")).unwrap();
    let error = BoxError::from(catalog.insert(volume("me", "one")).unwrap_err());
    assert_eq!(
        (error.code(), error.message()),
        (
            Code::Conflict,
            "name: one is taken by another volume; choose another name"
        )
    );
    tagged(&catalog, &one, "latest").unwrap();
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, one.id);
    tagged(&catalog, &two, "latest").unwrap();
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, two.id);
    assert!(find(&catalog, ME, "one").unwrap().tags.is_empty());
    assert!(
        tagged(&catalog, &two, "one").is_err(),
        "the name of another"
    );
    let renamed = catalog.update(CatalogKind::Volume, &one.id, |item| {
        item.name = name("latest");
        Ok(())
    });
    assert!(renamed.is_err(), "the tag of another");
    let mut tags = (0..65).map(|number| name(&format!("t{number}")));
    let many = catalog.update(CatalogKind::Volume, &one.id, |item| {
        item.tags.extend(tags.by_ref());
        Ok(())
    });
    assert_eq!(many.unwrap_err().code(), Code::Validation);
    drop(catalog);
    let catalog = open(&directory);
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, two.id);
    assert!(find(&catalog, ME, "one").unwrap().tags.is_empty());
}

#[test]
fn a_tag_on_two_records_belongs_to_the_newer_one() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let old = catalog.insert(volume("me", "old")).unwrap();
    let old = tagged(&catalog, &old, "latest").unwrap();
    let path = directory.path().join(format!("volume/{}.json", old.id));
    let record = std::fs::read(&path).unwrap();
    let new = catalog.insert(volume("me", "new")).unwrap();
    tagged(&catalog, &new, "latest").unwrap();
    drop(catalog);
    // As a crash between the two writes would leave it.
    std::fs::write(&path, record).unwrap();
    let catalog = open(&directory);
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, new.id);
    assert!(find(&catalog, ME, "old").unwrap().tags.is_empty());
    catalog.remove(CatalogKind::Volume, &new.id).unwrap();
    drop(catalog);
    let catalog = open(&directory);
    assert!(find(&catalog, ME, "latest").is_err());
}

#[test]
fn lists_have_filters_and_pages() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    for number in 0..10 {
        let mut new = volume("me", &format!("v{number}"));
        new.labels = [("even".to_owned(), (number % 2 == 0).to_string())].into();
        catalog.insert(new).unwrap();
    }
    let mut filter = Filter {
        limit: Some(4),
        ..all()
    };
    let mut seen = Vec::new();
    loop {
        let page = catalog.list(ME, &filter);
        assert_eq!(page.total, 10);
        seen.extend(page.items.iter().map(|item| item.name.to_string()));
        match page.next {
            Some(next) => filter.after = Some(next),
            None => break,
        }
    }
    let expected: Vec<_> = (0..10).map(|number| format!("v{number}")).collect();
    assert_eq!(seen, expected);
    let count = |filter: &Filter| catalog.list(ME, filter).total;
    assert_eq!(
        count(&Filter {
            labels: [("even".to_owned(), "true".to_owned())].into(),
            ..all()
        }),
        5
    );
    assert_eq!(
        count(&Filter {
            name: Some(name("v3")),
            ..all()
        }),
        1
    );
    assert_eq!(
        count(&Filter {
            state: vec![ItemState::Failed],
            ..all()
        }),
        0
    );
    assert_eq!(
        count(&Filter {
            kind: CatalogKind::Template,
            ..all()
        }),
        0
    );
}

#[test]
fn an_owner_has_a_limited_number_of_items() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits {
        items_per_owner: 2,
        ..Limits::default()
    };
    let catalog = Catalog::open(directory.path(), limits).unwrap();
    for text in ["a", "b"] {
        catalog.insert(volume("me", text)).unwrap();
    }
    let error = BoxError::from(catalog.insert(volume("me", "c")).unwrap_err());
    assert_eq!(error.code(), Code::Capacity);
    assert_eq!(error.detail::<Detail>().unwrap().max, Some(2));
    catalog.insert(volume("you", "c")).unwrap();
}

#[test]
fn a_damaged_record_is_an_error_of_that_item_alone() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let items: Vec<_> = ["a", "b", "c", "d", "e"]
        .map(|text| catalog.insert(volume("me", text)).unwrap())
        .into();
    drop(catalog);
    let path = |item: &CatalogItem| directory.path().join(format!("volume/{}.json", item.id));
    let text = std::fs::read_to_string(path(&items[0])).unwrap();
    std::fs::write(path(&items[0]), &text[..text.len() / 2]).unwrap();
    std::fs::write(path(&items[1]), [0; 100]).unwrap();
    // A record of another item.
    std::fs::copy(path(&items[3]), path(&items[2])).unwrap();
    let newer = std::fs::read_to_string(path(&items[4])).unwrap();
    std::fs::write(
        path(&items[4]),
        newer.replace("\"version\":1", "\"version\":9"),
    )
    .unwrap();
    std::fs::write(directory.path().join("volume/README"), "kept").unwrap();
    let catalog = open(&directory);
    for damaged in [&items[0], &items[1], &items[2], &items[4]] {
        let error = BoxError::from(find(&catalog, ME, damaged.id.as_str()).unwrap_err());
        assert_eq!(error.code(), Code::Unavailable);
        let id = &damaged.id;
        assert_eq!(
            error.message(),
            format!(
                "volume {id}: its record is damaged; restore it from a copy, or delete the item"
            )
        );
        assert!(path(damaged).exists());
    }
    assert_eq!(catalog.damaged(CatalogKind::Volume).len(), 4);
    assert_eq!(catalog.ids(CatalogKind::Volume).len(), 5);
    assert_eq!(catalog.list(ME, &all()).items, items[3..4]);
    catalog.insert(volume("me", "a")).unwrap();
    catalog.remove(CatalogKind::Volume, &items[0].id).unwrap();
    assert_eq!(catalog.damaged(CatalogKind::Volume).len(), 3);
}

#[test]
fn unfinished_items_are_removed_when_the_store_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let building = NewItem {
        state: ItemState::Building,
        ..volume("me", "half")
    };
    let snapshot = NewItem {
        content: ItemContent::Snapshot(SnapshotContent::default()),
        ..building.clone()
    };
    let item = catalog.insert(building).unwrap();
    let snapshot = catalog.insert(snapshot).unwrap();
    let unfinished = directory.path().join(format!("volume/{}.new", item.id));
    std::fs::write(&unfinished, "{").unwrap();
    drop(catalog);
    let catalog = open(&directory);
    assert_eq!(
        catalog.interrupted(),
        [
            (CatalogKind::Volume, item.id.clone()),
            (CatalogKind::Snapshot, snapshot.id)
        ]
    );
    assert!(!unfinished.exists());
    assert!(catalog.ids(CatalogKind::Volume).is_empty());
    assert!(catalog.ids(CatalogKind::Snapshot).is_empty());
    drop(catalog);
    assert!(open(&directory).interrupted().is_empty());
}

#[test]
fn an_unfinished_snapshot_is_failed_when_the_store_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let building = || NewItem {
        state: ItemState::Building,
        content: ItemContent::Snapshot(SnapshotContent {
            image: Some("sha256:1f".to_owned()),
            keep_failed: true,
            ..SnapshotContent::default()
        }),
        ..volume("me", "half")
    };
    let item = catalog.insert(building()).unwrap();
    assert!(matches!(
        catalog.insert(building()),
        Err(Error::NameTaken { .. })
    ));
    drop(catalog);
    for opened in 0..2 {
        let catalog = open(&directory);
        assert_eq!(catalog.interrupted().len(), usize::from(opened == 0));
        let failed = catalog.get(CatalogKind::Snapshot, &item.id).unwrap();
        assert_eq!(failed.state, ItemState::Failed);
        assert!(failed.reason.unwrap().contains("make it again"));
        assert_eq!(
            failed.content,
            ItemContent::Snapshot(SnapshotContent {
                keep_failed: true,
                ..SnapshotContent::default()
            })
        );
    }
    // One that is refused does not replace it.
    let catalog = open(&directory);
    let of_other_name = NewItem {
        name: name("other"),
        ..building()
    };
    let other = catalog.insert(of_other_name).unwrap();
    let refused = NewItem {
        tags: vec![name("other")],
        ..building()
    };
    assert!(catalog.insert(refused).is_err());
    let kept = catalog.get(CatalogKind::Snapshot, &item.id).unwrap();
    assert_eq!(kept.state, ItemState::Failed);
    catalog.remove(CatalogKind::Snapshot, &other.id).unwrap();
    // The next snapshot with the name replaces it, also if a crash leaves its record.
    let record = directory.path().join(format!("snapshot/{}.json", item.id));
    let written = std::fs::read(&record).unwrap();
    let again = catalog.insert(building()).unwrap();
    assert_eq!(
        catalog.ids(CatalogKind::Snapshot),
        [again.id.clone()].into()
    );
    assert!(!record.exists());
    drop(catalog);
    std::fs::write(&record, written).unwrap();
    let catalog = open(&directory);
    assert_eq!(catalog.ids(CatalogKind::Snapshot), [again.id].into());
    assert!(catalog.damaged(CatalogKind::Snapshot).is_empty() && !record.exists());
}

#[test]
fn a_change_that_fails_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let item = catalog.insert(volume("me", "data")).unwrap();
    let preview = catalog.preview(CatalogKind::Volume, &item.id, |item| {
        item.name = name("changed");
        Ok(())
    });
    assert_eq!(preview.unwrap().name, name("changed"));
    let failed = catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.name = name("changed");
        Err(Error::Full)
    });
    assert_eq!(failed, Err(Error::Full));
    let too_long = catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.labels.insert("a".to_owned(), "x".repeat(20_000));
        Ok(())
    });
    assert_eq!(too_long.unwrap_err().code(), Code::Validation);
    let other_kind = catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.content = ItemContent::Snapshot(SnapshotContent::default());
        Ok(())
    });
    assert_eq!(other_kind.unwrap_err().code(), Code::Validation);
    assert_eq!(find(&catalog, ME, "data").unwrap(), item);
    // The directory cannot be written, because it is gone.
    std::fs::rename(
        directory.path().join("volume"),
        directory.path().join("away"),
    )
    .unwrap();
    let error = catalog.insert(volume("me", "new")).unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(!error.to_string().contains('/'), "{error}");
    assert_eq!(catalog.list(ME, &all()).total, 1);
}

#[test]
fn an_unfinished_item_leaves_the_tags_of_ready_ones() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(&directory);
    let with_tags = |text: &str, state| NewItem {
        tags: vec![name("latest"), name("free")],
        state,
        ..volume("me", text)
    };
    let ready = NewItem {
        tags: vec![name("latest")],
        ..volume("me", "ready")
    };
    let ready = catalog.insert(ready).unwrap();
    let unfinished = with_tags("new", ItemState::Building);
    let unfinished = catalog.insert(unfinished).unwrap();
    assert_eq!(unfinished.tags, [name("free")]);
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, ready.id);
    let done = catalog.update(CatalogKind::Volume, &unfinished.id, |item| {
        item.state = ItemState::Ready;
        item.tags.push(name("latest"));
        Ok(())
    });
    assert_eq!(find(&catalog, ME, "latest").unwrap().id, done.unwrap().id);
    assert!(find(&catalog, ME, "ready").unwrap().tags.is_empty());
}

#[test]
fn volumes_have_a_maximum_size_each_and_together() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits {
        max_volume_mb: Some(100),
        max_volumes_mb_per_owner: Some(150),
        ..Limits::default()
    };
    let catalog = Catalog::open(directory.path(), limits).unwrap();
    let sized = |owner: &str, text: &str, size_mb| NewItem {
        content: ItemContent::Volume(VolumeContent {
            size_mb,
            shared: false,
            enforced: false,
        }),
        ..volume(owner, text)
    };
    let limit = |made: Result<CatalogItem>| match made {
        Err(Error::TooLarge { limit, .. }) => limit,
        made => panic!("{made:?}"),
    };
    assert_eq!(
        limit(catalog.insert(sized("me", "a", 101))),
        "max_volume_mb"
    );
    let kept = catalog.insert(sized("me", "a", 100)).unwrap();
    let beyond = catalog.insert(sized("me", "b", 51));
    assert_eq!(limit(beyond), "max_volumes_mb_per_owner");
    catalog.insert(sized("you", "b", 51)).unwrap();
    let small = catalog.insert(sized("me", "b", 50)).unwrap();
    let resize = |id, size_mb| {
        catalog.update(CatalogKind::Volume, id, |item| {
            item.content = sized("me", "b", size_mb).content;
            Ok(())
        })
    };
    assert_eq!(limit(resize(&small.id, 51)), "max_volumes_mb_per_owner");
    resize(&kept.id, 60).unwrap();
    resize(&small.id, 51).unwrap();
}

#[test]
fn snapshots_have_a_maximum_size_together() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits {
        max_snapshots_mb_per_owner: Some(10),
        ..Limits::default()
    };
    let catalog = Catalog::open(directory.path(), limits).unwrap();
    let sized = |owner: &str, text: &str, size_bytes| NewItem {
        content: ItemContent::Snapshot(SnapshotContent::default()),
        size_bytes,
        ..volume(owner, text)
    };
    let refused = |made: Result<CatalogItem>| {
        let error = BoxError::from(made.unwrap_err());
        let detail: Detail = error.detail().unwrap();
        assert_eq!(error.code(), Code::Capacity);
        assert_eq!(detail.limit.as_deref(), Some("max_snapshots_mb_per_owner"));
        error.message().to_owned()
    };
    let first = catalog.insert(sized("me", "a", Some(6 << 20))).unwrap();
    let message = refused(catalog.insert(sized("me", "b", Some(4 << 20 | 1))));
    let expected = "snapshot: 11 MiB of all snapshots and checkpoints are above the limit max_snapshots_mb_per_owner, 10 MiB; delete snapshots, or boxes with checkpoints";
    assert_eq!(message, expected);
    catalog.insert(sized("you", "b", Some(10 << 20))).unwrap();
    // One that is being made gets its size at the end.
    let second = catalog.insert(sized("me", "b", None)).unwrap();
    let grow = |size| {
        catalog.update(CatalogKind::Snapshot, &second.id, |item| {
            item.size_bytes = Some(size);
            Ok(())
        })
    };
    refused(grow(5 << 20));
    grow(4 << 20).unwrap();
    refused(catalog.insert(sized("me", "c", None)));
    // Other changes, and other kinds, are not limited.
    let renamed = catalog.update(CatalogKind::Snapshot, &first.id, |item| {
        item.name = name("d");
        Ok(())
    });
    renamed.unwrap();
    let mut data = volume("me", "v");
    data.size_bytes = Some(1 << 40);
    catalog.insert(data).unwrap();
    catalog.remove(CatalogKind::Snapshot, &first.id).unwrap();
    catalog.insert(sized("me", "c", Some(6 << 20))).unwrap();
}
