//! `file.grep`.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::{FileGrepParams, FileGrepResult, FileKind, GrepLine};
use globset::GlobSet;
use regex::bytes::{Regex, RegexBuilder};
use rustix::fs::{Mode, OFlags};

use super::error::About;
use super::ground::Step;
use super::list::{fits_any, globs};
use super::path::join;
use super::replace::bounded;
use super::stat::{kind, size};
use super::walk::{Entry, Next, walk};

/// Matches of one answer, unless less is asked for; and the most that may be.
const MATCHES: u64 = 1000;
const MATCHES_MOST: u64 = 10_000;

/// Files larger than this are passed over, unless less is asked for; and the most that may be.
const FILE_BYTES: u64 = 4 << 20;
const FILE_BYTES_MOST: u64 = 16 << 20;

/// Bytes searched in one call.
const SEARCHED_BYTES: u64 = 1 << 30;

/// Lines told around a match.
const CONTEXT: u32 = 100;

/// Bytes told of one line, and of all together.
const LINE_BYTES: usize = 2048;
const ANSWER_BYTES: usize = 1 << 20;

/// The size of a pattern once it is compiled.
const PATTERN_BYTES: usize = 1 << 20;

/// What is looked for, and what was found.
struct Search {
    pattern: Regex,
    multiline: bool,
    before: usize,
    after: usize,
    /// Matches to pass over, and to tell.
    skip: u64,
    limit: u64,
    most: usize,
    searched: u64,
    bytes: usize,
    found: FileGrepResult,
}

