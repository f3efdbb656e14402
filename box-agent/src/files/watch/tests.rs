//! Watches on a directory of the test machine.
//!
//! The tests poll while nothing else changes the directory.

use std::fs;
use std::path::Path;

use super::super::Files;
use super::super::tests::{files_in, step};
use super::super::write::write;
use box_protocol::actions::FileWriteParams;
use box_protocol::{Blob, BoxId};

use super::*;

struct Watch {
    root: tempfile::TempDir,
    files: Files,
    watched: WatchedTree,
}

impl Watch {
    fn start(path: &str, recursive: bool, before: impl FnOnce(&Path)) -> Self {
        Self::try_start(path, recursive, before).unwrap()
    }

    fn try_start(
        path: &str,
        recursive: bool,
        before: impl FnOnce(&Path),
    ) -> Result<Self, BoxError> {
        let root = tempfile::tempdir().unwrap();
        before(root.path());
        let files = files_in(root.path());
        let params = AgentWatch {
            path: path.to_owned(),
            recursive,
            expand: false,
        };
        let (watched, _) = step(&files.guest_root, |step| WatchedTree::open(step, &params))?;
        Ok(Self {
            root,
            files,
            watched,
        })
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        self.root.path().join(path)
    }

    /// Polls until no more events are pending.
    ///
    /// Each change has its kind, its path and its previous path.
    fn poll(&mut self) -> (Vec<String>, bool) {
        let mut lines = Vec::new();
        loop {
            let batch = step(&self.files.guest_root, |step| self.watched.poll(step)).unwrap();
            lines.extend_from_slice(&batch.lines);
            if batch.drained || batch.ended {
                let changes =
                    serde_json::Deserializer::from_slice(&lines).into_iter::<FileChange>();
                let changes = changes.map(|change| {
                    let FileChange {
                        kind, path, from, ..
                    } = change.unwrap();
                    let from = from.map(|from| format!(" from {from}")).unwrap_or_default();
                    format!("{kind:?} {path}{from}")
                });
                return (changes.collect(), batch.ended);
            }
        }
    }

    /// Polls once, and returns the lines.
    fn lines(&mut self) -> Vec<serde_json::Value> {
        let batch = step(&self.files.guest_root, |step| self.watched.poll(step)).unwrap();
        let lines = serde_json::Deserializer::from_slice(&batch.lines).into_iter();
        lines.collect::<Result<_, _>>().unwrap()
    }

    fn changes(&mut self) -> Vec<String> {
        let (changes, ended) = self.poll();
        assert!(!ended, "{changes:?}");
        changes
    }
}

/// What changed, of each change.
#[test]
fn a_change_says_whether_it_is_of_content_or_of_attributes() {
    use std::os::unix::fs::PermissionsExt as _;

    let mut watch = Watch::start("/", false, |_| {});
    fs::write(watch.at("a"), "x").unwrap();
    fs::set_permissions(watch.at("a"), fs::Permissions::from_mode(0o600)).unwrap();
    let params = FileWriteParams::new(BoxId::new("s").unwrap(), "/b", Blob::from(b"x".to_vec()));
    step(&watch.files.guest_root, |step| write(step, &params)).unwrap();
    let (created, moved) = (("created", false, false), ("created", true, true));
    let (content, attributes) = (("changed", true, false), ("changed", false, true));
    let named = |change: &serde_json::Value, name: &str| change["path"] == name;
    let seen = watch.lines();
    let of = |name: &str| {
        let seen = seen.iter().filter(|change| named(change, name));
        let parts = seen.map(|change| {
            let kind = change["kind"].as_str().unwrap();
            (
                kind,
                change["content"] == true,
                change["attributes"] == true,
            )
        });
        parts.collect::<Vec<_>>()
    };
    assert_eq!(of("/a"), [created, content, attributes]);
    assert_eq!(of("/b"), [moved], "a file that the agent has written");
}

