use super::*;
use crate::backend::LayerKind;

fn layer(layers: &Layers, bytes: u64) -> LayerUse {
    let new = layers.begin().unwrap();
    std::fs::create_dir(new.path()).unwrap();
    std::fs::write(new.path().join("f"), "x").unwrap();
    let files = LayerFiles {
        kind: LayerKind::Directory,
        bytes,
        entries: 1,
    };
    new.finish(files).unwrap();
    new
}

fn layers(state: &Path) -> Layers {
    Layers::new(Arc::new(StateDirectory::new(Some(state.to_owned()))))
}

fn names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_layer_stays_while_it_is_used_or_named() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("layers");
    let layers = layers(place.path());
    layers.load().unwrap();
    layers.keep_unused(false);
    let (used, named, neither) = (layer(&layers, 1), layer(&layers, 2), layer(&layers, 3));
    let (kept, of_item) = (used.id().clone(), named.id().clone());
    let second = used.clone();
    drop((used, named, neither));
    let names_of = |ids: &[&LayerId]| {
        let mut sorted: Vec<_> = ids.iter().map(ToString::to_string).collect();
        sorted.sort();
        sorted
    };
    layers.collect(|| [of_item.clone()].into());
    assert_eq!(names(&path), names_of(&[&kept, &of_item]));
    assert_eq!(second.files().bytes, 1);
    assert!(second.layer().path.join("f").exists());
    assert!(layers.hold(&[LayerId::fresh()]).is_err());
    let held = layers.hold(&[of_item.clone(), kept.clone()]).unwrap();
    drop(second);
    layers.collect(BTreeSet::new);
    assert_eq!(names(&path).len(), 2);
    drop(held);
    layers.collect(BTreeSet::new);
    assert_eq!(names(&path), [""; 0]);
}

#[test]
fn a_later_process_finds_whole_layers_and_removes_others() {
    let place = tempfile::tempdir().unwrap();
    let layers = layers(place.path());
    let whole = layer(&layers, 7).id().clone();
    let completed = layers.begin().unwrap();
    std::fs::create_dir_all(completed.path().join("deep")).unwrap();
    let unfinished = layers.begin().unwrap();
    std::fs::create_dir_all(unfinished.path().join("deep")).unwrap();
    std::fs::write(place.path().join("layers/other"), "stays").unwrap();
    let later = self::layers(place.path());
    later.load().unwrap();
    // A box that an earlier process was stopping.
    let found = later.at(&completed.path()).unwrap();
    // Not all boxes are known yet.
    later.collect(BTreeSet::new);
    assert_eq!(names(&place.path().join("layers")).len(), 4);
    later.keep_unused(false);
    later.collect(|| [whole.clone()].into());
    let mut expected = vec![whole.to_string(), completed.id().to_string()];
    expected.sort();
    expected.push("other".to_owned());
    assert_eq!(names(&place.path().join("layers")), expected);
    assert_eq!(found.id(), completed.id());
    assert_eq!(later.hold(&[whole]).unwrap()[0].files().bytes, 7);
    assert!(later.at(Path::new("/etc/passwd")).is_none());
}

#[test]
fn a_layer_that_was_not_finished_is_removed() {
    let place = tempfile::tempdir().unwrap();
    let layers = layers(place.path());
    let new = layers.begin().unwrap();
    std::fs::create_dir(new.path()).unwrap();
    layers.collect(BTreeSet::new);
    assert_eq!(names(&place.path().join("layers")).len(), 1);
    drop(new);
    layers.collect(BTreeSet::new);
    assert_eq!(names(&place.path().join("layers")), [""; 0]);
}

#[test]
fn layers_without_a_state_directory_end_with_the_last_use() {
    let layers = Layers::new(Arc::new(StateDirectory::new(None)));
    let kept = layer(&layers, 1);
    let path = kept.path();
    drop(layers);
    assert!(path.join("f").exists());
    drop(kept);
    assert!(!path.exists());
    assert!(!path.ancestors().nth(3).unwrap().exists());
}

#[tokio::test]
async fn a_layer_that_was_not_on_disk_at_a_crash_of_the_machine_is_removed() {
    let place = tempfile::tempdir().unwrap();
    let layers = layers(place.path());
    let whole = layer(&layers, 1);
    let files = whole.files();
    let record = |of: &LayerUse| place.path().join("layers").join(of.id().as_str());
    whole.finish_unsynced(files).unwrap();
    layers.synced().await;
    assert_eq!(
        LayerRecord::read(&record(&whole)).unwrap(),
        LayerRecord::new(files)
    );
    // As a killed server leaves it.
    let killed = layer(&layers, 2);
    let unsynced = LayerRecord::unsynced(files).unwrap();
    unsynced.write(&record(&killed)).unwrap();
    // As a crash of the machine leaves it.
    let crashed = layer(&layers, 3);
    let mut of_earlier_boot = unsynced;
    of_earlier_boot.unsynced_since = Some(uuid::Uuid::now_v7());
    of_earlier_boot.write(&record(&crashed)).unwrap();
    let later = self::layers(place.path());
    later.load().unwrap();
    later.synced().await;
    let ids = |of: &LayerUse| [of.id().clone()];
    assert!(later.hold(&ids(&crashed)).is_err());
    assert!(!record(&crashed).exists());
    assert!(later.hold(&ids(&whole)).is_ok() && later.hold(&ids(&killed)).is_ok());
    assert_eq!(
        LayerRecord::read(&record(&killed)).unwrap(),
        LayerRecord::new(files)
    );
}
