//! `file.list` and `file.find`.

use std::cmp::Ordering;

use box_protocol::BoxError;
use box_protocol::actions::{
    FileFindParams, FileFindResult, FileKind, FileListParams, FileListResult, FileStatInfo,
    GlobMatch,
};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::ground::{Ground, Step};
use super::path::{is_within, join};
use super::stat::{info, kind, target};
use super::walk::{Entry, Next, walk};

/// Entries of one answer, unless less is asked for; and the most that may be.
const ENTRIES: u64 = 1000;
const ENTRIES_MOST: u64 = 10_000;

/// About how many bytes of entries one answer may have.
const ANSWER_BYTES: usize = 2 << 20;

/// What an entry takes beside its path.
const ENTRY_BYTES: usize = 256;

/// Patterns of one call, and the length of each.
const GLOBS: usize = 64;
const GLOB_BYTES: usize = 1024;

/// What is collected, up to a limit.
struct Found<'a> {
    ground: &'a Ground,
    base: &'a str,
    entries: Vec<FileStatInfo>,
    limit: u64,
    bytes: usize,
}

impl<'a> Found<'a> {
    fn new(ground: &'a Ground, base: &'a str, limit: Option<u64>) -> Self {
        Self {
            ground,
            base,
            entries: Vec::new(),
            limit: limit.unwrap_or(ENTRIES).min(ENTRIES_MOST),
            bytes: 0,
        }
    }

    /// Whether there was room for it.
    fn add(&mut self, entry: &Entry<'_>) -> bool {
        if self.entries.len() as u64 >= self.limit || self.bytes > ANSWER_BYTES {
            return false;
        }
        let path = join(self.base, &entry.path);
        self.bytes += path.len() + ENTRY_BYTES;
        let mut info = info(&self.ground.guest, path, &entry.stat);
        if info.kind == FileKind::Symlink {
            info.target = target(entry.dir, entry.name);
        }
        self.entries.push(info);
        true
    }
}

/// `file.list`.
pub(super) fn list(step: &Step<'_>, params: &FileListParams) -> Result<FileListResult, BoxError> {
    let path = step.ground.path(&params.path, params.expand)?;
    if params.depth == 0 {
        return Err(BoxError::validation("depth: 1 is the directory alone"));
    }
    let after = match &params.after {
        None => None,
        Some(after) => Some(
            below(&path, after)
                .ok_or_else(|| BoxError::validation("after: not a path below the directory"))?,
        ),
    };
    let dir = step.ground.open_dir(&path)?;
    let mut found = Found::new(step.ground, &path, params.limit);
    let mut more = false;
    let mut visit = |entry: &Entry<'_>| {
        if !params.hidden && entry.name.starts_with('.') {
            return Ok(Next::Past);
        }
        let on = if entry.depth < params.depth as usize {
            Next::Into
        } else {
            Next::Past
        };
        if let Some(after) = after
            && order(&entry.path, after) != Ordering::Greater
        {
            // What it asks to go on after may be in here.
            return Ok(if is_within(after, &entry.path) {
                on
            } else {
                Next::Past
            });
        }
        if !fits_kind(&params.kinds, entry) {
            return Ok(on);
        }
        if !found.add(entry) {
            more = true;
            return Ok(Next::Stop);
        }
        Ok(on)
    };
    walk(step, dir, &path, &mut visit)?;
    let last = found.entries.last().filter(|_| more);
    Ok(FileListResult {
        next: last.map(|entry| entry.path.clone()),
        entries: found.entries,
    })
}

/// `file.find`.
pub(super) fn find(step: &Step<'_>, params: &FileFindParams) -> Result<FileFindResult, BoxError> {
    let path = step.ground.path(&params.path, params.expand)?;
    let wanted = globs("glob", std::slice::from_ref(&params.glob))?;
    let exclude = globs("exclude", &params.exclude)?;
    let dir = step.ground.open_dir(&path)?;
    let mut found = Found::new(step.ground, &path, params.limit);
    let visit = |entry: &Entry<'_>| {
        if !params.hidden && entry.name.starts_with('.') || fits_any(&exclude, entry) {
            return Ok(Next::Past);
        }
        let fits = match params.r#match {
            GlobMatch::Path => wanted.is_match(&entry.path),
            GlobMatch::Name => wanted.is_match(entry.name),
        };
        if fits && fits_kind(&params.kinds, entry) && !found.add(entry) {
            return Ok(Next::Stop);
        }
        Ok(Next::Into)
    };
    let whole = walk(step, dir, &path, visit)?;
    Ok(FileFindResult {
        entries: found.entries,
        truncated: !whole,
    })
}

/// Whether a path or its last name fits a pattern.
pub(super) fn fits_any(globs: &GlobSet, entry: &Entry<'_>) -> bool {
    globs.is_match(&entry.path) || globs.is_match(entry.name)
}

fn fits_kind(kinds: &[FileKind], entry: &Entry<'_>) -> bool {
    kinds.is_empty() || kinds.contains(&kind(&entry.stat))
}

/// The patterns of shells: `*` stays within a name, `**` does not.
pub(super) fn globs(field: &str, patterns: &[String]) -> Result<GlobSet, BoxError> {
    let wrong = |why: &str| BoxError::validation(format!("{field}: {why}"));
    if patterns.len() > GLOBS {
        return Err(wrong("too many patterns"));
    }
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        if pattern.is_empty() || pattern.len() > GLOB_BYTES {
            return Err(wrong("empty or too long"));
        }
        let glob = GlobBuilder::new(pattern)
            .literal_separator(true)
            .build()
            .map_err(|error| wrong(&error.kind().to_string()))?;
        set.add(glob);
    }
    set.build()
        .map_err(|error| wrong(&error.kind().to_string()))
}

/// The order of a walk: name by name.
fn order(a: &str, b: &str) -> Ordering {
    a.split('/').cmp(b.split('/'))
}

/// A path as seen from a directory.
fn below<'a>(dir: &str, path: &'a str) -> Option<&'a str> {
    let rest = path.strip_prefix(dir.trim_end_matches('/'))?;
    rest.strip_prefix('/').filter(|rest| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stay_within_a_name_unless_they_say_otherwise() {
        let fits =
            |glob: &str, path: &str| globs("glob", &[glob.to_owned()]).unwrap().is_match(path);
        assert!(fits("*.rs", "a.rs") && !fits("*.rs", "a/b.rs"));
        assert!(fits("**/*.rs", "a/b.rs") && fits("**/*.rs", "b.rs"));
        assert!(fits("a/{b,c}", "a/c") && fits("[a-c]?", "bz"));
        for wrong in ["", "[", "{a"] {
            assert!(globs("glob", &[wrong.to_owned()]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_order_is_that_of_a_walk() {
        assert_eq!(order("a/b", "a-b"), Ordering::Less);
        assert_eq!(order("a", "a/b"), Ordering::Less);
        assert!(is_within("a/b", "a") && !is_within("ab", "a") && is_within("a", "a"));
        assert_eq!(below("/", "/a"), Some("a"));
        assert_eq!(below("/a/", "/a/b"), Some("b"));
        assert_eq!(below("/a", "/ab"), None);
    }
}
