//! `/v1/file/str_replace_editor`: the editor tool of models.

use std::fmt::Write as _;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{FileKind, FilePart, FileReplace, FileReplaceParams, FileWriteParams};
use box_protocol::{BoxError, BoxId, Code, Invalid};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::envelope::{Failure, done};
use super::file::{checked, read_text, write_bytes, write_data};
use super::search::{entries, is_directory, stat_of};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};

/// The levels of a directory that a view shows.
const VIEW_DEPTH: u32 = 2;

#[derive(Debug, Deserialize)]
pub(super) struct EditRequest {
    command: Command,
    path: String,
    file_text: Option<String>,
    old_str: Option<String>,
    new_str: Option<String>,
    insert_line: Option<u64>,
    view_range: Option<Vec<i64>>,
    replace_mode: Option<ReplaceMode>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Command {
    View,
    Create,
    StrReplace,
    Insert,
    UndoEdit,
}

/// Which occurrences a replacement changes; without one, there must be exactly one.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum ReplaceMode {
    All,
    First,
    Last,
}

/// The file before and after an edit.
struct Edit {
    output: String,
    existed: bool,
    old: Option<String>,
    new: Option<String>,
}

/// Views or edits a file.
pub(super) async fn edit(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<EditRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let edit = match request.command {
        Command::View => view(&context, &box_id, &path, request.view_range.as_deref()).await?,
        Command::Create => {
            let text = required("file_text", request.file_text)?;
            create(&context, &box_id, &path, text).await?
        }
        Command::StrReplace => {
            let old = required("old_str", request.old_str)?;
            let new = request.new_str.unwrap_or_default();
            replace(&context, &box_id, &path, &old, &new, request.replace_mode).await?
        }
        Command::Insert => {
            let line = required("insert_line", request.insert_line)?;
            let text = required("new_str", request.new_str)?;
            insert(&context, &box_id, &path, line, &text).await?
        }
        Command::UndoEdit => {
            let message = "undo_edit: not supported by this server; write the earlier content, or restore a checkpoint of the box";
            return Err(Failure::unserved(message));
        }
    };
    Ok(done(json!({
        "output": edit.output,
        "path": path,
        "prev_exist": edit.existed,
        "old_content": edit.old,
        "new_content": edit.new,
    })))
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, Invalid> {
    value.ok_or_else(|| Invalid::new(field, "missing"))
}

async fn view(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    range: Option<&[i64]>,
) -> Result<Edit, Failure> {
    let mut output = String::new();
    if is_directory(context, box_id, path).await {
        let (found, _) = entries(context, box_id, path, VIEW_DEPTH, false).await?;
        let _ = writeln!(output, "{path}");
        for entry in found {
            let end = match entry.kind {
                FileKind::Directory => "/",
                _ => "",
            };
            let _ = writeln!(output, "{}{end}", entry.path);
        }
    } else {
        let (part, first) = lines_of(range)?;
        let text = read_text(context, box_id, path, part).await?;
        output = numbered(&text, first);
    }
    Ok(Edit {
        output,
        existed: true,
        old: None,
        new: None,
    })
}

/// Returns the part of a range of lines, and the number of its first line.
fn lines_of(range: Option<&[i64]>) -> Result<(Option<FilePart>, u64), Invalid> {
    let Some(range) = range else {
        return Ok((None, 1));
    };
    let invalid = || {
        Invalid::new(
            "view_range",
            "must be [first, last], from 1; last may be -1",
        )
    };
    let [first, last] = *range else {
        return Err(invalid());
    };
    let start = u64::try_from(first).map_err(|_| invalid())?;
    let end = match last {
        -1 => None,
        last => Some(u64::try_from(last).map_err(|_| invalid())?),
    };
    if start == 0 || end.is_some_and(|end| end < start) {
        return Err(invalid());
    }
    Ok((Some(FilePart::Lines { start, end }), start))
}

/// Writes each line with its number.
fn numbered(text: &str, first: u64) -> String {
    let mut output = String::with_capacity(text.len() + text.len() / 4);
    for (number, line) in (first..).zip(text.lines()) {
        let _ = writeln!(output, "{number:>6}\t{line}");
    }
    output
}

async fn create(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    text: String,
) -> Result<Edit, Failure> {
    let existed = stat_of(context, box_id, path).await.is_some();
    // The old content may be no text, or too long for an answer.
    let old = read_text(context, box_id, path, None).await.ok();
    write_bytes(context, box_id, path, text.clone().into_bytes(), false).await?;
    Ok(Edit {
        output: format!("File created successfully at: {path}"),
        existed,
        old,
        new: Some(text),
    })
}

async fn replace(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    old: &str,
    new: &str,
    mode: Option<ReplaceMode>,
) -> Result<Edit, Failure> {
    if old.is_empty() {
        return Err(Invalid::new("old_str", "must not be empty").into());
    }
    let mut params = FileReplaceParams::new(box_id.clone(), path, old, new);
    match mode {
        None => params.expect = Some(1),
        Some(ReplaceMode::All) => {}
        Some(ReplaceMode::First) => params.first_only = true,
        Some(ReplaceMode::Last) => {
            return replace_last(context, box_id, path, old, new).await;
        }
    }
    let before = read_text(context, box_id, path, None).await?;
    let runtime = context.runtime();
    let replaced = runtime
        .forward::<FileReplace>(&context.caller, &params)
        .await;
    let count = replaced.map_err(not_unique)?.count;
    if count == 0 {
        return Err(absent());
    }
    let after = read_text(context, box_id, path, None).await?;
    Ok(replaced_in(path, count, before, after))
}

/// Replaces the last occurrence, which the agent does not know.
async fn replace_last(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    old: &str,
    new: &str,
) -> Result<Edit, Failure> {
    // A change after this is a conflict.
    let version = stat_of(context, box_id, path).await.map(|stat| stat.etag);
    let before = read_text(context, box_id, path, None).await?;
    let at = before.rfind(old).ok_or_else(absent)?;
    let mut after = before.clone();
    after.replace_range(at..at + old.len(), new);
    let params = FileWriteParams {
        if_match: version,
        ..FileWriteParams::new(box_id.clone(), path, Bytes::new())
    };
    let written = write_data(context, params, after.clone().into_bytes()).await;
    written.map_err(not_unique)?;
    Ok(replaced_in(path, 1, before, after))
}

fn replaced_in(path: &str, count: u64, before: String, after: String) -> Edit {
    Edit {
        output: format!("The file {path} has been edited: {count} replaced."),
        existed: true,
        old: Some(before),
        new: Some(after),
    }
}

fn absent() -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, "old_str: not in the file")
}

