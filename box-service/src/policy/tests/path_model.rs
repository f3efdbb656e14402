//! Host paths with links, against a model of a file system.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

use super::*;
use crate::paths;

/// A node of the model, which does not use the tested code.
#[derive(Debug, Clone)]
enum Node {
    Directory,
    File,
    Link { from_top: bool, to: Vec<String> },
}

type Tree = BTreeMap<Vec<String>, Node>;

/// Returns the directory a model path leads to, resolved as a kernel does.
fn model_directory(tree: &Tree, path: &[String]) -> Option<Vec<String>> {
    let mut at: Vec<String> = Vec::new();
    let mut left: Vec<String> = path.iter().rev().cloned().collect();
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == ".." {
            at.pop()?;
            continue;
        }
        at.push(name);
        match tree.get(&at)? {
            Node::Directory => {}
            Node::File => return None,
            Node::Link { from_top, to } => {
                links += 1;
                if links > 40 {
                    return None;
                }
                at.pop();
                if *from_top {
                    at.clear();
                }
                left.extend(to.iter().rev().cloned());
            }
        }
    }
    Some(at)
}

fn names(most: usize) -> impl Strategy<Value = Vec<String>> {
    // `a` is a prefix of `ab`: a text comparison would place one inside the other.
    let name = prop::sample::select(vec!["a", "ab", "b", "c", ".."]);
    prop::collection::vec(name.prop_map(str::to_owned), 1..=most)
}

fn tree() -> impl Strategy<Value = Tree> {
    let node = prop_oneof![
        4 => Just(Node::Directory),
        1 => Just(Node::File),
        3 => (any::<bool>(), names(3)).prop_map(|(from_top, to)| Node::Link { from_top, to }),
    ];
    prop::collection::vec((names(3), node), 1..14).prop_map(|wanted| {
        let mut tree = Tree::new();
        for (path, node) in wanted {
            let path: Vec<String> = path.into_iter().filter(|name| name != "..").collect();
            let parent_is_directory = path.len() < 2
                || matches!(tree.get(&path[..path.len() - 1]), Some(Node::Directory));
            if !path.is_empty() && parent_is_directory && !tree.contains_key(&path) {
                tree.insert(path, node);
            }
        }
        tree
    })
}

fn build(tree: &Tree, top: &Path) {
    for (path, node) in tree {
        let at = top.join(path.join("/"));
        match node {
            Node::Directory => fs::create_dir(at).unwrap(),
            Node::File => fs::write(at, "").unwrap(),
            Node::Link { from_top, to } => {
                let to = to.join("/");
                let to = if *from_top { top.join(to) } else { to.into() };
                symlink(to, at).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_host_path_is_allowed_exactly_where_the_model_says_so(
        tree in tree(), roots in prop::collection::vec(names(2), 1..3), requested in prop::collection::vec(names(4), 1..8),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        build(&tree, &top);
        // Unresolvable roots allow nothing; leaving them out keeps the model small.
        let roots: Vec<_> = roots.iter().filter(|root| model_directory(&tree, root).is_some()).collect();
        let model_roots: Vec<_> = roots.iter().filter_map(|root| model_directory(&tree, root)).collect();
        let mut policy = policy(built_in("default"), &[]);
        for root in &roots {
            let root = paths::resolve_configured("root", &top.join(root.join("/")), true).unwrap();
            policy.allowed_host_mount_roots.push(root);
        }
        for path in requested {
            let expected = model_directory(&tree, &path)
                .filter(|real| model_roots.iter().any(|root| real.starts_with(root)));
            let text = top.join(path.join("/")).to_str().unwrap().to_owned();
            let draft = SpecDraft::new("s").host_path(text.clone());
            let inputs = paths::resolve(host_paths(&policy, &draft));
            let decided = decide(&policy, draft, &inputs).ok().map(|decision| decision.spec.host_path.unwrap());
            let expected = expected.map(|real| real.iter().fold(top.clone(), |at, name| at.join(name)));
            prop_assert_eq!(decided, expected.map(|path| path.to_str().unwrap().to_owned()), "{}", text);
        }
    }
}
