//! `file.list`, `file.find` and `file.grep`: searching for files. Errors as for the rest of
//! `file.*`.

use serde::{Deserialize, Serialize};

use super::files::file_params;
use super::{FileKind, FileStatInfo, actions};

actions! {
    /// Lists a directory down to a depth.
    FileList = "file.list": FileListParams => FileListResult;

    /// Finds files by a glob pattern on their path or name.
    FileFind = "file.find": FileFindParams => FileFindResult;

    /// Finds lines that match a pattern.
    FileGrep = "file.grep": FileGrepParams => FileGrepResult;
}

file_params! {
    /// Parameters of `file.list`.
    FileListParams (
        /// The directory.
        path: String,
    ) {
        /// Number of levels to list; 1, the directory itself, if absent.
        #[serde(default = "one")]
        depth: u32 = 1,
        /// Whether to include names that start with a dot; `false` if absent.
        #[serde(default)]
        hidden: bool,
        /// Only these kinds; any if empty.
        #[serde(default)]
        kinds: Vec<FileKind>,
        /// Maximum number of entries, at most 10000; 1000 if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
        /// Start after this path; the `next` of the previous result.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<String>,
    }

    /// Parameters of `file.find`.
    FileFindParams (
        /// The directory to search.
        path: String,
        /// The glob pattern.
        glob: String,
    ) {
        /// What the pattern must match; `path` if absent.
        #[serde(default)]
        r#match: GlobMatch,
        /// Whether to include names that start with a dot; `false` if absent.
        #[serde(default)]
        hidden: bool,
        /// Only these kinds; any if empty.
        #[serde(default)]
        kinds: Vec<FileKind>,
        /// Glob patterns of entries to leave out.
        #[serde(default)]
        exclude: Vec<String>,
        /// Maximum number of entries, at most 10000; 1000 if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
    }

    /// Parameters of `file.grep`.
    FileGrepParams (
        /// The file or directory to search.
        path: String,
        /// The regular expression.
        pattern: String,
    ) {
        /// Whether the pattern is plain text instead of a regular expression; `false` if absent.
        #[serde(default)]
        fixed: bool,
        /// Whether to ignore case; `false` if absent.
        #[serde(default)]
        ignore_case: bool,
        /// Whether a match may span lines; `false` if absent.
        #[serde(default)]
        multiline: bool,
        /// Only files that match one of these glob patterns; any if empty.
        #[serde(default)]
        include: Vec<String>,
        /// Glob patterns of files to leave out.
        #[serde(default)]
        exclude: Vec<String>,
        /// Number of context lines before each match; 0 if absent.
        #[serde(default)]
        before: u32,
        /// Number of context lines after each match; 0 if absent.
        #[serde(default)]
        after: u32,
        /// Maximum number of matches, at most 10000; 1000 if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<u64>,
        /// Number of matches to skip; 0 if absent.
        #[serde(default)]
        offset: u64,
        /// Skip larger files; size in bytes, at most 16 MiB, 4 MiB if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_file_bytes: Option<u64>,
    }
}

fn one() -> u32 {
    1
}

/// What a glob pattern must match.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GlobMatch {
    /// The path below the searched directory.
    #[default]
    Path,
    /// The last component of the path.
    Name,
}

/// Result of `file.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileListResult {
    /// The entries, sorted by path.
    pub entries: Vec<FileStatInfo>,
    /// The value of `after` for the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Result of `file.find`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileFindResult {
    /// The entries that match, sorted by path.
    pub entries: Vec<FileStatInfo>,
    /// Whether more entries match.
    pub truncated: bool,
}

/// A line that matches, or a context line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepLine {
    /// The file.
    pub path: String,
    /// The line number, from 1.
    pub line: u64,
    /// The line.
    pub text: String,
    /// Whether the line is only context of a match.
    #[serde(default)]
    pub context: bool,
}

/// Result of `file.grep`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileGrepResult {
    /// The lines, sorted by file and line number.
    pub lines: Vec<GrepLine>,
    /// Total number of matches.
    pub matches: u64,
    /// Number of files with a match.
    pub files: u64,
    /// Number of files that the agent searched.
    #[serde(default)]
    pub files_searched: u64,
    /// Whether more lines match.
    pub truncated: bool,
}
