//! `docs/security.md` names existing tests, and all tests of this folder.

use std::path::Path;

const SECURITY: &str = include_str!("../../../../docs/security.md");

/// The tests that the document names: file and function.
fn named() -> Vec<(&'static str, &'static str)> {
    let words = SECURITY.split('`').skip(1).step_by(2);
    let named = words.filter_map(|word| word.split_once("::"));
    named.filter(|(file, _)| is_source(file)).collect()
}

fn is_source(file: &str) -> bool {
    [".rs", ".py"].iter().any(|kind| file.ends_with(kind))
}

/// The names of the tests in a source file.
fn tests_of(source: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut marked = false;
    for line in source.lines().map(str::trim) {
        let python = line.trim_start_matches("async ").strip_prefix("def ");
        if let Some(name) = python.filter(|name| name.starts_with("test_")) {
            found.extend(name.split('(').next());
        } else if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        } else if marked && line.contains("fn ") {
            let name = line
                .split("fn ")
                .nth(1)
                .and_then(|rest| rest.split('(').next());
            found.extend(name);
            marked = false;
        }
    }
    found
}

#[test]
fn every_promise_has_a_test_and_every_test_here_a_promise() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let named = named();
    assert!(named.len() > 50, "control: {}", named.len());
    for (file, test) in &named {
        let source = std::fs::read_to_string(root.join(file));
        let source = source.unwrap_or_else(|_| panic!("{file} does not exist"));
        assert!(
            tests_of(&source).contains(test),
            "{file} has no test {test}"
        );
    }
    for row in SECURITY
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| promise"))
    {
        let names_one = [".rs::", ".py::"].iter().any(|kind| row.contains(kind));
        assert!(names_one, "no test: {row}");
    }
    let here = root.join("tests/tests/native/security");
    for file in std::fs::read_dir(here).unwrap().flatten() {
        let path = file.path();
        if path.extension().is_none_or(|kind| kind != "rs") || path.ends_with("promises.rs") {
            continue;
        }
        for test in tests_of(&std::fs::read_to_string(&path).unwrap()) {
            assert!(
                named.iter().any(|(_, name)| *name == test),
                "no promise: {test}"
            );
        }
    }
}
