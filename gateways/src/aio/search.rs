//! `/v1/file`: lists of files, and searches by name.

use std::cmp::Ordering;

use axum::response::Response;
use box_protocol::BoxId;
use box_protocol::actions::{
    FileFind, FileFindParams, FileKind, FileList, FileListParams, FileOutcome, FileStat,
    FileStatInfo, FileStatParams,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::envelope::{Failure, done};
use super::file::checked;
use crate::http::body::Json;
use crate::http::context::{Context, InBox};

/// The levels of a recursive list without a depth.
const MAX_DEPTH: u32 = 64;

/// The maximum number of entries in an answer.
pub(super) const MAX_ENTRIES: usize = 50_000;

/// The entries of one page, and the most that a search returns.
pub(super) const PAGE: u64 = 10_000;

/// The files of a search by name, unless a request says so.
const GLOB_RESULTS: u64 = 5000;

/// Returns whether a path is a directory, behind links.
pub(super) async fn is_directory(context: &Context, box_id: &BoxId, path: &str) -> bool {
    let found = stat_of(context, box_id, path).await;
    found.is_some_and(|stat| stat.kind == FileKind::Directory)
}

/// Returns the attributes of what a path names, behind links.
pub(super) async fn stat_of(context: &Context, box_id: &BoxId, path: &str) -> Option<FileStatInfo> {
    let params = FileStatParams {
        follow: true,
        ..FileStatParams::new(box_id.clone(), vec![path.to_owned()])
    };
    let runtime = context.runtime();
    let found = runtime.forward::<FileStat>(&context.caller, &params).await;
    let found = found
        .ok()
        .and_then(|found| found.paths.into_values().next());
    match found {
        Some(FileOutcome::Stat(stat)) => Some(stat),
        _ => None,
    }
}

/// Returns the last component of a path.
fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns the extension of a name with its dot, if any.
fn extension_of(name: &str) -> Option<&str> {
    let dot = name.rfind('.').filter(|dot| *dot > 0)?;
    name.get(dot..)
}

/// The order of a list.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    #[default]
    #[serde(alias = "path")]
    Name,
    Size,
    #[serde(alias = "mtime", alias = "modified_time")]
    Modified,
    Type,
}

