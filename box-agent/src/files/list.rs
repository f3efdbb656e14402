//! `file.list` and `file.find`.

use std::cmp::Ordering;

use box_protocol::BoxError;
use box_protocol::actions::{
    FileFindParams, FileFindResult, FileKind, FileListParams, FileListResult, FileStatInfo,
    GlobMatch,
};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::guest_root::{GuestRoot, Step};
use super::path::{is_within, join};
use super::stat::{created_at, info, kind, target};
use super::walk::{Entry, WalkNext, walk};
use super::xattrs;

/// Default and maximum number of entries in one reply.
const ENTRIES_DEFAULT: u64 = 1000;
const ENTRIES_MAX: u64 = 10_000;

/// Approximate maximum bytes of the entries in one reply.
const REPLY_BYTES: usize = 2 << 20;

/// Bytes of an entry besides its path.
const ENTRY_BYTES: usize = 256;

/// Maximum number of patterns in one call, and the maximum length of each.
const GLOBS_MAX: usize = 64;
const GLOB_BYTES: usize = 1024;

/// The entries of a reply, up to the limits.
struct Listing<'a> {
    guest_root: &'a GuestRoot,
    base: &'a str,
    entries: Vec<FileStatInfo>,
    limit: u64,
    bytes: usize,
}

impl<'a> Listing<'a> {
    fn new(guest_root: &'a GuestRoot, base: &'a str, limit: Option<u64>) -> Self {
        Self {
            guest_root,
            base,
            entries: Vec::new(),
            limit: limit.unwrap_or(ENTRIES_DEFAULT).min(ENTRIES_MAX),
            bytes: 0,
        }
    }

    /// Adds an entry if it fits, and returns whether it did.
    fn add(&mut self, entry: &Entry<'_>) -> bool {
        if self.entries.len() as u64 >= self.limit || self.bytes > REPLY_BYTES {
            return false;
        }
        let path = join(self.base, &entry.path);
        self.bytes += path.len() + ENTRY_BYTES;
        let mut info = info(&self.guest_root.guest, path, &entry.stat);
        info.created_at = created_at(entry.dir, entry.name);
        match info.kind {
            FileKind::Symlink => info.target = target(entry.dir, entry.name),
            FileKind::File | FileKind::Directory => {
                info.xattrs = xattrs::read(entry.dir, entry.name);
                self.bytes += xattrs::bytes(&info.xattrs);
            }
            FileKind::Other => {}
        }
        self.entries.push(info);
        true
    }
}

/// `file.list`.
pub(super) fn list(step: &Step<'_>, params: &FileListParams) -> Result<FileListResult, BoxError> {
    let path = step.guest_root.path(&params.path, params.expand)?;
    if params.depth == 0 {
        return Err(BoxError::validation("depth: must be at least 1"));
    }
    let after = match &params.after {
        None => None,
        Some(after) => Some(
            relative_to(&path, after)
                .ok_or_else(|| BoxError::validation("after: not a path below the directory"))?,
        ),
    };
    let dir = step.guest_root.open_dir(&path)?;
    let mut listing = Listing::new(step.guest_root, &path, params.limit);
    let mut more = false;
    let mut visit = |entry: &Entry<'_>| {
        if !params.hidden && entry.name.starts_with('.') {
            return Ok(WalkNext::Skip);
        }
        let next = if entry.depth < params.depth as usize {
            WalkNext::Enter
        } else {
            WalkNext::Skip
        };
        if let Some(after) = after
            && walk_order(&entry.path, after) != Ordering::Greater
        {
            // The path to continue after may be inside this directory.
            return Ok(if is_within(after, &entry.path) {
                next
            } else {
                WalkNext::Skip
            });
        }
        if !matches_kind(&params.kinds, entry) {
            return Ok(next);
        }
        if !listing.add(entry) {
            more = true;
            return Ok(WalkNext::Stop);
        }
        Ok(next)
    };
    walk(step, dir, &path, &mut visit)?;
    let last = listing.entries.last().filter(|_| more);
    Ok(FileListResult {
        next: last.map(|entry| entry.path.clone()),
        entries: listing.entries,
    })
}

