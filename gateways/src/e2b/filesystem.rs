//! `filesystem.Filesystem`: attributes, directories and changes of files.

use axum::Router;
use axum::extract::{FromRequest, Request};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use box_protocol::BoxId;
use box_protocol::actions::{
    FileKind, FileList, FileListParams, FileMkdir, FileMkdirParams, FileMove, FileMoveParams,
    FileRemove, FileRemoveParams,
};
use serde::Deserialize;
use serde_json::json;

use super::connect::{self, unary};
use super::entries::{absolute, entries, one_entry, stat};
use super::error::EnvdError;
use super::watch;
use crate::http::body::Json;
use crate::http::context::{Context, InBox};
use crate::http::refusal::Refusal;

type Result<T = Response> = std::result::Result<T, EnvdError>;

/// The maximum number of entries of one list.
const MAX_ENTRIES: usize = 100_000;

/// The maximum length of the extended attributes of one list. They may have 4 KiB for each entry.
const MAX_XATTR_BYTES: usize = 16 * 1024 * 1024;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/filesystem.Filesystem/Stat", post(stat_file))
        .route("/filesystem.Filesystem/MakeDir", post(make_dir))
        .route("/filesystem.Filesystem/Move", post(rename))
        .route("/filesystem.Filesystem/ListDir", post(list_dir))
        .route("/filesystem.Filesystem/Remove", post(remove))
        .merge(watch::routes())
}

/// A request about one path, which is absolute, and its user.
struct AtPath {
    user: Option<String>,
    path: String,
}

impl<S: Sync> FromRequest<S> for AtPath {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> std::result::Result<Self, Refusal> {
        #[derive(Deserialize)]
        struct OnePath {
            path: String,
        }
        let user = connect::user(request.headers());
        let Json(OnePath { path }) = Json::from_request(request, state).await?;
        let path = absolute(&path, user.as_deref());
        Ok(Self { user, path })
    }
}

/// Answers with the attributes of a path.
async fn described(context: &Context, box_id: &BoxId, user: Option<&str>, path: &str) -> Result {
    let file = stat(context, box_id, user, path, false).await?;
    let entry = one_entry(context, box_id, user, file).await?;
    Ok(unary(&json!({"entry": entry})))
}

async fn stat_file(
    context: Context,
    InBox(box_id): InBox,
    AtPath { user, path }: AtPath,
) -> Result {
    described(&context, &box_id, user.as_deref(), &path).await
}

async fn make_dir(context: Context, InBox(box_id): InBox, AtPath { user, path }: AtPath) -> Result {
    let params = FileMkdirParams {
        user: user.clone(),
        ..FileMkdirParams::new(box_id.clone(), path.clone())
    };
    let runtime = context.runtime();
    let made = runtime.forward::<FileMkdir>(&context.caller, &params).await;
    let user = user.as_deref();
    let is_new = match made {
        Ok(made) => made.created,
        // A path with a file in it is an error of the request.
        Err(error) if error.code() == box_protocol::Code::Conflict => {
            return Err(EnvdError::invalid(error.message()));
        }
        Err(error) => return Err(error.into()),
    };
    if !is_new {
        let message = format!("directory already exists: {path}");
        return Err(EnvdError::new("already_exists", message));
    }
    described(&context, &box_id, user, &path).await
}

#[derive(Debug, Deserialize)]
struct Move {
    source: String,
    destination: String,
}

async fn rename(
    context: Context,
    InBox(box_id): InBox,
    headers: HeaderMap,
    Json(request): Json<Move>,
) -> Result {
    let user = connect::user(&headers);
    let source = absolute(&request.source, user.as_deref());
    let destination = absolute(&request.destination, user.as_deref());
    let params = FileMoveParams {
        user: user.clone(),
        overwrite: true,
        parents: true,
        ..FileMoveParams::new(box_id.clone(), source, destination.clone())
    };
    let runtime = context.runtime();
    runtime
        .forward::<FileMove>(&context.caller, &params)
        .await?;
    let user = user.as_deref();
    described(&context, &box_id, user, &destination).await
}

#[derive(Debug, Deserialize)]
struct ListDir {
    path: String,
    #[serde(default)]
    depth: u32,
}

async fn list_dir(
    context: Context,
    InBox(box_id): InBox,
    headers: HeaderMap,
    Json(request): Json<ListDir>,
) -> Result {
    let user = connect::user(&headers);
    let path = absolute(&request.path, user.as_deref());
    let user = user.as_deref();
    let directory = stat(&context, &box_id, user, &path, true).await?;
    if directory.kind != FileKind::Directory {
        return Err(EnvdError::invalid(format!(
            "path is not a directory: {path}"
        )));
    }
    let mut params = FileListParams {
        user: user.map(str::to_owned),
        depth: request.depth.max(1),
        hidden: true,
        limit: Some(10_000),
        ..FileListParams::new(box_id.clone(), path)
    };
    let (mut files, mut xattr_bytes) = (Vec::new(), 0);
    loop {
        let runtime = context.runtime();
        let page = runtime
            .forward::<FileList>(&context.caller, &params)
            .await?;
        let xattrs = page.entries.iter().flat_map(|file| &file.xattrs);
        xattr_bytes += xattrs
            .map(|(name, value)| name.len() + value.len())
            .sum::<usize>();
        if xattr_bytes > MAX_XATTR_BYTES {
            let message = format!(
                "path: has more than {MAX_XATTR_BYTES} bytes of extended attributes; list fewer levels"
            );
            return Err(EnvdError::new("resource_exhausted", message));
        }
        files.extend(page.entries);
        if files.len() > MAX_ENTRIES {
            let message = format!("path: has more than {MAX_ENTRIES} entries; list fewer levels");
            return Err(EnvdError::new("resource_exhausted", message));
        }
        params.after = page.next;
        if params.after.is_none() {
            break;
        }
    }
    let listed = entries(&context, &box_id, user, &files).await?;
    Ok(unary(&json!({"entries": listed})))
}

async fn remove(context: Context, InBox(box_id): InBox, AtPath { user, path }: AtPath) -> Result {
    let params = FileRemoveParams {
        user,
        recursive: true,
        missing_ok: true,
        ..FileRemoveParams::new(box_id, vec![path])
    };
    let runtime = context.runtime();
    runtime
        .forward::<FileRemove>(&context.caller, &params)
        .await?;
    Ok(unary(&json!({})))
}
