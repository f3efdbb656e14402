//! `file.grep`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::{FileGrepParams, FileGrepResult, FileKind, GrepLine};
use globset::GlobSet;
use regex::bytes::{Regex, RegexBuilder};
use rustix::fs::{Mode, OFlags};

use super::error::PathContext;
use super::guest_root::Step;
use super::list::{globs, matches_any};
use super::path::join;
use super::pool::CancelFlag;
use super::replace::read_bounded;
use super::stat::{kind, size};
use super::walk::{Entry, WalkNext, walk};

/// Default and maximum number of matches in one reply.
const MATCHES_DEFAULT: u64 = 1000;
const MATCHES_MAX: u64 = 10_000;

/// Default and maximum size of a searched file. Larger files are skipped.
const FILE_BYTES_DEFAULT: u64 = 4 << 20;
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Bytes searched in one call.
const SEARCHED_BYTES: u64 = 1 << 30;

/// Maximum lines of context around a match.
const CONTEXT_MAX: u32 = 100;

/// Maximum bytes of one line, and of all lines together.
const LINE_BYTES: usize = 2048;
const REPLY_BYTES: usize = 1 << 20;

/// Maximum size of a compiled pattern.
const PATTERN_BYTES: usize = 1 << 20;

/// The parameters and the results of a search.
struct Search {
    pattern: Regex,
    multiline: bool,
    before: usize,
    after: usize,
    /// The number of matches to skip, and to return.
    skip: u64,
    limit: u64,
    max_file_bytes: usize,
    searched: u64,
    bytes: usize,
    found: FileGrepResult,
    /// One file can take minutes, if a pattern spans lines.
    cancel: CancelFlag,
}

/// `file.grep`.
pub(super) fn grep(step: &Step<'_>, params: &FileGrepParams) -> Result<FileGrepResult, BoxError> {
    let path = step.guest_root.path(&params.path, params.expand)?;
    let include = globs("include", &params.include)?;
    let exclude = globs("exclude", &params.exclude)?;
    let mut search = Search::new(params, step.cancel.clone())?;
    let opened = step
        .guest_root
        .open(&path, OFlags::RDONLY)
        .with_path(&path)?;
    let stat = rustix::fs::fstat(&opened).with_path(&path)?;
    match kind(&stat) {
        FileKind::Directory => {
            let complete = walk(step, opened, &path, |entry| {
                visit(&mut search, entry, &path, &include, &exclude)
            })?;
            search.found.truncated |= !complete;
        }
        FileKind::File => search.file(opened, &path)?,
        FileKind::Symlink | FileKind::Other => {
            return Err(rustix::io::Errno::NXIO).with_path(&path);
        }
    }
    Ok(search.found)
}