#[test]
fn a_watch_reports_the_entries_of_its_directory_only() {
    let mut watch = Watch::start("/", false, |root| fs::create_dir(root.join("d")).unwrap());
    fs::write(watch.at("a"), "x").unwrap();
    assert_eq!(watch.changes(), ["Created /a", "Changed /a"]);
    fs::write(watch.at("d/inner"), "x").unwrap();
    fs::write(watch.at(".box-tmp-1"), "x").unwrap();
    assert_eq!(watch.changes(), Vec::<String>::new());
    fs::rename(watch.at(".box-tmp-1"), watch.at("a")).unwrap();
    fs::rename(watch.at("a"), watch.at("b")).unwrap();
    fs::rename(watch.at("b"), watch.at("d/b")).unwrap();
    fs::remove_dir_all(watch.at("d")).unwrap();
    assert_eq!(
        watch.changes(),
        ["Created /a", "Moved /b from /a", "Removed /b", "Removed /d"]
    );
}

/// Simulates a parent that moves while the agent scans it.
#[test]
fn a_directory_that_moves_while_it_is_scanned_is_watched_at_its_new_path() {
    let mut watch = Watch::start("/", true, |root| {
        fs::create_dir_all(root.join("a/b")).unwrap();
    });
    fs::write(watch.at("a/f"), "").unwrap();
    assert_eq!(watch.changes(), ["Created /a/f"]);
    let watched = &mut watch.watched;
    let inner = watched.dirs.iter().find(|(_, dir)| dir.ends_with('b'));
    let inner = *inner.unwrap().0;
    inotify::remove_watch(&watched.inotify, inner).unwrap();
    watched.dirs.remove(&inner);
    watched.vanished = true;
    fs::write(watch.at("a/b/g"), "").unwrap();
    fs::rename(watch.at("a"), watch.at("c")).unwrap();
    assert_eq!(watch.changes(), ["Moved /c from /a", "Created /c/b/g"]);
    fs::write(watch.at("c/b/h"), "").unwrap();
    fs::rename(watch.at("c"), watch.at("d")).unwrap();
    assert_eq!(watch.changes(), ["Created /c/b/h", "Moved /d from /c"]);
}

#[test]
fn created_moved_and_removed_directories_are_tracked() {
    let mut watch = Watch::start("/w", true, |root| {
        fs::create_dir_all(root.join("w/old")).unwrap();
        fs::create_dir_all(root.join("else/x")).unwrap();
    });
    fs::write(watch.at("w/old/f"), "").unwrap();
    fs::create_dir_all(watch.at("w/new/deep")).unwrap();
    fs::write(watch.at("w/new/deep/f"), "").unwrap();
    assert_eq!(
        watch.changes(),
        [
            "Created /w/old/f",
            "Created /w/new",
            "Created /w/new/deep",
            "Created /w/new/deep/f"
        ]
    );
    fs::rename(watch.at("w/new"), watch.at("w/old/moved")).unwrap();
    fs::write(watch.at("w/old/moved/deep/g"), "").unwrap();
    assert_eq!(
        watch.changes(),
        [
            "Moved /w/old/moved from /w/new",
            "Created /w/old/moved/deep/g"
        ]
    );
    fs::rename(watch.at("w/old"), watch.at("else/old")).unwrap();
    assert_eq!(watch.changes(), ["Removed /w/old"]);
    fs::write(watch.at("else/old/moved/unseen"), "").unwrap();
    fs::rename(watch.at("else/x"), watch.at("w/x")).unwrap();
    assert_eq!(watch.changes(), ["Created /w/x"]);
    fs::write(watch.at("w/x/f"), "").unwrap();
    assert_eq!(watch.changes(), ["Created /w/x/f"]);
    assert_eq!(watch.watched.dirs.len(), 2, "{:?}", watch.watched.dirs);
}

#[test]
fn one_file_may_be_replaced_until_it_is_removed() {
    let mut watch = Watch::start("/f", true, |root| fs::write(root.join("f"), "").unwrap());
    fs::write(watch.at("other"), "x").unwrap();
    fs::rename(watch.at("other"), watch.at("f")).unwrap();
    assert_eq!(watch.changes(), ["Created /f"]);
    fs::write(watch.at("f"), "y").unwrap();
    assert!(watch.changes().iter().all(|change| change == "Changed /f"));
    fs::remove_file(watch.at("f")).unwrap();
    assert_eq!(watch.poll(), (vec!["Removed /f".to_owned()], true));
}