/// A client must not repeat a replacement that is not unique, or of a file that has changed.
fn not_unique(error: BoxError) -> Failure {
    match error.code() {
        Code::Conflict => Failure::new(StatusCode::BAD_REQUEST, error.message()),
        _ => error.into(),
    }
}

async fn insert(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    line: u64,
    text: &str,
) -> Result<Edit, Failure> {
    let before = read_text(context, box_id, path, None).await?;
    let mut text = text.to_owned();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    let params = FileReplaceParams {
        insert_line: Some(line),
        ..FileReplaceParams::new(box_id.clone(), path, "", text)
    };
    let runtime = context.runtime();
    runtime
        .forward::<FileReplace>(&context.caller, &params)
        .await?;
    let after = read_text(context, box_id, path, None).await?;
    Ok(Edit {
        output: format!("The file {path} has been edited."),
        existed: true,
        old: Some(before),
        new: Some(after),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_has_line_numbers_from_its_first_line() {
        assert_eq!(numbered("a\nb\n", 9), "     9\ta\n    10\tb\n");
        let (part, first) = lines_of(Some(&[2, -1])).unwrap();
        let expected = FilePart::Lines {
            start: 2,
            end: None,
        };
        assert_eq!((part, first), (Some(expected), 2));
        for wrong in [&[][..], &[1], &[0, 2], &[3, 2], &[-1, 2], &[1, -2]] {
            assert!(lines_of(Some(wrong)).is_err(), "{wrong:?}");
        }
    }
}
