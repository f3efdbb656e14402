//! The store after `kill -9` at random points.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use box_catalog::{Catalog, Error, Limits};
use box_protocol::catalog::{CatalogKind, ItemState};

/// How often the program is killed.
const ROUNDS: u64 = 100;

/// The items by name: their label and their tags.
type Items = BTreeMap<String, (String, BTreeSet<String>)>;

fn start(directory: &Path, seed: u64) -> Child {
    Command::new(env!("CARGO_BIN_EXE_box-catalog-run"))
        .arg(directory)
        .arg(seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Applies one change of the program to the expected items.
fn apply(items: &mut Items, words: &[&str]) {
    match words {
        ["put", name] => {
            items.insert((*name).to_owned(), (String::new(), BTreeSet::new()));
        }
        ["delete", name] => {
            items.remove(*name);
        }
        ["label", name, value] => (*value).clone_into(&mut items.get_mut(*name).unwrap().0),
        ["tag", name, tag] => {
            for (_, tags) in items.values_mut() {
                tags.remove(*tag);
            }
            items.get_mut(*name).unwrap().1.insert((*tag).to_owned());
        }
        _ => panic!("{words:?}"),
    }
}

fn stored(catalog: &Catalog) -> Items {
    let items = catalog.all(CatalogKind::Volume).into_iter();
    items
        .map(|item| {
            assert_eq!(item.state, ItemState::Ready);
            let value = item.labels.get("value").cloned().unwrap_or_default();
            let tags = item.tags.iter().map(ToString::to_string).collect();
            (item.name.to_string(), (value, tags))
        })
        .collect()
}

#[test]
fn no_acknowledged_change_is_lost_and_nothing_half_made_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let mut expected = Items::new();
    let (mut changes, mut interrupted) = (0, 0);
    for round in 0..ROUNDS {
        let mut child = start(&path, round * 7919 + 13);
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "open\n", "round {round}");
        // The kill comes at a different point of a different change in each round.
        let mut rest = String::new();
        for _ in 0..round % 9 {
            output.read_line(&mut rest).unwrap();
        }
        std::thread::sleep(Duration::from_micros((round * 1733) % 15_000));
        child.kill().unwrap();
        child.wait().unwrap();
        output.read_to_string(&mut rest).unwrap();
        let mut errors = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut errors)
            .unwrap();
        assert_eq!(errors, "", "round {round}");
        // A line without its end was being printed.
        let complete = rest.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let mut begun = None;
        for line in complete.lines() {
            let words: Vec<_> = line.split(' ').collect();
            match words.split_first() {
                Some((&"try", change)) => begun = Some(change.to_vec()),
                Some((&"ok", change)) => {
                    apply(&mut expected, change);
                    (begun, changes) = (None, changes + 1);
                }
                _ => panic!("{line}"),
            }
        }
        let catalog = Catalog::open(&path, Limits::default()).unwrap();
        let found = stored(&catalog);
        interrupted += catalog.interrupted().len();
        assert!(catalog.damaged(CatalogKind::Volume).is_empty());
        if found != expected {
            let begun = begun.unwrap_or_else(|| panic!("{found:?} is not {expected:?}"));
            apply(&mut expected, &begun);
            assert_eq!(found, expected, "round {round}, after {begun:?}");
        }
        let left = std::fs::read_dir(path.join("volume")).unwrap().flatten();
        let left = left.filter(|entry| entry.path().extension().is_some_and(|end| end != "json"));
        assert_eq!(left.count(), 0, "round {round}");
    }
    eprintln!("{changes} changes in {ROUNDS} rounds; {interrupted} unfinished items removed");
}

#[test]
fn a_second_process_cannot_open_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let open = Catalog::open(directory.path(), Limits::default()).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_box-catalog-run"))
        .arg(directory.path())
        .arg("1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("Locked"), "{text}");
    assert_eq!(
        Catalog::open(directory.path(), Limits::default()).unwrap_err(),
        Error::Locked
    );
    drop(open);
    let mut child = start(directory.path(), 1);
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    let refused = Catalog::open(directory.path(), Limits::default());
    assert_eq!(refused.unwrap_err(), Error::Locked);
    child.kill().unwrap();
    child.wait().unwrap();
    Catalog::open(directory.path(), Limits::default()).unwrap();
}
