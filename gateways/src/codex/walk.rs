//! Directories: their entries, and the tree below them.

use std::collections::{HashSet, VecDeque};

use box_protocol::actions::{FileKind, FileList, FileListParams, FileStatInfo};
use serde::Deserialize;
use serde_json::{Value, json};

use super::files::PathParams;
use super::links::{resolve, stat};
use super::paths::{FilePath, uri_of};
use super::session::Place;
use super::wire::Fault;

/// The maximum number of entries in an answer.
const MAX_ENTRIES: usize = 50_000;

/// The maximum number of directories of a walk.
const MAX_DIRECTORIES: usize = 10_000;

/// The maximum depth of a walk.
const MAX_DEPTH: usize = 64;

/// The number of entries in one answer of the box, its maximum.
const PAGE: u64 = 10_000;

/// Returns all entries of a directory, sorted.
async fn entries(place: &Place, path: &FilePath) -> Result<Vec<FileStatInfo>, Fault> {
    let mut params = FileListParams {
        hidden: true,
        limit: Some(PAGE),
        ..FileListParams::new(place.open().await?, path.0.clone())
    };
    let mut found = Vec::new();
    loop {
        let page = place.target.forward::<FileList>(&params).await;
        let page = page.map_err(|error| Fault::of_file(&error))?;
        found.extend(page.entries);
        if found.len() > MAX_ENTRIES {
            let rule = format!("path: a directory with more than {MAX_ENTRIES} entries");
            return Err(Fault::internal(rule));
        }
        params.after = page.next;
        if params.after.is_none() {
            return Ok(found);
        }
    }
}

fn name(entry: &FileStatInfo) -> &str {
    entry.path.rsplit('/').next().unwrap_or_default()
}

/// Lists a directory. A link counts as what it points to, and not at all if that does not exist.
pub(super) async fn read_directory(place: &Place, params: PathParams) -> Result<Value, Fault> {
    let mut listed = Vec::new();
    for entry in entries(place, &params.path).await? {
        let kind = match entry.kind {
            FileKind::Symlink => match stat(place, &child(&params.path, &entry), true).await {
                Ok(found) => found.kind,
                Err(_) => continue,
            },
            kind => kind,
        };
        listed.push(json!({
            "fileName": name(&entry), "isDirectory": kind == FileKind::Directory, "isFile": kind == FileKind::File,
        }));
    }
    Ok(json!({"entries": listed}))
}

fn child(directory: &FilePath, entry: &FileStatInfo) -> FilePath {
    FilePath::normalized(&format!("{}/{}", directory.0, name(entry)))
}

#[derive(Debug, Deserialize)]
pub(super) struct WalkParams {
    path: FilePath,
    options: WalkOptions,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WalkOptions {
    max_depth: usize,
    max_directories: usize,
    max_entries: usize,
    follow_directory_symlinks: bool,
    #[serde(default)]
    prune_hidden_directories: bool,
}

/// Lists the files and directories below a directory, level by level.
pub(super) async fn walk(place: &Place, params: WalkParams) -> Result<Value, Fault> {
    let WalkParams { path, options } = params;
    if !(1..=MAX_DIRECTORIES).contains(&options.max_directories)
        || !(1..=MAX_ENTRIES).contains(&options.max_entries)
        || options.max_depth > MAX_DEPTH
    {
        let rule = format!(
            "options: at most maxDepth {MAX_DEPTH}, maxDirectories {MAX_DIRECTORIES} and maxEntries {MAX_ENTRIES}, and at least one"
        );
        return Err(Fault::invalid_request(rule));
    }
    let follow = options.follow_directory_symlinks;
    let (mut found, mut errors, mut truncated) = (Vec::new(), Vec::new(), false);
    if stat(place, &path, follow).await?.kind != FileKind::Directory {
        return Ok(json!({"entries": found, "errors": errors, "truncated": truncated}));
    }
    let mut seen = HashSet::from([identity(place, &path, follow).await?.0]);
    let mut waiting = VecDeque::from([(path, 0)]);
    let (mut directories, mut examined) = (1, 0);
    'walk: while let Some((directory, depth)) = waiting.pop_front() {
        let listed = match entries(place, &directory).await {
            Ok(listed) => listed,
            Err(fault) => {
                errors.push(json!({"path": uri_of(&directory.0), "message": fault.message}));
                continue;
            }
        };
        for entry in listed {
            if examined == options.max_entries {
                truncated = true;
                break 'walk;
            }
            examined += 1;
            let path = child(&directory, &entry);
            let kind = match entry.kind {
                FileKind::File => "file",
                FileKind::Directory => "directory",
                FileKind::Symlink if follow && is_directory(place, &path).await => "directory",
                _ => continue,
            };
            found.push(json!({"path": uri_of(&path.0), "kind": kind}));
            let is_pruned = options.prune_hidden_directories && name(&entry).starts_with('.');
            if kind == "file" || depth == options.max_depth || is_pruned {
                continue;
            }
            if !seen.insert(identity(place, &path, follow).await?.0) {
                continue;
            }
            if directories == options.max_directories {
                truncated = true;
                continue;
            }
            directories += 1;
            waiting.push_back((path, depth + 1));
        }
    }
    Ok(json!({"entries": found, "errors": errors, "truncated": truncated}))
}

async fn is_directory(place: &Place, path: &FilePath) -> bool {
    let found = stat(place, path, true).await;
    found.is_ok_and(|found| found.kind == FileKind::Directory)
}

/// Returns the path that tells a directory apart: without links, if they are followed.
async fn identity(place: &Place, path: &FilePath, follow: bool) -> Result<FilePath, Fault> {
    if follow {
        return resolve(place, path).await;
    }
    Ok(path.clone())
}
