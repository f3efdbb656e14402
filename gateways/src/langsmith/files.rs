//! Files of a box: upload, download, and search.

use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use box_protocol::actions::{
    FileFind, FileFindParams, FileGrep, FileGrepParams, FileKind, FileReadParams, FileWriteParams,
};
use box_protocol::{Blob, Invalid};
use serde::Deserialize;
use serde_json::json;

use super::errors::{ApiError, operation_error};
use crate::http::body::{Json, Params};
use crate::http::context::{Context, InBox};
use crate::http::download::Download;
use crate::http::refusal::json_response;
use crate::http::upload::{Parts, write_file};

/// The class of errors while a file is written.
const WRITE: &str = "WriteError";
/// The class of errors while files are read.
const READ: &str = "ReadError";

/// A relative path begins at the working directory of the box.
pub(super) fn is_relative(path: &str) -> bool {
    !path.starts_with('/')
}

/// `POST /upload?path=`: a form with one file.
pub(super) async fn upload(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
    mut parts: Parts,
) -> Result<Response, ApiError> {
    let path = params.required("path")?;
    while let Some(part) = parts.next().await? {
        if part.name() != Some("file") {
            continue;
        }
        let mut file = FileWriteParams::new(box_id, path, Blob::default());
        file.parents = true;
        file.expand = is_relative(path);
        let written = write_file(&context, file, part).await;
        let written = written.map_err(|error| operation_error(error, WRITE))?;
        let body = json!({"path": written.path, "size_bytes": written.size});
        return Ok(json_response(StatusCode::OK, &body));
    }
    Err(Invalid::new("file", "missing").into())
}

/// `GET /download?path=`.
pub(super) async fn download(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let path = params.required("path")?;
    let mut file = FileReadParams::new(box_id, path);
    file.expand = is_relative(path);
    let download = Download {
        params: file,
        method: &method,
        headers: &headers,
    };
    let response = download.response(&context).await;
    response.map_err(|error| operation_error(error, READ))
}

/// A search for files or lines.
#[derive(Debug, Deserialize)]
pub(super) struct Search {
    pattern: String,
    path: Option<String>,
    limit: Option<u64>,
    /// Only files that match this pattern.
    glob: Option<String>,
}

impl Search {
    fn path(&self) -> &str {
        self.path.as_deref().unwrap_or(".")
    }
}

/// `POST /glob`.
pub(super) async fn glob(
    context: Context,
    InBox(box_id): InBox,
    Json(search): Json<Search>,
) -> Result<Response, ApiError> {
    let mut params = FileFindParams::new(box_id, search.path(), search.pattern.as_str());
    params.expand = is_relative(search.path());
    params.hidden = true;
    params.limit = search.limit;
    let runtime = context.runtime();
    let found = runtime.forward::<FileFind>(&context.caller, &params).await;
    let found = found.map_err(|error| operation_error(error, READ))?;
    let matches = found.entries.iter().map(|entry| {
        json!({
            "path": entry.path, "is_dir": entry.kind == FileKind::Directory, "size_bytes": entry.size,
            "modified_at": entry.modified_at.to_string(),
        })
    });
    let matches: Vec<_> = matches.collect();
    let body = json!({"matches": matches, "truncated": found.truncated});
    Ok(json_response(StatusCode::OK, &body))
}

/// `POST /grep`: the pattern is plain text.
pub(super) async fn grep(
    context: Context,
    InBox(box_id): InBox,
    Json(search): Json<Search>,
) -> Result<Response, ApiError> {
    let mut params = FileGrepParams::new(box_id, search.path(), search.pattern.as_str());
    params.fixed = true;
    params.expand = is_relative(search.path());
    params.include = search.glob.clone().into_iter().collect();
    params.limit = search.limit;
    let runtime = context.runtime();
    let found = runtime.forward::<FileGrep>(&context.caller, &params).await;
    let found = found.map_err(|error| operation_error(error, READ))?;
    let lines = found.lines.iter().filter(|line| !line.context);
    let matches =
        lines.map(|line| json!({"path": line.path, "line": line.line, "text": line.text}));
    let matches: Vec<_> = matches.collect();
    let body = json!({"matches": matches, "truncated": found.truncated});
    Ok(json_response(StatusCode::OK, &body))
}
