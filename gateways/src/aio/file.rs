//! `/v1/file`: content of files.

use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::actions::{
    FilePart, FileReadParams, FileReplace, FileReplaceParams, FileStatInfo, FileWriteParams,
};
use box_protocol::{BoxError, BoxId, Invalid};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::envelope::{Failure, done};
use crate::http::body::{self, Json, Params};
use crate::http::context::{Context, InBox};
use crate::http::download::{Download, read_file};
use crate::http::refusal::{Refusal, RefusalReason};
use crate::http::upload::{Parts, read_part, write_file};

/// The maximum size of a file in a JSON answer. A download has no limit.
const MAX_READ_BYTES: usize = 16 * 1024 * 1024;

/// The maximum length of the body of a write: 100 MiB of data as base64, and more.
const MAX_WRITE_BYTES: usize = 144 * 1024 * 1024;

/// The maximum size of an upload whose path comes after its data.
const MAX_EARLY_BYTES: usize = 16 * 1024 * 1024;

/// The directory of uploads without a path.
const UPLOAD_DIR: &str = "/tmp";

/// Checks a path of a request: absolute, without `..`.
pub(super) fn checked(field: &'static str, path: &str) -> Result<String, Invalid> {
    let rule = if path.is_empty() {
        "must not be empty"
    } else if !path.starts_with('/') {
        "must be an absolute path"
    } else if path.contains('\0') {
        "must not contain NUL"
    } else if path.split('/').any(|part| part == "..") {
        "must not contain a .. segment"
    } else {
        return Ok(path.to_owned());
    };
    Err(Invalid::new(field, rule))
}

/// Reads a file, or a part of it, as text.
pub(super) async fn read_text(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    part: Option<FilePart>,
) -> Result<String, Failure> {
    let mut params = FileReadParams::new(box_id.clone(), path);
    params.part = part;
    let stream = read_file(context, params).await?;
    let bytes = body::read(stream, MAX_READ_BYTES).await;
    let bytes = bytes.map_err(|refusal| {
        if refusal.reason == RefusalReason::TooLarge {
            let message = format!("file: longer than {MAX_READ_BYTES} bytes; download it instead");
            return Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message);
        }
        let message = "file: changed or removed while it was read; read it again";
        Failure::new(StatusCode::CONFLICT, message)
    })?;
    String::from_utf8(bytes.into()).map_err(|_| {
        let message = "file: not UTF-8 text; download it instead";
        Failure::new(StatusCode::BAD_REQUEST, message)
    })
}

/// Writes a whole file, with its parents.
pub(super) async fn write_bytes(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    data: Vec<u8>,
    append: bool,
) -> Result<FileStatInfo, BoxError> {
    let params = FileWriteParams {
        append,
        parents: true,
        ..FileWriteParams::new(box_id.clone(), path, Bytes::new())
    };
    write_data(context, params, data).await
}

/// Writes bytes, as these parameters say.
pub(super) async fn write_data(
    context: &Context,
    params: FileWriteParams,
    data: Vec<u8>,
) -> Result<FileStatInfo, BoxError> {
    let data = futures::stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from(data))]);
    write_file(context, params, data).await
}

#[derive(Debug, Deserialize)]
pub(super) struct ReadRequest {
    file: String,
    start_line: Option<u64>,
    end_line: Option<u64>,
}

/// Reads text. Lines count from 0, and the end line is excluded.
pub(super) async fn read(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<ReadRequest>,
) -> Result<Response, Failure> {
    let path = checked("file", &request.file)?;
    let part = match (request.start_line, request.end_line) {
        (None, None) => None,
        (start, end) => Some(FilePart::Lines {
            start: start.unwrap_or_default().saturating_add(1),
            end,
        }),
    };
    let is_empty = request
        .end_line
        .is_some_and(|end| end <= request.start_line.unwrap_or_default());
    let part = if is_empty {
        Some(FilePart::Bytes {
            offset: 0,
            len: Some(0),
        })
    } else {
        part
    };
    let text = read_text(&context, &box_id, &path, part).await?;
    Ok(done(json!({"content": text, "file": request.file})))
}

#[derive(Debug, Deserialize)]
struct WriteRequest {
    file: String,
    content: String,
    encoding: Option<String>,
    append: Option<bool>,
    leading_newline: Option<bool>,
    trailing_newline: Option<bool>,
}

