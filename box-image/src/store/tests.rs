//! Names, leases and removals of a store.

use std::os::unix::fs::symlink;

use box_test_wait::blocking::eventually;

use super::*;
use crate::reference::Reference;
use crate::{Digest, ImportFormat, ImportOptions};

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("store"), Limits::default()).unwrap();
    (folder, store)
}

fn root_tar(content: &str) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    builder
        .append_data(&mut header, "etc/content", content.as_bytes())
        .unwrap();
    // A directory that its own user cannot write to.
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(0o555);
    header.set_size(0);
    builder.append_data(&mut header, "etc/", &b""[..]).unwrap();
    builder.into_inner().unwrap()
}

fn import(store: &Store, content: &str, name: Option<&str>) -> Digest {
    let options = ImportOptions {
        name: name.map(|name| name.parse().unwrap()),
        format: ImportFormat::RootFileSystem,
        ..ImportOptions::default()
    };
    store
        .import_stream(&root_tar(content)[..], &options)
        .unwrap()
        .digest
}

fn reference(text: &str) -> Reference {
    text.parse().unwrap()
}

fn assert_clean(store: &Store) {
    for folder in ["work", "leases", "partial", "pulls"] {
        assert_eq!(
            store.entries(folder).unwrap(),
            Vec::<String>::new(),
            "{folder}"
        );
    }
}

#[test]
fn an_image_is_found_by_name_digest_and_prefix() {
    let (_folder, store) = store();
    let digest = import(&store, "one", Some("app:1"));
    for query in [
        "app:1",
        "docker.io/library/app:1",
        &digest.to_string(),
        &digest.hex()[..12],
        &digest.hex(),
        &format!("sha256:{}", &digest.hex()[..6]),
        &format!("app@{digest}"),
        &format!("other/name:2@{digest}"),
    ] {
        assert_eq!(store.get(query).unwrap().digest, digest, "{query}");
    }
    for query in [
        "app",
        "app:2",
        "0000",
        &format!("app@{}", Digest::of(b"")),
        &Digest::of(b"").to_string(),
    ] {
        let error = store.get(query).unwrap_err();
        assert_eq!(error.code(), box_rpc::Code::NotFound, "{query} {error}");
    }
    assert_eq!(
        store.get("A B").unwrap_err().code(),
        box_rpc::Code::Validation
    );
    let image = store.get("app:1").unwrap();
    assert_eq!(image.names, ["docker.io/library/app:1"]);
    assert_eq!(
        fs::read_to_string(store.rootfs(&digest).join("etc/content")).unwrap(),
        "one"
    );
    assert!(image.disk_bytes > 0 && image.created_at > 0 && image.used_at >= image.created_at);
    assert_clean(&store);
}

#[test]
fn an_ambiguous_prefix_is_refused() {
    let (_folder, store) = store();
    for name in ["abcd0", "abcd1"] {
        let hex = format!("{name}{}", "0".repeat(59));
        fs::create_dir(store.folder("images", &hex)).unwrap();
    }
    let error = store.get("abcd").unwrap_err();
    assert_eq!(
        error.to_string(),
        "image: `abcd` matches 2 digests; use more digits"
    );
}

#[test]
fn a_name_moves_to_another_image() {
    let (_folder, store) = store();
    let (one, two) = (
        import(&store, "one", Some("app")),
        import(&store, "two", Some("app")),
    );
    assert_eq!(store.get("app").unwrap().digest, two);
    assert_eq!(
        store.get(&one.to_string()).unwrap().names,
        Vec::<String>::new()
    );
    store.tag(&one.to_string(), &reference("app:old")).unwrap();
    store.tag("app:old", &reference("app")).unwrap();
    assert_eq!(store.get("app").unwrap().digest, one);
    assert_eq!(store.list().unwrap().len(), 2);
    let error = store
        .tag("app", &reference(&format!("app@{one}")))
        .unwrap_err();
    assert_eq!(error.code(), box_rpc::Code::Validation);
    assert!(store.tag("missing", &reference("app")).is_err());
}