/// `file.grep`.
pub(super) fn grep(step: &Step<'_>, params: &FileGrepParams) -> Result<FileGrepResult, BoxError> {
    let path = step.ground.path(&params.path, params.expand)?;
    let include = globs("include", &params.include)?;
    let exclude = globs("exclude", &params.exclude)?;
    let mut search = Search::new(params)?;
    let begin = step.ground.open(&path, OFlags::RDONLY).about(&path)?;
    let stat = rustix::fs::fstat(&begin).about(&path)?;
    match kind(&stat) {
        FileKind::Directory => {
            let whole = walk(step, begin, &path, |entry| {
                visit(&mut search, entry, &path, &include, &exclude)
            })?;
            search.found.truncated |= !whole;
        }
        FileKind::File => search.file(begin, &path)?,
        FileKind::Symlink | FileKind::Other => {
            return Err(rustix::io::Errno::NXIO).about(&path);
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
) -> Result<Next, BoxError> {
    if fits_any(exclude, entry) {
        return Ok(Next::Past);
    }
    if kind(&entry.stat) != FileKind::File
        || !(include.is_empty() || fits_any(include, entry))
        || size(&entry.stat) > search.most as u64
    {
        return Ok(Next::Into);
    }
    if search.searched > SEARCHED_BYTES {
        return Ok(Next::Stop);
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(entry.dir, entry.name, flags, Mode::empty()) {
        let path = join(base, &entry.path);
        search.file(file, &path)?;
    }
    Ok(Next::Into)
}

impl Search {
    fn new(params: &FileGrepParams) -> Result<Self, BoxError> {
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
        let most = params.max_file_bytes.unwrap_or(FILE_BYTES);
        let context = |lines: u32| lines.min(CONTEXT) as usize;
        Ok(Self {
            pattern,
            multiline: params.multiline,
            before: context(params.before),
            after: context(params.after),
            skip: params.offset,
            limit: params.limit.unwrap_or(MATCHES).min(MATCHES_MOST),
            most: usize::try_from(most.min(FILE_BYTES_MOST)).unwrap_or(usize::MAX),
            searched: 0,
            bytes: 0,
            found: FileGrepResult {
                lines: Vec::new(),
                matches: 0,
                files: 0,
                truncated: false,
            },
        })
    }

    /// Searches one file. What is not text, or larger than it may be, is passed over.
    fn file(&mut self, file: OwnedFd, path: &str) -> Result<(), BoxError> {
        let stat = rustix::fs::fstat(&file).about(path)?;
        if kind(&stat) != FileKind::File {
            return Ok(());
        }
        // Some files of the kernel cannot be read.
        let Ok(Some(bytes)) = bounded(file.into(), self.most, path) else {
            return Ok(());
        };
        self.searched += bytes.len() as u64 + 1;
        if bytes.iter().take(8192).any(|byte| *byte == 0) {
            return Ok(());
        }
        self.text(&bytes, path);
        Ok(())
    }

    fn text(&mut self, bytes: &[u8], path: &str) {
        let lines: Vec<&[u8]> = lines(bytes);
        let matches = if self.multiline {
            self.spans(bytes, &lines)
        } else {
            let fits = |(_, line): &(usize, &&[u8])| self.pattern.is_match(line);
            let fitting = lines.iter().enumerate().filter(fits);
            fitting.map(|(at, _)| (at, at)).collect()
        };
        if matches.is_empty() {
            return;
        }
        self.found.files += 1;
        let mut told = 0;
        for (place, (first, last)) in matches.iter().enumerate() {
            self.found.matches += 1;
            if self.found.matches <= self.skip {
                continue;
            }
            if self.found.matches - self.skip > self.limit || self.bytes > ANSWER_BYTES {
                self.found.truncated = true;
                continue;
            }
            // Up to the next match, which tells its own lines.
            let next = matches
                .get(place + 1)
                .map_or(lines.len(), |(next, _)| *next);
            let from = first.saturating_sub(self.before).max(told);
            let to = (last + 1 + self.after)
                .min(next.max(last + 1))
                .min(lines.len());
            for (at, line) in lines.iter().enumerate().take(to).skip(from) {
                let context = !(*first..=*last).contains(&at);
                self.tell(path, at, line, context);
            }
            told = to;
        }
    }

    /// The first and last line of each match that may go over several.
    fn spans(&self, bytes: &[u8], lines: &[&[u8]]) -> Vec<(usize, usize)> {
        let mut starts = Vec::with_capacity(lines.len());
        let mut at = 0;
        for line in lines {
            starts.push(at);
            at += line.len() + 1;
        }
        let line_of = |offset: usize| starts.partition_point(|start| *start <= offset).max(1) - 1;
        let mut spans: Vec<(usize, usize)> = Vec::new();
        for found in self.pattern.find_iter(bytes) {
            let last = found.end().max(found.start() + 1) - 1;
            let (first, last) = (line_of(found.start()), line_of(last));
            // Several on one line are one, as they are line by line.
            match spans.last_mut() {
                Some(before) if before.1 >= first => before.1 = before.1.max(last),
                _ => spans.push((first, last)),
            }
        }
        spans
    }

    fn tell(&mut self, path: &str, at: usize, line: &[u8], context: bool) {
        let shown = &line[..line.len().min(LINE_BYTES)];
        let text = String::from_utf8_lossy(shown).into_owned();
        self.bytes += text.len() + path.len() + 32;
        self.found.lines.push(GrepLine {
            path: path.to_owned(),
            line: at as u64 + 1,
            text,
            context,
        });
    }
}

/// The lines of a text, without their ends. What follows the last end is a line if it is anything.
fn lines(bytes: &[u8]) -> Vec<&[u8]> {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    text.split(|byte| *byte == b'\n').collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn searched(text: &str, params: &serde_json::Value) -> (Vec<(u64, bool)>, FileGrepResult) {
        let mut all = json!({"session_id": "s", "path": "/f"});
        for (name, value) in params.as_object().unwrap() {
            all[name] = value.clone();
        }
        let mut search = Search::new(&serde_json::from_value(all).unwrap()).unwrap();
        search.text(text.as_bytes(), "/f");
        let lines = search.found.lines.iter();
        (
            lines.map(|line| (line.line, line.context)).collect(),
            search.found,
        )
    }

    #[test]
    fn lines_match_with_what_is_around_them_and_none_twice() {
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
    fn a_match_may_span_lines_if_asked() {
        let text = "fn a(\n  x,\n)\nfn b()\n";
        let plain = json!({"pattern": r"fn a\(.*x"});
        assert!(searched(text, &plain).0.is_empty());
        let (lines, found) = searched(text, &json!({"pattern": r"fn a\(.*?x", "multiline": true}));
        assert_eq!((lines, found.matches), (vec![(1, false), (2, false)], 1));
    }

    #[test]
    fn more_than_the_limit_is_counted_and_said() {
        let text = "x\n".repeat(30);
        let (lines, found) = searched(&text, &json!({"pattern": "x", "limit": 3, "offset": 5}));
        assert_eq!(lines, [(6, false), (7, false), (8, false)]);
        assert_eq!((found.matches, found.truncated), (30, true));
        let bad = json!({"session_id": "s", "path": "/f", "pattern": "("});
        assert!(Search::new(&serde_json::from_value(bad).unwrap()).is_err());
        let huge = json!({"session_id": "s", "path": "/f", "pattern": "(a{1000}){1000}"});
        assert!(Search::new(&serde_json::from_value(huge).unwrap()).is_err());
    }
}
