//! `/v1/file`: searches by content.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::Invalid;
use box_protocol::actions::{FileGrep, FileGrepParams, FileKind, GrepLine};
use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::{Failure, done};
use super::file::checked;
use super::search::{MAX_ENTRIES, PAGE, stat_of};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};

/// The matches of a search, unless a request says so.
const GREP_RESULTS: u64 = 500;

/// The maximum size of a file that the agent searches.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

#[derive(Debug, Deserialize)]
pub(super) struct GrepRequest {
    path: String,
    pattern: String,
    include: Option<Vec<String>>,
    exclude: Option<Vec<String>>,
    case_insensitive: Option<bool>,
    fixed_strings: Option<bool>,
    context_before: Option<u32>,
    context_after: Option<u32>,
    max_results: Option<u64>,
    max_file_size: Option<String>,
    multiline: Option<bool>,
    offset: Option<u64>,
    r#type: Option<String>,
    recursive: Option<bool>,
}

/// Finds lines by a pattern.
pub(super) async fn grep(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<GrepRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let mut include = request.include.unwrap_or_default();
    if let Some(kind) = &request.r#type {
        include.extend(globs_of(kind)?.iter().map(|glob| (*glob).to_owned()));
    }
    let mut exclude = request.exclude.unwrap_or_default();
    if request.recursive == Some(false) {
        exclude.push("*/**".to_owned());
    }
    let (before, after) = (
        request.context_before.unwrap_or_default(),
        request.context_after.unwrap_or_default(),
    );
    let size = request.max_file_size.as_deref();
    let params = FileGrepParams {
        fixed: request.fixed_strings.unwrap_or_default(),
        ignore_case: request.case_insensitive.unwrap_or_default(),
        multiline: request.multiline.unwrap_or_default(),
        include,
        exclude,
        before,
        after,
        limit: Some(request.max_results.unwrap_or(GREP_RESULTS).clamp(1, PAGE)),
        offset: request.offset.unwrap_or_default(),
        max_file_bytes: Some(file_size(size.unwrap_or("1M"))?),
        ..FileGrepParams::new(box_id, path, request.pattern.clone())
    };
    let runtime = context.runtime();
    let found = runtime
        .forward::<FileGrep>(&context.caller, &params)
        .await?;
    let lines = &found.lines;
    let matches: Vec<Value> = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| !line.context)
        .map(|(at, line)| matched(lines, at, line, before, after))
        .collect();
    Ok(done(json!({
        "path": request.path,
        "pattern": request.pattern,
        "match_count": matches.len(),
        "matches": matches,
        "files_searched": found.files_searched,
        "files_matched": found.files,
        "truncated": found.truncated,
    })))
}

/// Describes a match with the lines around it, which precede and follow it in the list.
fn matched(lines: &[GrepLine], at: usize, line: &GrepLine, before: u32, after: u32) -> Value {
    let is_near = |other: &&GrepLine, reach: u32| {
        other.path == line.path && other.line.abs_diff(line.line) <= u64::from(reach)
    };
    let mut earlier: Vec<&str> = lines[..at]
        .iter()
        .rev()
        .take_while(|other| is_near(other, before))
        .map(|other| other.text.as_str())
        .collect();
    earlier.reverse();
    let later: Vec<&str> = lines[at + 1..]
        .iter()
        .take_while(|other| is_near(other, after))
        .map(|other| other.text.as_str())
        .collect();
    json!({
        "file": line.path,
        "line_number": line.line,
        "line_content": line.text,
        "context_before": earlier,
        "context_after": later,
    })
}

/// Parses a size such as `512K` or `1M`.
fn file_size(text: &str) -> Result<u64, Invalid> {
    let invalid = || Invalid::new("max_file_size", "must be a size such as 512K or 1M");
    let upper = text.trim().to_ascii_uppercase();
    let upper = upper.strip_suffix('B').unwrap_or(&upper);
    let (number, unit) = match upper.char_indices().last() {
        Some((at, 'K')) => (&upper[..at], 1024),
        Some((at, 'M')) => (&upper[..at], 1024 * 1024),
        Some((at, 'G')) => (&upper[..at], 1024 * 1024 * 1024),
        _ => (upper, 1),
    };
    let number: u64 = number.trim().parse().map_err(|_| invalid())?;
    let bytes = number.checked_mul(unit).ok_or_else(invalid)?;
    Ok(bytes.clamp(1, MAX_FILE_BYTES))
}

