//! Uploads and downloads of files.

use std::num::NonZeroU64;

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RANGE};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{FilePart, FileReadParams, FileWriteParams};
use bytes::BytesMut;
use futures::TryStreamExt as _;
use serde::Deserialize;

use super::error::{Error, required};
use super::files::{PathParams, Permission, mode, refused, user_of};
use crate::http::body::{Params, from_json};
use crate::http::context::{Context, InBox};
use crate::http::download::{Download, read_file};
use crate::http::upload::{Parts, read_part, write_file};

/// The maximum length of the metadata of a file.
const MAX_METADATA_BYTES: usize = 64 * 1024;

#[derive(Debug, Deserialize)]
struct Metadata {
    path: String,
    #[serde(flatten)]
    permission: Permission,
}

/// Writes files: pairs of the parts `metadata` and `file`.
///
/// The name of a file part is not the path: the metadata has it.
pub(super) async fn upload(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    mut parts: Parts,
) -> Result<StatusCode, Error> {
    let user = user_of(&path)?;
    let malformed = |code, message: &str| Error::new(StatusCode::BAD_REQUEST, code, message);
    let mut metadata: Option<Metadata> = None;
    let mut count = 0;
    while let Some(part) = parts.next().await? {
        match part.name() {
            Some("metadata") => {
                let bytes = read_part(part, MAX_METADATA_BYTES).await?;
                let parsed = from_json::<Metadata>(&bytes);
                let parsed = parsed
                    .map_err(|invalid| malformed("INVALID_FILE_METADATA", &invalid.to_string()))?;
                if parsed.path.is_empty() {
                    return Err(malformed(
                        "INVALID_FILE_METADATA",
                        "path: must not be empty",
                    ));
                }
                metadata = Some(parsed);
            }
            Some("file") => {
                let metadata = metadata.take().ok_or_else(|| {
                    malformed(
                        "INVALID_FILE_METADATA",
                        "a file part needs metadata before it",
                    )
                })?;
                let mode = mode(metadata.permission.mode)?;
                let (owner, group) = metadata.permission.names();
                let params = FileWriteParams {
                    user: user.clone(),
                    expand: true,
                    parents: true,
                    mode,
                    owner,
                    group,
                    ..FileWriteParams::new(box_id.clone(), metadata.path, Vec::new())
                };
                let written = write_file(&context, params, part).await;
                written.map_err(refused)?;
                count += 1;
            }
            _ => {}
        }
    }
    if metadata.is_some() || count == 0 {
        return Err(malformed(
            "INVALID_FILE",
            "the form has no file part after its metadata",
        ));
    }
    Ok(StatusCode::OK)
}

/// Returns a body without the line end at its very end, as the reference sends lines.
fn without_last_end(body: Body) -> Body {
    let state = (body.into_data_stream(), false);
    let lines = futures::stream::try_unfold(state, |(mut chunks, held)| async move {
        let Some(chunk) = chunks.try_next().await? else {
            return Ok::<_, axum::Error>(None);
        };
        let text = chunk.strip_suffix(b"\n");
        let mut bytes = BytesMut::with_capacity(chunk.len() + 1);
        if held {
            bytes.extend_from_slice(b"\n");
        }
        bytes.extend_from_slice(text.unwrap_or(&chunk));
        Ok(Some((bytes.freeze(), (chunks, text.is_some()))))
    });
    Body::from_stream(lines)
}

/// Reads a file: whole, a range of its bytes, or some of its lines.
pub(super) async fn download(
    context: Context,
    InBox(box_id): InBox,
    path: PathParams,
    params: Params,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let user = user_of(&path)?;
    let file = required(&params, "path")?;
    let number = "must be a number from 1";
    let start: Option<NonZeroU64> = params.parsed("offset", number)?;
    let count: Option<NonZeroU64> = params.parsed("limit", number)?;
    let has_lines = start.is_some() || count.is_some();
    if has_lines && headers.contains_key(RANGE) {
        return Err(Error::invalid("offset, limit: not possible with Range"));
    }
    let mut read = FileReadParams {
        user: user.clone(),
        expand: true,
        ..FileReadParams::new(box_id, file)
    };
    if !has_lines {
        let download = Download {
            params: read,
            method: &method,
            headers: &headers,
        };
        return download.response(&context).await.map_err(refused);
    }
    let start = start.map_or(1, NonZeroU64::get);
    let end = count.map(|count| start.saturating_add(count.get() - 1));
    read.part = Some(FilePart::Lines { start, end });
    let body = read_file(&context, read).await.map_err(refused)?;
    let mut response = without_last_end(body).into_response();
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