#[test]
fn a_watch_ends_when_its_target_is_removed() {
    for end in [
        (|watch: &Watch| fs::remove_dir(watch.at("w")).unwrap()) as fn(&Watch),
        |watch| fs::rename(watch.at("w"), watch.at("v")).unwrap(),
    ] {
        let mut watch = Watch::start("/w", true, |root| fs::create_dir(root.join("w")).unwrap());
        end(&watch);
        assert_eq!(watch.poll(), (vec!["Removed /w".to_owned()], true));
    }
}

#[test]
fn an_overflow_is_reported_and_the_watch_continues() {
    let mut watch = Watch::start("/", true, |_| {});
    let max = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let max: usize = max.trim().parse().unwrap();
    for number in 0..=max {
        fs::write(watch.at(&format!("f{}", number % 7)), "x").unwrap();
        fs::remove_file(watch.at(&format!("f{}", number % 7))).unwrap();
    }
    fs::create_dir_all(watch.at("missed/inner")).unwrap();
    let batch = watch.changes();
    assert_eq!(batch.last().map(String::as_str), Some("Overflow /"));
    assert!(batch.len() <= max + 1, "{}", batch.len());
    fs::write(watch.at("missed/inner/f"), "").unwrap();
    assert_eq!(watch.changes(), ["Created /missed/inner/f"]);
}

#[test]
fn the_number_of_directories_is_limited() {
    let fill = |root: &Path, number: usize| {
        for number in 0..number {
            fs::create_dir(root.join(number.to_string())).unwrap();
        }
    };
    let error = Watch::try_start("/", true, |root| fill(root, DIRECTORIES_MAX)).err();
    let error = error.unwrap();
    assert_eq!(error.code(), Code::Capacity);
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.limit.as_deref(), Some("watched_directories"));
    let mut watch = Watch::start("/", true, |root| fill(root, DIRECTORIES_MAX - 1));
    fs::create_dir(watch.at("more")).unwrap();
    assert_eq!(watch.changes(), ["Created /more", "Overflow /more"]);
}

#[test]
fn a_large_tree_that_is_moved_in_is_watched_and_reported_within_bounds() {
    let mut watch = Watch::start("/w", true, |root| {
        fs::create_dir(root.join("w")).unwrap();
        fs::create_dir_all(root.join("tree/inner")).unwrap();
        for number in 0..20_000 {
            fs::write(root.join(format!("tree/{number:0>100}")), "").unwrap();
        }
    });
    fs::rename(watch.at("tree"), watch.at("w/tree")).unwrap();
    let changes = watch.changes();
    assert!(changes.len() < 10_000, "{}", changes.len());
    assert_eq!(changes.first().unwrap(), "Created /w/tree");
    assert_eq!(changes.last().unwrap(), "Overflow /w/tree");
    fs::write(watch.at("w/tree/inner/f"), "").unwrap();
    assert_eq!(watch.changes(), ["Created /w/tree/inner/f"]);
}

#[test]
fn directories_beyond_the_path_limit_are_not_watched_and_that_is_reported() {
    let mut watch = Watch::start("/", true, |_| {});
    let name = "d".repeat(200);
    let step = |dir: &OwnedFd, name: &str| {
        super::super::guest_root::make_dir(dir, name, 0o755)
            .unwrap()
            .0
    };
    let flags = rustix::fs::OFlags::PATH;
    let root = rustix::fs::open(watch.root.path(), flags, rustix::fs::Mode::empty()).unwrap();
    // Created elsewhere and moved in as a whole.
    let outside = tempfile::tempdir_in(watch.root.path().parent().unwrap()).unwrap();
    let other = rustix::fs::open(outside.path(), flags, rustix::fs::Mode::empty()).unwrap();
    let mut dir = step(&other, "deep");
    for _ in 0..30 {
        dir = step(&dir, &name);
    }
    rustix::fs::renameat(&other, "deep", &root, "deep").unwrap();
    let changes = watch.changes();
    assert_eq!(
        changes.last().unwrap(),
        "Overflow /deep",
        "{}",
        changes.len()
    );
    assert!(
        watch
            .watched
            .dirs
            .values()
            .all(|dir| dir.len() <= PATH_BYTES)
    );
}