/// `file.find`.
pub(super) fn find(step: &Step<'_>, params: &FileFindParams) -> Result<FileFindResult, BoxError> {
    let path = step.guest_root.path(&params.path, params.expand)?;
    let matcher = globs("glob", std::slice::from_ref(&params.glob))?;
    let exclude = globs("exclude", &params.exclude)?;
    let dir = step.guest_root.open_dir(&path)?;
    let mut listing = Listing::new(step.guest_root, &path, params.limit);
    let visit = |entry: &Entry<'_>| {
        if !params.hidden && entry.name.starts_with('.') || matches_any(&exclude, entry) {
            return Ok(WalkNext::Skip);
        }
        let is_match = match params.r#match {
            GlobMatch::Path => matcher.is_match(&entry.path),
            GlobMatch::Name => matcher.is_match(entry.name),
        };
        if is_match && matches_kind(&params.kinds, entry) && !listing.add(entry) {
            return Ok(WalkNext::Stop);
        }
        Ok(WalkNext::Enter)
    };
    let complete = walk(step, dir, &path, visit)?;
    Ok(FileFindResult {
        entries: listing.entries,
        truncated: !complete,
    })
}

/// Whether a pattern matches the path or its last name.
pub(super) fn matches_any(globs: &GlobSet, entry: &Entry<'_>) -> bool {
    globs.is_match(&entry.path) || globs.is_match(entry.name)
}

fn matches_kind(kinds: &[FileKind], entry: &Entry<'_>) -> bool {
    kinds.is_empty() || kinds.contains(&kind(&entry.stat))
}

/// Compiles shell patterns: `*` stays within a name, `**` does not.
pub(super) fn globs(field: &str, patterns: &[String]) -> Result<GlobSet, BoxError> {
    let invalid = |why: &str| BoxError::validation(format!("{field}: {why}"));
    if patterns.len() > GLOBS_MAX {
        return Err(invalid(&format!("more than {GLOBS_MAX} patterns")));
    }
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        if pattern.is_empty() || pattern.len() > GLOB_BYTES {
            return Err(invalid(&format!(
                "a pattern must have 1 to {GLOB_BYTES} bytes"
            )));
        }
        let glob = GlobBuilder::new(pattern)
            .literal_separator(true)
            .build()
            .map_err(|error| invalid(&error.kind().to_string()))?;
        set.add(glob);
    }
    set.build()
        .map_err(|error| invalid(&error.kind().to_string()))
}

/// The order of a walk: name by name.
fn walk_order(a: &str, b: &str) -> Ordering {
    a.split('/').cmp(b.split('/'))
}

/// A path relative to a directory.
fn relative_to<'a>(dir: &str, path: &'a str) -> Option<&'a str> {
    let rest = path.strip_prefix(dir.trim_end_matches('/'))?;
    rest.strip_prefix('/').filter(|rest| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_star_stays_within_a_name() {
        let matches =
            |glob: &str, path: &str| globs("glob", &[glob.to_owned()]).unwrap().is_match(path);
        assert!(matches("*.rs", "a.rs") && !matches("*.rs", "a/b.rs"));
        assert!(matches("**/*.rs", "a/b.rs") && matches("**/*.rs", "b.rs"));
        assert!(matches("a/{b,c}", "a/c") && matches("[a-c]?", "bz"));
        for invalid in ["", "[", "{a"] {
            assert!(globs("glob", &[invalid.to_owned()]).is_err(), "{invalid}");
        }
    }

    #[test]
    fn the_order_is_the_walk_order() {
        assert_eq!(walk_order("a/b", "a-b"), Ordering::Less);
        assert_eq!(walk_order("a", "a/b"), Ordering::Less);
        assert!(is_within("a/b", "a") && !is_within("ab", "a") && is_within("a", "a"));
        assert_eq!(relative_to("/", "/a"), Some("a"));
        assert_eq!(relative_to("/a/", "/a/b"), Some("b"));
        assert_eq!(relative_to("/a", "/ab"), None);
    }
}