fn visit(
    search: &mut Search,
    entry: &Entry<'_>,
    base: &str,
    include: &GlobSet,
    exclude: &GlobSet,
) -> Result<WalkNext, BoxError> {
    if matches_any(exclude, entry) {
        return Ok(WalkNext::Skip);
    }
    if kind(&entry.stat) != FileKind::File
        || !(include.is_empty() || matches_any(include, entry))
        || size(&entry.stat) > search.max_file_bytes as u64
    {
        return Ok(WalkNext::Enter);
    }
    if search.searched > SEARCHED_BYTES {
        return Ok(WalkNext::Stop);
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(entry.dir, entry.name, flags, Mode::empty()) {
        let path = join(base, &entry.path);
        search.file(file, &path)?;
    }
    Ok(WalkNext::Enter)
}

impl Search {
    fn new(params: &FileGrepParams, cancel: CancelFlag) -> Result<Self, BoxError> {
        let text = if params.fixed {
            regex::escape(&params.pattern)
        } else {
            params.pattern.clone()
        };
        let pattern = RegexBuilder::new(&text)
            .case_insensitive(params.ignore_case)
            .multi_line(true)
            .dot_matches_new_line(params.multiline)
            .size_limit(PATTERN_BYTES)
            .build()
            .map_err(|error| BoxError::validation(format!("pattern: {error}")))?;
        let max_file_bytes = params.max_file_bytes.unwrap_or(FILE_BYTES_DEFAULT);
        let context = |lines: u32| lines.min(CONTEXT_MAX) as usize;
        Ok(Self {
            pattern,
            multiline: params.multiline,
            before: context(params.before),
            after: context(params.after),
            skip: params.offset,
            limit: params.limit.unwrap_or(MATCHES_DEFAULT).min(MATCHES_MAX),
            max_file_bytes: usize::try_from(max_file_bytes.min(FILE_BYTES_MAX))
                .unwrap_or(usize::MAX),
            searched: 0,
            bytes: 0,
            found: FileGrepResult {
                lines: Vec::new(),
                matches: 0,
                files: 0,
                files_searched: 0,
                truncated: false,
            },
            cancel,
        })
    }

    /// Searches one file. Binary files and files over the limit are skipped.
    fn file(&mut self, file: OwnedFd, path: &str) -> Result<(), BoxError> {
        let stat = rustix::fs::fstat(&file).with_path(path)?;
        if kind(&stat) != FileKind::File {
            return Ok(());
        }
        // Some kernel files cannot be read.
        let Ok(Some(bytes)) = read_bounded(file.into(), self.max_file_bytes, path) else {
            return Ok(());
        };
        self.searched += bytes.len() as u64 + 1;
        if bytes.iter().take(8192).any(|byte| *byte == 0) {
            return Ok(());
        }
        self.found.files_searched += 1;
        self.text(&bytes, path)
    }

    /// Searches a text line by line.
    ///
    /// The guest controls how many lines it has, so they are not collected.
    fn text(&mut self, bytes: &[u8], path: &str) -> Result<(), BoxError> {
        let pattern = self.pattern.clone();
        let mut multiline = self
            .multiline
            .then(|| MultilineMatches::new(&pattern, bytes));
        // `before`: lines that are returned if a match follows. `after`: lines still to return after a match.
        // `reporting`: whether the last match is returned.
        let mut before: VecDeque<(usize, &[u8])> = VecDeque::new();
        let mut after = 0;
        let mut reporting = false;
        let mut is_first = true;
        for (at, (start, line)) in lines(bytes).enumerate() {
            self.cancel.check()?;
            let hit = match &mut multiline {
                Some(matches) => matches.hit_at(start, line),
                None => pattern.is_match(line).then_some(Hit::Begins),
            };
            if hit == Some(Hit::Begins) {
                self.found.files += u64::from(std::mem::take(&mut is_first));
                reporting = self.count_match();
                after = 0;
            }
            if hit.is_some() && reporting {
                for (at, line) in before.drain(..) {
                    self.push_line(path, at, line, true);
                }
                self.push_line(path, at, line, false);
                after = self.after;
            } else if hit.is_none() && after > 0 {
                self.push_line(path, at, line, true);
                after -= 1;
            } else {
                before.push_back((at, line));
                if before.len() > self.before {
                    before.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Counts a match and returns whether it is part of the reply.
    fn count_match(&mut self) -> bool {
        self.found.matches += 1;
        if self.found.matches <= self.skip {
            return false;
        }
        let is_returned = self.found.matches - self.skip <= self.limit && self.bytes <= REPLY_BYTES;
        self.found.truncated |= !is_returned;
        is_returned
    }

    fn push_line(&mut self, path: &str, at: usize, line: &[u8], context: bool) {
        // A match can span any number of lines.
        if self.bytes > REPLY_BYTES {
            self.found.truncated = true;
            return;
        }
        let head = &line[..line.len().min(LINE_BYTES)];
        let text = String::from_utf8_lossy(head).into_owned();
        self.bytes += text.len() + path.len() + 32;
        self.found.lines.push(GrepLine {
            path: path.to_owned(),
            line: at as u64 + 1,
            text,
            context,
        });
    }
}

/// How a line belongs to a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hit {
    Begins,
    Continues,
}

/// Matches that can span lines, in text order.
///
/// Matches that share a line count as one.
struct MultilineMatches<'a> {
    found: std::iter::Peekable<regex::bytes::Matches<'a, 'a>>,
    /// The last byte of the latest match.
    until: Option<usize>,
}

impl<'a> MultilineMatches<'a> {
    fn new(pattern: &'a Regex, text: &'a [u8]) -> Self {
        Self {
            found: pattern.find_iter(text).peekable(),
            until: None,
        }
    }

    /// How the line at this offset belongs to a match.
    fn hit_at(&mut self, start: usize, line: &[u8]) -> Option<Hit> {
        let mut hit = self
            .until
            .filter(|until| *until >= start)
            .map(|_| Hit::Continues);
        // The line terminator belongs to the line.
        while let Some(found) = self
            .found
            .next_if(|found| found.start() <= start + line.len())
        {
            let last = found.end().max(found.start() + 1) - 1;
            hit = hit.or(Some(Hit::Begins));
            self.until = self.until.max(Some(last));
        }
        hit
    }
}

/// The lines of a text without terminators, with their offsets.
///
/// A non-empty rest after the last terminator is a line.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let lines = text.split(|byte| *byte == b'\n');
    let lines = lines.take(if bytes.is_empty() { 0 } else { usize::MAX });
    lines.scan(0, |next, line| {
        let start = *next;
        *next += line.len() + 1;
        Some((start, line))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn searched(text: &str, params: &serde_json::Value) -> (Vec<(u64, bool)>, FileGrepResult) {
        let mut all = json!({"box_id": "s", "path": "/f"});
        for (name, value) in params.as_object().unwrap() {
            all[name] = value.clone();
        }
        let params = serde_json::from_value(all).unwrap();
        let mut search = Search::new(&params, CancelFlag::default()).unwrap();
        search.text(text.as_bytes(), "/f").unwrap();
        let lines = search.found.lines.iter();
        (
            lines.map(|line| (line.line, line.context)).collect(),
            search.found,
        )
    }

    #[test]
    fn a_cancelled_search_ends_within_its_file() {
        let params = json!({"box_id": "s", "path": "/f", "pattern": "x"});
        let cancel = CancelFlag::default();
        let mut search =
            Search::new(&serde_json::from_value(params).unwrap(), cancel.clone()).unwrap();
        search.text(b"x\nx\n", "/f").unwrap();
        cancel.cancel();
        let ended = search.text(b"x\nx\n", "/f");
        assert_eq!(ended.unwrap_err().code(), box_protocol::Code::Cancelled);
        assert_eq!(search.found.matches, 2);
    }

    #[test]
    fn matches_have_context_and_no_line_is_returned_twice() {
        let text = "one\ntwo\nthree\nfour\nTWO five\n";
        let (lines, found) = searched(text, &json!({"pattern": "t[wh]", "before": 1, "after": 1}));
        assert_eq!(lines, [(1, true), (2, false), (3, false), (4, true)]);
        assert_eq!((found.matches, found.files, found.truncated), (2, 1, false));
        let (lines, _) = searched(
            text,
            &json!({"pattern": "two", "ignore_case": true, "after": 9}),
        );
        assert_eq!(lines, [(2, false), (3, true), (4, true), (5, false)]);
        let (lines, _) = searched("a.c\nabc\n", &json!({"pattern": "a.c", "fixed": true}));
        assert_eq!(lines, [(1, false)]);
        let (lines, _) = searched("x\n\ny", &json!({"pattern": "^$"}));
        assert_eq!(lines, [(2, false)]);
    }

    #[test]
    fn a_multiline_match_may_span_lines() {
        let text = "fn a(\n  x,\n)\nfn b()\n";
        let plain = json!({"pattern": r"fn a\(.*x"});
        assert!(searched(text, &plain).0.is_empty());
        let (lines, found) = searched(text, &json!({"pattern": r"fn a\(.*?x", "multiline": true}));
        assert_eq!((lines, found.matches), (vec![(1, false), (2, false)], 1));
        // Two matches that share a line count as one, and context surrounds both.
        let around = json!({"pattern": r"b\nc|c\nd", "multiline": true, "before": 1, "after": 1});
        let (lines, found) = searched("a\nb\nc c\nd\ne\nf\n", &around);
        let expected = [(1, true), (2, false), (3, false), (4, false), (5, true)];
        assert_eq!((lines, found.matches), (expected.to_vec(), 1));
        let (lines, found) = searched("a\n", &json!({"pattern": "^$", "multiline": true}));
        assert_eq!(
            (lines, found.matches),
            (vec![], 0),
            "no line follows the last terminator"
        );
    }

    #[test]
    fn a_file_of_line_terminators_is_searched_within_bounds() {
        let text = "\n".repeat(4 << 20);
        let around = json!({"pattern": "", "before": 9, "after": 9, "limit": 10_000});
        let (lines, found) = searched(&text, &around);
        assert_eq!(
            (lines.len(), found.matches, found.truncated),
            (10_000, 4 << 20, true)
        );
        let (lines, found) = searched(&text, &json!({"pattern": r"\n+", "multiline": true}));
        assert!(lines.len() < 40_000 && found.truncated, "{}", lines.len());
        assert_eq!(found.matches, 1);
    }

    #[test]
    fn matches_beyond_the_limit_are_counted_and_reported() {
        let text = "x\n".repeat(30);
        let (lines, found) = searched(&text, &json!({"pattern": "x", "limit": 3, "offset": 5}));
        assert_eq!(lines, [(6, false), (7, false), (8, false)]);
        assert_eq!((found.matches, found.truncated), (30, true));
        let bad = json!({"box_id": "s", "path": "/f", "pattern": "("});
        let search = |params| {
            let params = serde_json::from_value(params).unwrap();
            Search::new(&params, CancelFlag::default())
        };
        assert!(search(bad).is_err());
        let huge = json!({"box_id": "s", "path": "/f", "pattern": "(a{1000}){1000}"});
        assert!(search(huge).is_err());
    }
}
