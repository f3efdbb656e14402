//! Files and directories: attributes, lists, moves, removals and replacements.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{
    FileAttributes, FileAttributesParams, FileFind, FileFindParams, FileKind, FileListParams,
    FileMkdir, FileMkdirParams, FileMove, FileMoveParams, FileOutcome, FileRemove,
    FileRemoveParams, FileReplace, FileReplaceParams, FileStat, FileStatInfo, FileStatParams,
    GlobMatch,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, Code, Invalid};
use box_runtime::DataPlane;
use globset::Glob;
use serde::Deserialize;
use serde_json::json;

use super::error::{Error, InPath, required};
use super::pages::{self, FileEntry};
use crate::http::body::{Json, Params};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;

/// The maximum number of entries of one page.
const MAX_ENTRIES: u64 = 10_000;

/// The kinds of files that a search finds.
const SEARCHED: [FileKind; 3] = [FileKind::File, FileKind::Symlink, FileKind::Other];

/// The parameters of a path, which may name a user.
pub(super) type PathParams = InPath<Vec<(String, String)>>;

/// Returns the user of a path below `/v1/filesystem/{uid}/{gid}`.
pub(super) fn user_of(InPath(params): &PathParams) -> Result<Option<String>, Error> {
    let find = |name: &str| params.iter().find(|(known, _)| known == name);
    let (Some((_, uid)), Some((_, gid))) = (find("uid"), find("gid")) else {
        return Ok(None);
    };
    let number = |text: &str| text.parse::<u32>().ok();
    match (number(uid), number(gid)) {
        (Some(uid), Some(gid)) => Ok(Some(format!("{uid}:{gid}"))),
        _ => Err(Error::invalid("uid, gid: must be numbers")),
    }
}

/// Returns the error of a call about files. Other users are not served.
pub(super) fn refused(error: BoxError) -> Error {
    let detail: Detail = error.detail().unwrap_or_default();
    if error.code() == Code::Denied && detail.errno.is_none() {
        return Error::unsupported(error.message());
    }
    error.into()
}

/// Returns permission bits from their digits: 644 means 0644, and 0 leaves them.
pub(super) fn mode(digits: Option<u32>) -> Result<Option<u32>, Error> {
    let Some(digits) = digits.filter(|digits| *digits != 0) else {
        return Ok(None);
    };
    let bits = u32::from_str_radix(&digits.to_string(), 8).ok();
    let bits = bits.filter(|bits| *bits <= 0o7777);
    let bits = bits.ok_or_else(|| Error::invalid("mode: must have octal digits, such as 644"))?;
    Ok(Some(bits))
}

/// Returns the attributes of each path, without following links, or its error.
async fn outcomes(
    context: &Context,
    box_id: BoxId,
    user: Option<String>,
    paths: Vec<String>,
) -> Result<BTreeMap<String, FileOutcome>, Error> {
    let params = FileStatParams {
        user,
        expand: true,
        ..FileStatParams::new(box_id, paths)
    };
    let runtime = context.runtime();
    let found = runtime.forward::<FileStat>(&context.caller, &params).await;
    Ok(found.map_err(refused)?.paths)
}

/// Returns the attributes of paths, or the error of the first that has one.
async fn stat(
    context: &Context,
    box_id: BoxId,
    user: Option<String>,
    paths: Vec<String>,
) -> Result<BTreeMap<String, FileStatInfo>, Error> {
    let mut stats = BTreeMap::new();
    for (path, outcome) in outcomes(context, box_id, user, paths).await? {
        match outcome {
            FileOutcome::Stat(stat) => {
                stats.insert(path, stat);
            }
            FileOutcome::Error(error) => {
                let detail = Detail {
                    errno: error.errno,
                    ..Detail::about(Subject::File)
                };
                let error = BoxError::new(error.code, error.message);
                return Err(error.with_detail(&detail).into());
            }
        }
    }
    Ok(stats)
}

fn paths_of(params: &Params) -> Result<Vec<String>, Error> {
    let paths: Vec<String> = params.all("path").map(str::to_owned).collect();
    if paths.is_empty() || paths.iter().any(String::is_empty) {
        return Err(Error::missing_query("path"));
    }
    Ok(paths)
}

/// Returns the attributes of files, by path as sent.
pub(super) async fn info(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    params: Params,
) -> Result<Response, Error> {
    let paths = paths_of(&params)?;
    let stats = stat(&context, box_id, user_of(&path)?, paths).await?;
    let stats: BTreeMap<_, _> = stats
        .into_iter()
        .map(|(path, stat)| (path, FileEntry::from(stat)))
        .collect();
    Ok(json_response(StatusCode::OK, &json!(stats)))
}