/// Returns the patterns of a kind of files.
fn globs_of(kind: &str) -> Result<&'static [&'static str], Invalid> {
    Ok(match kind {
        "py" | "python" => &["*.py", "*.pyi"],
        "js" | "javascript" => &["*.js", "*.jsx", "*.mjs", "*.cjs"],
        "ts" | "typescript" => &["*.ts", "*.tsx", "*.mts", "*.cts"],
        "rust" => &["*.rs"],
        "go" => &["*.go"],
        "java" => &["*.java"],
        "c" => &["*.c", "*.h"],
        "cpp" => &["*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.h"],
        "html" => &["*.html", "*.htm"],
        "css" => &["*.css", "*.scss"],
        "json" => &["*.json"],
        "yaml" => &["*.yaml", "*.yml"],
        "toml" => &["*.toml"],
        "md" | "markdown" => &["*.md", "*.markdown"],
        "sh" => &["*.sh", "*.bash"],
        "txt" => &["*.txt"],
        _ => {
            let rule = format!("{kind:?} is unknown; use include instead");
            return Err(Invalid::new("type", rule));
        }
    })
}

#[derive(Debug, Deserialize)]
pub(super) struct SearchRequest {
    file: String,
    regex: String,
}

/// Finds lines of one file.
pub(super) async fn search(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<SearchRequest>,
) -> Result<Response, Failure> {
    let path = checked("file", &request.file)?;
    if let Some(stat) = stat_of(&context, &box_id, &path).await {
        if stat.kind == FileKind::Directory {
            return Err(Invalid::new("file", "must be a regular file").into());
        }
        if stat.size > MAX_FILE_BYTES {
            let message = format!(
                "file: {} bytes, at most {MAX_FILE_BYTES} are searched; run grep instead",
                stat.size
            );
            return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
    }
    let mut params = FileGrepParams {
        limit: Some(PAGE),
        max_file_bytes: Some(MAX_FILE_BYTES),
        ..FileGrepParams::new(box_id, path, request.regex)
    };
    let (mut numbers, mut matches) = (Vec::new(), Vec::new());
    let is_cut = loop {
        let runtime = context.runtime();
        let found = runtime
            .forward::<FileGrep>(&context.caller, &params)
            .await?;
        params.offset += found.lines.len() as u64;
        let is_over = found.lines.is_empty() || matches.len() >= MAX_ENTRIES;
        for line in found.lines {
            numbers.push(line.line);
            matches.push(line.text);
        }
        if !found.truncated || is_over {
            break found.truncated;
        }
    };
    Ok(done(json!({
        "file": request.file,
        "matches": matches,
        "line_numbers": numbers,
        "truncated": is_cut,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_or_none() {
        for (text, bytes) in [
            ("1M", 1_048_576),
            ("512k", 524_288),
            ("10", 10),
            ("2KB", 2048),
        ] {
            assert_eq!(file_size(text).unwrap(), bytes, "{text}");
        }
        assert_eq!(file_size("9G").unwrap(), 16 * 1024 * 1024);
        for text in ["", "M", "-1", "x", "1.5M", "99999999999999999999G"] {
            assert!(file_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_match_has_the_lines_around_it() {
        let line = |number, context| GrepLine {
            path: "/f".to_owned(),
            line: number,
            text: format!("line {number}"),
            context,
        };
        let lines = [
            line(1, true),
            line(2, false),
            line(3, true),
            line(7, true),
            line(8, false),
        ];
        let found = matched(&lines, 1, &lines[1], 1, 1);
        assert_eq!(found["context_before"], json!(["line 1"]));
        assert_eq!(found["context_after"], json!(["line 3"]));
        let found = matched(&lines, 4, &lines[4], 1, 0);
        assert_eq!(found["context_before"], json!(["line 7"]));
    }
}
