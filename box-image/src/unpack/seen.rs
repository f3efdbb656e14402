//! The paths of one layer.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};

use super::path;

/// Set of the paths that a layer has made, with the directories above them.
///
/// It holds keyed hashes of 128 bits instead of names: a million entries take 30 MB whatever their length.
#[derive(Debug, Default)]
pub(super) struct Seen {
    keys: (RandomState, RandomState),
    hashes: HashSet<(u64, u64)>,
}

impl Seen {
    fn hash(&self, path: &[u8]) -> (u64, u64) {
        (self.keys.0.hash_one(path), self.keys.1.hash_one(path))
    }

    pub(super) fn insert(&mut self, path: &[u8]) {
        let ends: Vec<_> = path::ends(path).collect();
        // The directories of a known directory are known too.
        for end in ends.into_iter().rev() {
            if !self.hashes.insert(self.hash(&path[..end])) {
                break;
            }
        }
    }

    pub(super) fn contains(&self, path: &[u8]) -> bool {
        self.hashes.contains(&self.hash(path))
    }
}