/// Removes files; a missing one is no error, a directory is one.
pub(super) async fn delete_files(
    context: Context,
    in_box: InBox,
    path: PathParams,
    params: Params,
) -> Result<StatusCode, Error> {
    remove(context, in_box, &path, &params, false).await
}

/// Removes directories with their contents; a missing one is no error.
pub(super) async fn delete_directories(
    context: Context,
    in_box: InBox,
    path: PathParams,
    params: Params,
) -> Result<StatusCode, Error> {
    remove(context, in_box, &path, &params, true).await
}

async fn remove(
    context: Context,
    InBox(box_id): InBox,
    path: &PathParams,
    params: &Params,
    recursive: bool,
) -> Result<StatusCode, Error> {
    let (user, paths) = (user_of(path)?, paths_of(params)?);
    if !recursive {
        // The runtime removes an empty directory as well.
        let found = outcomes(&context, box_id.clone(), user.clone(), paths.clone()).await?;
        for (path, outcome) in found {
            if matches!(outcome, FileOutcome::Stat(stat) if stat.kind == FileKind::Directory) {
                return Err(Error::runtime(format!("{path}: is a directory")));
            }
        }
    }
    let params = FileRemoveParams {
        user,
        expand: true,
        recursive,
        missing_ok: true,
        ..FileRemoveParams::new(box_id, paths)
    };
    let runtime = context.runtime();
    let removed = runtime
        .forward::<FileRemove>(&context.caller, &params)
        .await;
    match removed {
        Ok(_) => Ok(StatusCode::OK),
        Err(error) if matches!(error.code(), Code::Validation | Code::Conflict) => {
            Err(Error::runtime(error.message()))
        }
        Err(error) => Err(refused(error)),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct MoveItem {
    src: String,
    dest: String,
}

/// Moves files to new places.
pub(super) async fn mv(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    Json(items): Json<Vec<MoveItem>>,
) -> Result<StatusCode, Error> {
    let user = user_of(&path)?;
    for item in items {
        let params = FileMoveParams {
            user: user.clone(),
            expand: true,
            parents: true,
            ..FileMoveParams::new(box_id.clone(), item.src, item.dest)
        };
        let runtime = context.runtime();
        let moved = runtime.forward::<FileMove>(&context.caller, &params).await;
        moved.map_err(|error| match error.code() {
            Code::Conflict => Error::runtime(error.message()),
            _ => refused(error),
        })?;
    }
    Ok(StatusCode::OK)
}

/// Permissions of a file or a directory. Empty texts and 0 leave what is there.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Permission {
    pub(super) mode: Option<u32>,
    pub(super) owner: Option<String>,
    pub(super) group: Option<String>,
}

impl Permission {
    /// Returns the owner and the group, if they are given.
    pub(super) fn names(self) -> (Option<String>, Option<String>) {
        let given = |name: Option<String>| name.filter(|name| !name.is_empty());
        (given(self.owner), given(self.group))
    }
}

/// Sets the permissions of files.
pub(super) async fn permissions(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    Json(items): Json<BTreeMap<String, Permission>>,
) -> Result<StatusCode, Error> {
    let user = user_of(&path)?;
    let params = |path, (mode, owner, group)| FileAttributesParams {
        user: user.clone(),
        expand: true,
        mode,
        owner,
        group,
        ..FileAttributesParams::new(box_id.clone(), path)
    };
    permit::<FileAttributes>(&context, items, params).await
}

/// Creates directories with their parents.
pub(super) async fn create_directories(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    Json(items): Json<BTreeMap<String, Permission>>,
) -> Result<StatusCode, Error> {
    let user = user_of(&path)?;
    let params = |path, (mode, owner, group)| FileMkdirParams {
        user: user.clone(),
        expand: true,
        mode,
        owner,
        group,
        ..FileMkdirParams::new(box_id.clone(), path)
    };
    permit::<FileMkdir>(&context, items, params).await
}

/// The mode, owner and group of a path, if they are given.
type Permitted = (Option<u32>, Option<String>, Option<String>);

/// Makes one call for each path, with its permissions.
async fn permit<A: DataPlane>(
    context: &Context,
    items: BTreeMap<String, Permission>,
    params: impl Fn(String, Permitted) -> A::Params,
) -> Result<StatusCode, Error> {
    for (path, permission) in items {
        let mode = mode(permission.mode)?;
        let (owner, group) = permission.names();
        let params = params(path, (mode, owner, group));
        let called = context.runtime().forward::<A>(&context.caller, &params);
        called.await.map_err(refused)?;
    }
    Ok(StatusCode::OK)
}

/// Finds files below a directory by the pattern of their names.
pub(super) async fn search(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    params: Params,
) -> Result<Response, Error> {
    let user = user_of(&path)?;
    let root = required(&params, "path")?;
    let pattern = params.get("pattern").unwrap_or("**");
    // A pattern matches names, in which `**` is `*`.
    let pattern = pattern.trim_start_matches("**/").replace("**", "*");
    let params = FileFindParams {
        user: user.clone(),
        expand: true,
        r#match: GlobMatch::Name,
        hidden: true,
        kinds: SEARCHED.to_vec(),
        limit: Some(MAX_ENTRIES),
        ..FileFindParams::new(box_id.clone(), root, &*pattern)
    };
    let runtime = context.runtime();
    let found = runtime.forward::<FileFind>(&context.caller, &params).await;
    let found = found.map_err(refused)?;
    // `file.find` has no next page, but `file.list` continues in the same order.
    let rest = found.truncated.then(|| FileListParams {
        user,
        expand: true,
        depth: u32::MAX,
        hidden: true,
        kinds: SEARCHED.to_vec(),
        limit: Some(MAX_ENTRIES),
        after: found.entries.last().map(|entry| entry.path.clone()),
        ..FileListParams::new(box_id, root)
    });
    let name = rest.as_ref().map(|_| Glob::new(&pattern)).transpose();
    let name = name.map_err(|error| Error::invalid(error.to_string()))?;
    let name = name.map(|name| name.compile_matcher());
    let is_found = move |stat: &FileStatInfo| {
        let last = stat.path.rsplit('/').next();
        let name = name.as_ref();
        last.is_some_and(|last| name.is_some_and(|name| name.is_match(last)))
    };
    let first = found.entries.into_iter().map(FileEntry::from).collect();
    Ok(pages::response(context, (first, rest), is_found))
}

/// Lists a directory down to a depth.
pub(super) async fn list(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    params: Params,
) -> Result<Response, Error> {
    let user = user_of(&path)?;
    let root = required(&params, "path")?;
    let depth: Option<u32> = params.parsed("depth", "must be a number from 0")?;
    let depth = depth.unwrap_or(1);
    let root = root.to_owned();
    let stats = stat(&context, box_id.clone(), user.clone(), vec![root.clone()]).await?;
    if stats.values().any(|stat| stat.kind != FileKind::Directory) {
        return Err(Error::invalid(format!(
            "path: {root:?} must be a directory"
        )));
    }
    if depth == 0 {
        return Ok(json_response(StatusCode::OK, &json!([])));
    }
    let params = FileListParams {
        user,
        expand: true,
        depth,
        hidden: true,
        limit: Some(MAX_ENTRIES),
        ..FileListParams::new(box_id, root)
    };
    // The errors of the first page have a status.
    let first = pages::page(&context, params, |_| true).await;
    let first = first.map_err(refused)?;
    Ok(pages::response(context, first, |_| true))
}

#[derive(Debug, Deserialize)]
pub(super) struct Replacement {
    old: String,
    new: String,
}

/// Replaces a text wherever it is in files.
pub(super) async fn replace(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    params: Params,
    Json(items): Json<BTreeMap<String, Replacement>>,
) -> Result<Response, Error> {
    let (user, verbose) = (user_of(&path)?, params.flag("verbose")?);
    if items.values().any(|item| item.old.is_empty()) {
        return Err(Invalid::new("old", "must not be empty").into());
    }
    let mut counts = BTreeMap::new();
    for (path, item) in items {
        let params = FileReplaceParams {
            user: user.clone(),
            expand: true,
            ..FileReplaceParams::new(box_id.clone(), path.as_str(), item.old, item.new)
        };
        let runtime = context.runtime();
        let replaced = runtime
            .forward::<FileReplace>(&context.caller, &params)
            .await;
        let replaced = replaced.map_err(refused)?;
        counts.insert(path, json!({"replacedCount": replaced.count}));
    }
    if verbose {
        return Ok(json_response(StatusCode::OK, &json!(counts)));
    }
    Ok(StatusCode::OK.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_digits() {
        for (given, bits) in [(644, 0o644), (755, 0o755), (7, 0o7), (4755, 0o4755)] {
            assert_eq!(mode(Some(given)).unwrap(), Some(bits));
            assert_eq!(pages::digits(bits), given);
        }
        assert_eq!(mode(Some(0)).unwrap(), None);
        for wrong in [8, 649, 77_777] {
            assert!(mode(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