fn sort(entries: &mut [FileStatInfo], by: Option<Order>, descending: Option<bool>) {
    let Some(by) = by else {
        if descending == Some(true) {
            entries.reverse();
        }
        return;
    };
    let compare = |one: &FileStatInfo, other: &FileStatInfo| -> Ordering {
        let by_path = one.path.cmp(&other.path);
        match by {
            Order::Name => by_path,
            Order::Size => one.size.cmp(&other.size).then(by_path),
            Order::Modified => one.modified_at.cmp(&other.modified_at).then(by_path),
            Order::Type => {
                let key = |entry: &FileStatInfo| {
                    let extension = extension_of(name_of(&entry.path)).unwrap_or_default();
                    (entry.kind != FileKind::Directory, extension.to_owned())
                };
                key(one).cmp(&key(other)).then(by_path)
            }
        }
    };
    entries.sort_by(compare);
    if descending == Some(true) {
        entries.reverse();
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct ListRequest {
    path: String,
    recursive: Option<bool>,
    show_hidden: Option<bool>,
    file_types: Option<Vec<String>>,
    max_depth: Option<u32>,
    include_size: Option<bool>,
    include_permissions: Option<bool>,
    sort_by: Option<Order>,
    sort_desc: Option<bool>,
}

/// A file in a list.
#[derive(Debug, Serialize)]
struct ListedFile {
    name: String,
    path: String,
    is_directory: bool,
    size: Option<u64>,
    modified_time: String,
    permissions: Option<String>,
    extension: Option<String>,
}

/// A list, which may have many files.
#[derive(Debug, Serialize)]
struct Listed {
    path: String,
    total_count: usize,
    directory_count: usize,
    file_count: usize,
    files: Vec<ListedFile>,
    truncated: bool,
}

/// Lists a directory.
pub(super) async fn list(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<ListRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let depth = if request.recursive.unwrap_or_default() {
        request.max_depth.unwrap_or(MAX_DEPTH).clamp(1, MAX_DEPTH)
    } else {
        1
    };
    let is_hidden_shown = request.show_hidden.unwrap_or(true);
    let (mut entries, is_cut) = entries(&context, &box_id, &path, depth, is_hidden_shown).await?;
    if let Some(types) = &request.file_types {
        entries.retain(|entry| {
            let extension = extension_of(name_of(&entry.path));
            let matches = |wanted: &String| {
                extension.is_some_and(|found| {
                    found.trim_start_matches('.') == wanted.trim_start_matches('.')
                })
            };
            entry.kind == FileKind::Directory || types.iter().any(matches)
        });
    }
    sort(&mut entries, request.sort_by, request.sort_desc);
    let with_size = request.include_size.unwrap_or(true);
    let with_mode = request.include_permissions.unwrap_or_default();
    let described = |entry: FileStatInfo| {
        let name = name_of(&entry.path);
        let is_directory = entry.kind == FileKind::Directory;
        ListedFile {
            name: name.to_owned(),
            is_directory,
            size: (with_size && !is_directory).then_some(entry.size),
            modified_time: entry.modified_at.to_string(),
            permissions: with_mode.then(|| format!("{:o}", entry.mode & 0o7777)),
            extension: extension_of(name)
                .filter(|_| !is_directory)
                .map(str::to_owned),
            path: entry.path,
        }
    };
    let files: Vec<ListedFile> = entries.into_iter().map(described).collect();
    let directories = files.iter().filter(|file| file.is_directory).count();
    Ok(done(Listed {
        path: request.path,
        total_count: files.len(),
        directory_count: directories,
        file_count: files.len() - directories,
        files,
        truncated: is_cut,
    }))
}

/// Returns the entries of a directory, and whether there are more.
pub(super) async fn entries(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    depth: u32,
    hidden: bool,
) -> Result<(Vec<FileStatInfo>, bool), Failure> {
    let mut params = FileListParams {
        depth,
        hidden,
        limit: Some(PAGE),
        ..FileListParams::new(box_id.clone(), path)
    };
    let mut entries = Vec::new();
    loop {
        let runtime = context.runtime();
        let page = runtime
            .forward::<FileList>(&context.caller, &params)
            .await?;
        entries.extend(page.entries.into_iter().map(|mut entry| {
            // This protocol has none, and all of them together may be long.
            entry.xattrs.clear();
            entry
        }));
        params.after = page.next;
        if params.after.is_none() {
            return Ok((entries, false));
        }
        if entries.len() >= MAX_ENTRIES {
            return Ok((entries, true));
        }
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct FindRequest {
    path: String,
    glob: String,
}

/// Finds files by a pattern of their path below a directory.
pub(super) async fn find(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<FindRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let params = FileFindParams {
        hidden: true,
        kinds: vec![FileKind::File, FileKind::Symlink],
        limit: Some(PAGE),
        ..FileFindParams::new(box_id, path, request.glob)
    };
    let runtime = context.runtime();
    let found = runtime
        .forward::<FileFind>(&context.caller, &params)
        .await?;
    let files: Vec<String> = found.entries.into_iter().map(|entry| entry.path).collect();
    Ok(done(json!({
        "path": request.path,
        "files": files,
        // AIO has no such member; without it, a client would take a part for all.
        "truncated": found.truncated,
    })))
}

#[derive(Debug, Deserialize)]
pub(super) struct GlobRequest {
    path: String,
    pattern: String,
    exclude: Option<Vec<String>>,
    include_hidden: Option<bool>,
    files_only: Option<bool>,
    include_metadata: Option<bool>,
    max_results: Option<u64>,
    sort_by: Option<Order>,
    sort_desc: Option<bool>,
}

/// Finds files, with their attributes.
pub(super) async fn glob(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<GlobRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let limit = request.max_results.unwrap_or(GLOB_RESULTS).clamp(1, PAGE);
    let params = FileFindParams {
        hidden: request.include_hidden.unwrap_or_default(),
        kinds: if request.files_only.unwrap_or(true) {
            vec![FileKind::File, FileKind::Symlink]
        } else {
            Vec::new()
        },
        exclude: request.exclude.unwrap_or_default(),
        limit: Some(limit),
        ..FileFindParams::new(box_id, path, request.pattern.clone())
    };
    let runtime = context.runtime();
    let found = runtime
        .forward::<FileFind>(&context.caller, &params)
        .await?;
    let mut entries = found.entries;
    sort(&mut entries, request.sort_by, request.sort_desc);
    let is_full = request.include_metadata.unwrap_or(true);
    let described = |entry: &FileStatInfo| {
        json!({
            "path": entry.path,
            "name": name_of(&entry.path),
            "is_directory": entry.kind == FileKind::Directory,
            "size": is_full.then_some(entry.size),
            "modified_time": is_full.then(|| entry.modified_at.to_string()),
        })
    };
    let files: Vec<Value> = entries.iter().map(described).collect();
    Ok(done(json!({
        "path": request.path,
        "pattern": request.pattern,
        "total_count": files.len(),
        "files": files,
        "truncated": found.truncated,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_follow_a_name() {
        assert_eq!(extension_of("a.tar.gz"), Some(".gz"));
        assert_eq!(extension_of(".hidden"), None);
        assert_eq!(extension_of("plain"), None);
    }
}