/// Writes text or bytes, atomically.
pub(super) async fn write(
    context: Context,
    InBox(box_id): InBox,
    request: Request,
) -> Result<Response, Failure> {
    let body = body::read(request.into_body(), MAX_WRITE_BYTES).await?;
    let request: WriteRequest = body::from_json(&body).map_err(Refusal::from)?;
    drop(body);
    let path = checked("file", &request.file)?;
    let bytes = match request.encoding.as_deref().unwrap_or("utf-8") {
        "utf-8" | "utf8" | "raw" => request.content.into_bytes(),
        "base64" => STANDARD
            .decode(request.content.trim())
            .map_err(|_| Invalid::new("content", "not base64"))?,
        _ => return Err(Invalid::new("encoding", "must be utf-8, base64 or raw").into()),
    };
    let mut data = Vec::with_capacity(bytes.len() + 2);
    if request.leading_newline.unwrap_or_default() {
        data.push(b'\n');
    }
    data.extend(bytes);
    if request.trailing_newline.unwrap_or_default() {
        data.push(b'\n');
    }
    let length = data.len();
    let append = request.append.unwrap_or_default();
    write_bytes(&context, &box_id, &path, data, append).await?;
    Ok(done(json!({"file": request.file, "bytes_written": length})))
}

#[derive(Debug, Deserialize)]
pub(super) struct ReplaceRequest {
    file: String,
    old_str: String,
    new_str: String,
}

/// Replaces all occurrences of a text.
pub(super) async fn replace(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<ReplaceRequest>,
) -> Result<Response, Failure> {
    let path = checked("file", &request.file)?;
    if request.old_str.is_empty() {
        return Err(Invalid::new("old_str", "must not be empty").into());
    }
    let params = FileReplaceParams::new(box_id, path, request.old_str, request.new_str);
    let runtime = context.runtime();
    let replaced = runtime
        .forward::<FileReplace>(&context.caller, &params)
        .await?;
    Ok(done(
        json!({"file": request.file, "replaced_count": replaced.count}),
    ))
}

/// Sends a file as it is, or a range of it.
pub(super) async fn download(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let path = checked("path", params.required("path")?)?;
    let download = Download {
        params: FileReadParams::new(box_id, path),
        method: &method,
        headers: &headers,
    };
    Ok(download.response(&context).await?)
}

/// Stores the file of a form.
pub(super) async fn upload(
    context: Context,
    InBox(box_id): InBox,
    mut parts: Parts,
) -> Result<Response, Failure> {
    let mut path = None;
    let mut early: Option<(String, Bytes)> = None;
    let mut written = None;
    while let Some(part) = parts.next().await? {
        match part.name() {
            Some("path") => {
                let text = read_part(part, 8192).await?;
                let text = std::str::from_utf8(&text);
                let text = text.map_err(|_| Invalid::new("path", "must be UTF-8"))?;
                path = Some(checked("path", text)?);
            }
            Some("file") => {
                let name = part.file_name().unwrap_or("upload").to_owned();
                let Some(path) = &path else {
                    early = Some((name, read_part(part, MAX_EARLY_BYTES).await?));
                    continue;
                };
                let target = target(&context, &box_id, path, &name).await?;
                let params = FileWriteParams {
                    parents: true,
                    ..FileWriteParams::new(box_id.clone(), target, Bytes::new())
                };
                written = Some(write_file(&context, params, part).await?);
            }
            _ => {}
        }
    }
    if let Some((name, data)) = early {
        let path = path.unwrap_or_else(|| format!("{UPLOAD_DIR}/"));
        let target = target(&context, &box_id, &path, &name).await?;
        written = Some(write_bytes(&context, &box_id, &target, data.into(), false).await?);
    }
    let Some(written) = written else {
        return Err(Invalid::new("file", "missing").into());
    };
    Ok(done(json!({
        "file_path": written.path,
        "file_size": written.size,
        "success": true,
    })))
}

/// Returns where to store an upload: its path, or below it if that is a directory.
async fn target(
    context: &Context,
    box_id: &BoxId,
    path: &str,
    name: &str,
) -> Result<String, Failure> {
    let is_directory =
        path.ends_with('/') || super::search::is_directory(context, box_id, path).await;
    if !is_directory {
        return Ok(path.to_owned());
    }
    let name = name.rsplit('/').next().unwrap_or_default();
    if name.is_empty() || matches!(name, "." | "..") {
        return Err(Invalid::new("file", "needs a file name").into());
    }
    Ok(checked(
        "path",
        &format!("{}/{name}", path.trim_end_matches('/')),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_and_have_no_parent_segment() {
        for path in ["/", "/a/b", "/a/..b", "/a...", "/é"] {
            assert_eq!(checked("file", path).unwrap(), path);
        }
        for path in ["", "a", "./a", "/a/../b", "/..", "/a\0b"] {
            assert!(checked("file", path).is_err(), "{path:?}");
        }
    }
}