#[test]
fn the_last_name_removes_the_image_and_a_digest_removes_all_names() {
    let (_folder, store) = store();
    let digest = import(&store, "one", Some("app:1"));
    store.tag("app:1", &reference("app:2")).unwrap();
    let uses = Uses::new();
    let removed = store.remove("app:1", &uses).unwrap();
    assert_eq!(
        (removed.names, removed.image),
        (vec!["docker.io/library/app:1".to_owned()], None)
    );
    let removed = store.remove("app:2", &uses).unwrap();
    assert_eq!(removed.image, Some(digest));
    assert!(removed.freed_bytes > 0);
    assert!(store.list().unwrap().is_empty() && !store.image_path(&digest).exists());
    let digest = import(&store, "one", Some("app:1"));
    store.tag("app:1", &reference("app:2")).unwrap();
    let removed = store.remove(&digest.hex()[..12], &uses).unwrap();
    assert_eq!((removed.names.len(), removed.image), (2, Some(digest)));
    assert_eq!(
        store.remove("app:1", &uses).unwrap_err().code(),
        box_rpc::Code::NotFound
    );
    assert_clean(&store);
}

#[test]
fn an_image_in_use_is_not_removed() {
    let (_folder, store) = store();
    let digest = import(&store, "one", Some("app"));
    // As another process would see it.
    let other = Store::open(&store.inner.path, Limits::default()).unwrap();
    let leases = [store.lease(&digest).unwrap(), other.lease(&digest).unwrap()];
    assert!(leases[0].rootfs().join("etc/content").exists());
    let uses = Uses::from([(digest, 3)]);
    let error = other.remove("app", &uses).unwrap_err();
    assert_eq!(
        error.to_string(),
        "image: app is used by 5 boxes or exports; delete its boxes first"
    );
    assert_eq!(error.code(), box_rpc::Code::Conflict);
    let all = PruneOptions {
        named: true,
        ..PruneOptions::default()
    };
    assert!(other.prune(all, &Uses::new()).unwrap().images.is_empty());
    drop(leases);
    assert!(store.prune(all, &uses).unwrap().images.is_empty());
    assert!(store.lease(&Digest::of(b"")).is_err());
    assert_eq!(other.prune(all, &Uses::new()).unwrap().images, [digest]);
    assert_clean(&store);
}

#[test]
fn a_cleanup_keeps_named_and_recent_images() {
    let (_folder, store) = store();
    let (old, new) = (
        import(&store, "one", Some("app")),
        import(&store, "two", Some("app")),
    );
    let uses = Uses::new();
    let hour = Duration::from_hours(1);
    let recent = PruneOptions {
        named: true,
        unused_for: hour,
    };
    assert!(store.prune(recent, &uses).unwrap().images.is_empty());
    let pruned = store.prune(PruneOptions::default(), &uses).unwrap();
    assert_eq!(pruned.images, [old]);
    assert!(pruned.freed_bytes > 0);
    assert_eq!(store.list().unwrap()[0].digest, new);
    // A download that no process continues.
    fs::write(store.folder("partial", &new.hex()), [0; 100]).unwrap();
    let usage = store.disk_usage().unwrap();
    assert_eq!(usage.images, 1);
    assert!(usage.partial_bytes > 0 && usage.unused_bytes == usage.image_bytes);
    assert!(
        store
            .prune(PruneOptions::default(), &uses)
            .unwrap()
            .freed_bytes
            >= 100
    );
    assert_clean(&store);
}

