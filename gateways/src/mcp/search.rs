//! Tools that find files: by name, by content, and in a directory.

use std::fmt::Write as _;
use std::ops::Range;

use box_protocol::BoxError;
use box_protocol::actions::{
    FileFind, FileFindParams, FileGrep, FileGrepParams, FileKind, FileList, FileListParams,
    FileStatInfo, GlobMatch,
};
use regex::RegexBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::answer::Answer;
use super::errors::rename;
use super::follow::Progress;
use super::session::Session;

/// The maximum number of files in an answer.
const MAX_FILES: usize = 500;

/// The maximum number of matches in an answer.
const MAX_MATCHES: usize = 200;

/// The maximum length of the text of an answer with lines.
const MAX_TEXT_BYTES: usize = 60_000;

/// The maximum length of a line in an answer.
const MAX_LINE_BYTES: usize = 500;

/// The maximum number of context lines.
const MAX_CONTEXT_LINES: u32 = 20;

/// Files of a box.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct FilesAnswer {
    /// The box.
    r#box: String,
    /// The files, sorted by path.
    files: Vec<FileEntry>,
    /// Whether there are more.
    truncated: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct FileEntry {
    /// The path.
    path: String,
    /// Whether it is a directory.
    directory: bool,
    /// Size in bytes.
    size: u64,
}

impl FilesAnswer {
    fn answer(
        box_id: &str,
        entries: Vec<FileStatInfo>,
        truncated: bool,
    ) -> Result<Answer, BoxError> {
        let files: Vec<_> = entries
            .into_iter()
            .map(|entry| FileEntry {
                directory: entry.kind == FileKind::Directory,
                path: plain(&entry.path),
                size: entry.size,
            })
            .collect();
        let mut text = String::new();
        for file in &files {
            // A write to a string cannot fail.
            let _ = if file.directory {
                writeln!(text, "{}/", file.path)
            } else {
                writeln!(text, "{} ({} bytes)", file.path, file.size)
            };
        }
        let count = files.len();
        let more = if truncated {
            ", there are more; narrow the search"
        } else {
            ""
        };
        let _ = write!(text, "[{count} files{more}; box {box_id}]");
        let r#box = box_id.to_owned();
        let data = Self {
            r#box,
            files,
            truncated,
        };
        Answer::new(text, &data)
    }
}

/// Returns a path without the components `.`, which that of the working directory has.
fn plain(path: &str) -> String {
    path.replace("/./", "/")
}

/// The directory that commands start in.
fn working_directory() -> String {
    ".".to_owned()
}

