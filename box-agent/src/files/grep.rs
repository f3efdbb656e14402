//! `file.grep`.

use std::collections::VecDeque;
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

    /// Searches a text line by line: how many it has is the guest's to say, so no list is made of them.
    fn text(&mut self, bytes: &[u8], path: &str) {
        let pattern = self.pattern.clone();
        let mut spans = self.multiline.then(|| Spans::new(&pattern, bytes));
        // Lines that are told if a match follows; lines that are told because one came before; and whether the last one is told.
        let mut before: VecDeque<(usize, &[u8])> = VecDeque::new();
        let mut after = 0;
        let mut telling = false;
        let mut is_first = true;
        for (at, (start, line)) in lines(bytes).enumerate() {
            let hit = match &mut spans {
                Some(spans) => spans.on(start, line),
                None => pattern.is_match(line).then_some(Hit::Begins),
            };
            if hit == Some(Hit::Begins) {
                self.found.files += u64::from(std::mem::take(&mut is_first));
                telling = self.counts();
                after = 0;
            }
            if hit.is_some() && telling {
                for (at, line) in before.drain(..) {
                    self.tell(path, at, line, true);
                }
                self.tell(path, at, line, false);
                after = self.after;
            } else if hit.is_none() && after > 0 {
                self.tell(path, at, line, true);
                after -= 1;
            } else {
                before.push_back((at, line));
                if before.len() > self.before {
                    before.pop_front();
                }
            }
        }
    }

    /// Counts a match; whether it is to be told.
    fn counts(&mut self) -> bool {
        self.found.matches += 1;
        if self.found.matches <= self.skip {
            return false;
        }
        let told = self.found.matches - self.skip <= self.limit && self.bytes <= ANSWER_BYTES;
        self.found.truncated |= !told;
        told
    }

    fn tell(&mut self, path: &str, at: usize, line: &[u8], context: bool) {
        // A match may have any number of lines.
        if self.bytes > ANSWER_BYTES {
            self.found.truncated = true;
            return;
        }
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

/// How a line belongs to a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hit {
    Begins,
    GoesOn,
}

/// Matches that may go over several lines, in the order of the text. Several that share a line are one.
struct Spans<'a> {
    found: std::iter::Peekable<regex::bytes::Matches<'a, 'a>>,
    /// The last byte of the match that began last.
    until: Option<usize>,
}

impl<'a> Spans<'a> {
    fn new(pattern: &'a Regex, text: &'a [u8]) -> Self {
        Self {
            found: pattern.find_iter(text).peekable(),
            until: None,
        }
    }

    /// How the line that begins here belongs to one.
    fn on(&mut self, start: usize, line: &[u8]) -> Option<Hit> {
        let mut hit = self
            .until
            .filter(|until| *until >= start)
            .map(|_| Hit::GoesOn);
        // The end of a line belongs to it.
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

/// The lines of a text, without their ends, and where each begins. What follows the last end is a line if it is anything.
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
        // Two that share a line are one, and what is around them is told.
        let around = json!({"pattern": r"b\nc|c\nd", "multiline": true, "before": 1, "after": 1});
        let (lines, found) = searched("a\nb\nc c\nd\ne\nf\n", &around);
        let told = [(1, true), (2, false), (3, false), (4, false), (5, true)];
        assert_eq!((lines, found.matches), (told.to_vec(), 1));
        let (lines, found) = searched("a\n", &json!({"pattern": "^$", "multiline": true}));
        assert_eq!(
            (lines, found.matches),
            (vec![], 0),
            "there is no line after the last"
        );
    }

    #[test]
    fn a_file_of_line_ends_is_answered_within_bounds() {
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
