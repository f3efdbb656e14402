//! `file.list`, `file.find` and `file.grep`: looking for files. Errors as for the rest of `file.*`.

use serde::{Deserialize, Serialize};

use super::files::file_params;
use super::{FileKind, FileStatInfo, actions};

actions! {
    /// What is in a directory, and below it down to a depth.
    FileList = "file.list": FileListParams => FileListResult;

    /// Files whose path or name fits a pattern.
    FileFind = "file.find": FileFindParams => FileFindResult;

    /// Lines that fit a pattern.
    FileGrep = "file.grep": FileGrepParams => FileGrepResult;
}

file_params! {
    /// Parameters of `file.list`.
    FileListParams {
        /// The directory.
        path: String,
        /// How far down; 1 for the directory alone.
        #[serde(default = "one")]
        depth: u32,
        /// Names that begin with a dot, too.
        #[serde(default)]
        hidden: bool,
        /// Only these kinds; empty for any.
        #[serde(default)]
        kinds: Vec<FileKind>,
        /// At most so many.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
        /// After this path.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<String>,
    }

    /// Parameters of `file.find`.
    FileFindParams {
        /// The directory.
        path: String,
        /// The pattern.
        glob: String,
        /// What it must fit.
        #[serde(default)]
        r#match: GlobMatch,
        /// Names that begin with a dot, too.
        #[serde(default)]
        hidden: bool,
        /// Only these kinds; empty for any.
        #[serde(default)]
        kinds: Vec<FileKind>,
        /// Not what fits one of these.
        #[serde(default)]
        exclude: Vec<String>,
        /// At most so many.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
    }

    /// Parameters of `file.grep`.
    FileGrepParams {
        /// The file or directory.
        path: String,
        /// The pattern.
        pattern: String,
        /// It is plain text.
        #[serde(default)]
        fixed: bool,
        /// Capitals or not is all the same.
        #[serde(default)]
        ignore_case: bool,
        /// It may span lines.
        #[serde(default)]
        multiline: bool,
        /// Only in files that fit one of these; empty for any.
        #[serde(default)]
        include: Vec<String>,
        /// Not in files that fit one of these.
        #[serde(default)]
        exclude: Vec<String>,
        /// Lines to tell before each match.
        #[serde(default)]
        before: u32,
        /// Lines to tell after each match.
        #[serde(default)]
        after: u32,
        /// At most so many matches.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
        /// After so many.
        #[serde(default)]
        offset: u64,
        /// Pass over larger files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_file_bytes: Option<u64>,
    }
}

fn one() -> u32 {
    1
}

/// What a pattern must fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GlobMatch {
    /// The path below the directory.
    #[default]
    Path,
    /// The last part of it.
    Name,
}

/// Answer to `file.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileListResult {
    /// What is there, by path.
    pub entries: Vec<FileStatInfo>,
    /// Give this as `after` for more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Answer to `file.find`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileFindResult {
    /// What fits, by path.
    pub entries: Vec<FileStatInfo>,
    /// There is more.
    pub truncated: bool,
}

/// A line that fits, or one near it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepLine {
    /// The file.
    pub path: String,
    /// The line's number, from 1.
    pub line: u64,
    /// The line.
    pub text: String,
    /// Only told for its neighbour's sake.
    #[serde(default)]
    pub context: bool,
}

/// Answer to `file.grep`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileGrepResult {
    /// The lines, by file and number.
    pub lines: Vec<GrepLine>,
    /// Matches in all.
    pub matches: u64,
    /// Files with one.
    pub files: u64,
    /// There is more.
    pub truncated: bool,
}