/// Returns a line, or the part of a long line around a match.
fn around(line: &str, matched: Range<usize>) -> String {
    if line.len() <= MAX_LINE_BYTES {
        return line.to_owned();
    }
    let middle = matched.start + matched.len().min(MAX_LINE_BYTES) / 2;
    let latest = line.len() - MAX_LINE_BYTES;
    let begin = middle.saturating_sub(MAX_LINE_BYTES / 2).min(latest);
    let begin = line.floor_char_boundary(begin);
    let end = line.floor_char_boundary(begin + MAX_LINE_BYTES);
    let mut shown = String::new();
    if begin > 0 {
        shown = format!("[{begin} bytes left out] ");
    }
    shown.push_str(&line[begin..end]);
    // The line itself may be cut, so the number of bytes is not known.
    if end < line.len() {
        shown.push_str(" [more bytes left out]");
    }
    shown
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FindFilesArgs {
    /// Glob pattern, such as `*.rs` for names or `src/**/*.rs` for paths below the directory.
    pattern: String,
    /// Directory to search; the working directory of the box if absent.
    #[serde(default = "working_directory")]
    path: String,
    /// Whether to include names that start with a dot.
    #[serde(default)]
    hidden: bool,
    /// Box to search; the default box if absent.
    r#box: Option<String>,
}

pub(super) async fn find_files(
    session: Session,
    args: FindFilesArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let matches = if args.pattern.contains('/') {
        GlobMatch::Path
    } else {
        GlobMatch::Name
    };
    let params = FileFindParams {
        expand: true,
        r#match: matches,
        hidden: args.hidden,
        limit: Some(MAX_FILES as u64),
        ..FileFindParams::new(box_id.clone(), args.path, args.pattern)
    };
    let found = session.target().forward::<FileFind>(&params).await;
    let found = found.map_err(|error| rename(error, &[("glob", "pattern")]))?;
    FilesAnswer::answer(box_id.as_str(), found.entries, found.truncated)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListFilesArgs {
    /// Directory to list; the working directory of the box if absent.
    #[serde(default = "working_directory")]
    path: String,
    /// Number of levels.
    #[serde(default = "two")]
    depth: u32,
    /// Whether to include names that start with a dot.
    #[serde(default)]
    hidden: bool,
    /// Box to list; the default box if absent.
    r#box: Option<String>,
}

fn two() -> u32 {
    2
}

pub(super) async fn list_files(
    session: Session,
    args: ListFilesArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let params = FileListParams {
        expand: true,
        depth: args.depth.max(1),
        hidden: args.hidden,
        limit: Some(MAX_FILES as u64),
        ..FileListParams::new(box_id.clone(), args.path)
    };
    let found = session.target().forward::<FileList>(&params).await?;
    FilesAnswer::answer(box_id.as_str(), found.entries, found.next.is_some())
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SearchFilesArgs {
    /// Regular expression.
    pattern: String,
    /// File or directory to search; the working directory of the box if absent.
    #[serde(default = "working_directory")]
    path: String,
    /// Only files that match this glob pattern, such as `*.rs`.
    glob: Option<String>,
    /// Number of lines to show before and after each match, at most 20.
    #[serde(default)]
    context: u32,
    /// Whether to ignore case.
    #[serde(default)]
    ignore_case: bool,
    /// Box to search; the default box if absent.
    r#box: Option<String>,
}

/// Lines of files.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct LinesAnswer {
    /// The box.
    r#box: String,
    /// Total number of matches.
    matches: u64,
    /// The matches and their context, sorted by file.
    lines: Vec<FoundLine>,
    /// Whether there are more.
    truncated: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct FoundLine {
    /// The file.
    path: String,
    /// Number of the line, from 1.
    line: u64,
    /// The line; of a long one, the part around the match.
    text: String,
    /// Whether the line is only context of a match.
    context: bool,
}

pub(super) async fn search_files(
    session: Session,
    args: SearchFilesArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let context = args.context.min(MAX_CONTEXT_LINES);
    let pattern = RegexBuilder::new(&args.pattern)
        .case_insensitive(args.ignore_case)
        .build()
        .ok();
    let params = FileGrepParams {
        expand: true,
        ignore_case: args.ignore_case,
        include: args.glob.into_iter().collect(),
        before: context,
        after: context,
        limit: Some(MAX_MATCHES as u64),
        ..FileGrepParams::new(box_id.clone(), args.path, args.pattern)
    };
    let found = session.target().forward::<FileGrep>(&params).await;
    let found = found.map_err(|error| rename(error, &[("include", "glob")]))?;
    let mut text = String::new();
    let mut lines = Vec::new();
    let mut truncated = found.truncated;
    for found in found.lines {
        if text.len() > MAX_TEXT_BYTES {
            truncated = true;
            break;
        }
        let mark = if found.context { '-' } else { ':' };
        let matched = pattern.as_ref().and_then(|it| it.find(&found.text));
        let shown = around(&found.text, matched.map_or(0..0, |matched| matched.range()));
        let (path, line) = (plain(&found.path), found.line);
        // A write to a string cannot fail.
        let _ = writeln!(text, "{path}{mark}{line}{mark}{shown}");
        lines.push(FoundLine {
            path,
            line,
            text: shown,
            context: found.context,
        });
    }
    let (matches, files) = (found.matches, found.files);
    let more = if truncated {
        ", not all shown; narrow the search"
    } else {
        ""
    };
    let _ = write!(
        text,
        "[{matches} matches in {files} files{more}; box {box_id}]"
    );
    let data = LinesAnswer {
        r#box: box_id.as_str().to_owned(),
        matches,
        lines,
        truncated,
    };
    Answer::new(text, &data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_cut_around_its_match() {
        assert_eq!(around("short", 0..5), "short");
        let line = format!("{}needle{}", "ä".repeat(400), "b".repeat(700));
        let at = line.find("needle").unwrap();
        let shown = around(&line, at..at + 6);
        assert!(shown.contains("needle"), "{shown}");
        assert!(shown.starts_with('[') && shown.ends_with(" [more bytes left out]"));
        assert!(shown.len() < MAX_LINE_BYTES + 60);
        let last = around(&line, line.len() - 1..line.len());
        assert!(last.ends_with('b') && last.starts_with('['), "{last}");
    }
}