#[test]
fn files_of_dead_processes_are_removed_and_those_of_live_ones_kept() {
    let (_folder, store) = store();
    let digest = import(&store, "one", Some("app"));
    let alive = store.work().unwrap();
    let lease = store.lease(&digest).unwrap();
    // As after kill -9: files without locks.
    let hex = Digest::of(b"x").hex();
    fs::create_dir_all(store.folder("work", "dead/rootfs/etc")).unwrap();
    fs::write(store.folder("work", "dead.lock"), "").unwrap();
    fs::write(store.folder("work", "x.draft"), "").unwrap();
    fs::create_dir(store.folder("work", "unlocked")).unwrap();
    fs::write(store.folder("leases", &format!("{hex}.1")), "").unwrap();
    fs::write(store.folder("tags", &hex), "{}").unwrap();
    let dangling = Name {
        reference: reference("gone"),
        digest: Digest::of(b"y"),
        resolved: Digest::of(b"y"),
    };
    store.set_name(&dangling).unwrap();
    let again = Store::open(&store.inner.path, Limits::default()).unwrap();
    eventually("only a directory and its lock are left", || {
        again.entries("work").unwrap().len() == 2
    });
    assert_eq!(again.entries("leases").unwrap().len(), 1);
    assert_eq!(again.entries("tags").unwrap().len(), 1);
    assert!(alive.path().join("rootfs").exists());
    assert_eq!(again.get("app").unwrap().digest, digest);
    drop((alive, lease));
    assert_clean(&again);
}

#[test]
fn a_store_opens_before_the_files_of_the_dead_are_removed() {
    let (_folder, store) = store();
    let left = store.folder("work", "dead");
    let mut files = 1000;
    let opens_before = |files: u32| {
        fs::create_dir_all(left.join("rootfs")).unwrap();
        for number in 0..files {
            fs::write(left.join(format!("rootfs/{number}")), "").unwrap();
        }
        let again = Store::open(&store.inner.path, Limits::default()).unwrap();
        let opened_before = left.exists();
        again.prune(PruneOptions::default(), &Uses::new()).unwrap();
        assert_clean(&again);
        opened_before
    };
    // The thread that removes them may be faster than this one.
    while !opens_before(files) {
        files *= 2;
        assert!(files < 100_000, "the opening waited for the removal");
    }
}

#[test]
fn a_pull_or_an_import_removes_old_unfinished_downloads() {
    let (_folder, store) = store();
    let hour = Duration::from_hours(1);
    for (name, age) in [("old", PARTIAL_AGE + hour), ("new", hour)] {
        let partial = File::create(store.folder("partial", name)).unwrap();
        partial.set_modified(SystemTime::now() - age).unwrap();
    }
    import(&store, "one", None);
    assert_eq!(store.entries("partial").unwrap(), ["new"]);
}

#[test]
fn the_directory_is_private_and_belongs_to_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    Store::open(&path, Limits::default()).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
    fs::write(path.join("version"), "2\n").unwrap();
    let error = Store::open(&path, Limits::default()).unwrap_err();
    assert_eq!(error.code(), box_rpc::Code::Unsupported);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        let error = Store::open(&path, Limits::default()).unwrap_err();
        assert_eq!(error.code(), box_rpc::Code::Denied);
    }
}

#[test]
fn two_openers_that_import_the_same_image_share_it() {
    let (_folder, store) = store();
    let path = store.inner.path.clone();
    let digests: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|number| {
                let path = &path;
                scope.spawn(move || {
                    let store = Store::open(path, Limits::default()).unwrap();
                    import(&store, "one", Some(&format!("app:{number}")))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    let images = store.list().unwrap();
    assert_eq!((images.len(), images[0].names.len()), (1, 6));
    assert_clean(&store);
}

#[test]
fn a_store_behind_a_link_is_the_same_store() {
    let (folder, store) = store();
    let digest = import(&store, "one", None);
    symlink(&store.inner.path, folder.path().join("link")).unwrap();
    let again = Store::open(&folder.path().join("link"), Limits::default()).unwrap();
    assert_eq!(again.rootfs(&digest), store.rootfs(&digest));
}

#[test]
fn one_damaged_record_hides_no_other_image() {
    let (_folder, store) = store();
    let damaged = import(&store, "damaged", Some("damaged"));
    let whole = import(&store, "whole", Some("whole"));
    std::fs::write(store.image_path(&damaged).join("image.json"), "{").unwrap();
    let listed: Vec<_> = store.list().unwrap();
    let listed: Vec<_> = listed.iter().map(|image| image.digest).collect();
    assert_eq!(listed, [whole]);
    let error = store.get("damaged").unwrap_err().to_string();
    assert!(error.contains("is damaged; remove the image"), "{error}");
}
