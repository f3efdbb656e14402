//! `/files` and `/health`: content of files, and whether a box runs.

use std::collections::BTreeMap;
use std::io::Write as _;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;
use axum::routing::get;
use box_protocol::actions::{FileReadParams, FileStatInfo, FileWriteParams};
use box_protocol::{Blob, BoxId, BoxInfo};
use flate2::write::GzDecoder;
use futures::{Stream, StreamExt as _, stream};
use serde_json::{Value, json};

use super::access::{FileAccess, signed};
use super::connect::{other_user, user};
use super::entries::{METADATA, absolute, add_metadata, name_of};
use super::error::{EnvdError, PlainError, gone};
use super::model::State;
use crate::http::body::{self, Params};
use crate::http::context::{Context, InBox};
use crate::http::download::Download;
use crate::http::refusal::json_response;
use crate::http::upload::{Parts, write_file};

type Result<T = Response> = std::result::Result<T, PlainError>;

/// The compressed bytes that are unpacked at once: their content has at most a thousand times as many.
const COMPRESSED_BYTES: usize = 4096;

/// The maximum length of a refused body that is read, so that its connection stays.
const MAX_UNREAD_BYTES: usize = 16 * 1024 * 1024;

/// The beginning of headers with metadata of an uploaded file.
const METADATA_HEADER: &str = "x-metadata-";

/// The namespace of the attributes that carry metadata.
const USER: &str = "user.";

/// The maximum length of a key, with which the name of its attribute is as long as the kernel accepts.
const MAX_KEY_BYTES: usize = 246;

/// The maximum length of all metadata of a file, as attributes.
const MAX_METADATA_BYTES: usize = 4096;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/files", get(read).post(write))
        .layer(DefaultBodyLimit::disable())
}

/// Answers 204 if the box runs.
async fn health(context: Context, InBox(box_id): InBox) -> Result<StatusCode> {
    let info = context.get(&box_id).await.map_err(EnvdError::from)?;
    let wakes = |info: &BoxInfo| info.lifetime.as_ref().is_some_and(|it| it.wake);
    match State::of(&info) {
        Some(State::Running) => Ok(StatusCode::NO_CONTENT),
        Some(State::Paused) if wakes(&info) => Ok(StatusCode::NO_CONTENT),
        _ => Err(gone().into()),
    }
}

async fn read(
    context: Context,
    InBox(box_id): InBox,
    method: Method,
    headers: HeaderMap,
    params: Params,
) -> Result {
    download(&context, box_id, &method, &headers, &params).await
}

/// Serves a signed address, which names neither the caller nor the box.
pub(super) async fn signed_read(
    context: Context,
    method: Method,
    headers: HeaderMap,
    params: Params,
) -> Result {
    let (context, box_id) = signed(context, &headers, &params, FileAccess::Read).await?;
    download(&context, box_id, &method, &headers, &params).await
}

async fn download(
    context: &Context,
    box_id: BoxId,
    method: &Method,
    headers: &HeaderMap,
    params: &Params,
) -> Result {
    let user = user_of(headers, params);
    let path = absolute(params.required("path")?, user.as_deref());
    let download = Download {
        params: FileReadParams {
            user,
            ..FileReadParams::new(box_id, path)
        },
        method,
        headers,
    };
    Ok(download.response(context).await?)
}

fn user_of(headers: &HeaderMap, params: &Params) -> Option<String> {
    let named = other_user(params.get("username"));
    named.or_else(|| user(headers))
}

async fn write(context: Context, InBox(box_id): InBox, params: Params, request: Request) -> Result {
    upload(&context, &box_id, &params, request).await
}

/// Writes to a signed address, which names neither the caller nor the box.
pub(super) async fn signed_write(context: Context, params: Params, request: Request) -> Result {
    let headers = request.headers();
    let (context, box_id) = signed(context, headers, &params, FileAccess::Write).await?;
    upload(&context, &box_id, &params, request).await
}

async fn upload(context: &Context, box_id: &BoxId, params: &Params, request: Request) -> Result {
    let metadata = match metadata(request.headers()) {
        Ok(metadata) => metadata,
        Err(error) => {
            // A connection with an unread body cannot be used again.
            let _ = body::read(request.into_body(), MAX_UNREAD_BYTES).await;
            return Err(error.into());
        }
    };
    let headers = request.headers();
    let user = user_of(headers, params);
    let target = |path: &str| FileWriteParams {
        user: user.clone(),
        parents: true,
        xattrs: metadata.clone(),
        ..FileWriteParams::new(
            box_id.clone(),
            absolute(path, user.as_deref()),
            Blob::from(Bytes::new()),
        )
    };
    let kind = headers.get(CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let mut written = Vec::new();
    if kind.starts_with("multipart/") {
        let path = params.get("path").map(str::to_owned);
        let mut parts = Parts::from_request(request, &()).await?;
        while let Some(part) = parts.next().await? {
            // With a path there is one file, whose own name does not count.
            let name = path.clone().or_else(|| part.file_name().map(str::to_owned));
            let name = name.filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| EnvdError::invalid("path: missing"))?;
            let file = write_file(context, target(&name), part).await?;
            written.push(entry(&file));
        }
        if written.is_empty() {
            return Err(EnvdError::invalid("body: must have a part named file").into());
        }
    } else {
        let params = target(params.required("path")?);
        let is_gzip = match headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => false,
            Some(b"gzip") => true,
            Some(_) => {
                let message = "content-encoding: must be gzip";
                return Err(EnvdError::invalid(message).into());
            }
        };
        let body = request.into_body();
        let file = if is_gzip {
            write_file(context, params, unpacked(body)).await?
        } else {
            write_file(context, params, body.into_data_stream()).await?
        };
        written.push(entry(&file));
    }
    Ok(json_response(StatusCode::OK, &Value::Array(written)))
}

fn entry(file: &FileStatInfo) -> Value {
    let mut entry = json!({"name": name_of(&file.path), "type": "file", "path": file.path});
    add_metadata(&mut entry, file);
    entry
}

/// Returns the metadata of an upload as the extended attributes of its files.
fn metadata(headers: &HeaderMap) -> std::result::Result<BTreeMap<String, String>, EnvdError> {
    let mut metadata = BTreeMap::new();
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) else {
            continue;
        };
        let invalid = |why: &str| EnvdError::invalid(format!("metadata: {key:?} {why}"));
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(invalid(&format!("must have 1 to {MAX_KEY_BYTES} bytes")));
        }
        // Only the first of several values counts.
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        let value = value.filter(|value| !value.contains('\t'));
        let value = value.ok_or_else(|| invalid("must have a value of printable ASCII"))?;
        metadata.insert(format!("{METADATA}{key}"), value.to_owned());
    }
    let bytes: usize = metadata
        .iter()
        .map(|(name, value)| USER.len() + name.len() + value.len())
        .sum();
    if bytes > MAX_METADATA_BYTES {
        let message = format!(
            "metadata: {bytes} bytes of keys and values; at most {MAX_METADATA_BYTES} are allowed"
        );
        return Err(EnvdError::invalid(message));
    }
    Ok(metadata)
}

/// Unpacks a body in small pieces, so that it needs little memory whatever it contains.
fn unpacked(body: Body) -> impl Stream<Item = std::result::Result<Bytes, String>> {
    let pieces = body.into_data_stream().map(|piece| match piece {
        Ok(piece) => {
            let count = piece.len().div_ceil(COMPRESSED_BYTES);
            let cuts = (0..count).map(|at| {
                let start = at * COMPRESSED_BYTES;
                piece.slice(start..piece.len().min(start + COMPRESSED_BYTES))
            });
            Ok(cuts.collect::<Vec<_>>())
        }
        Err(error) => Err(error.to_string()),
    });
    let pieces = pieces.flat_map(|pieces| match pieces {
        Ok(pieces) => stream::iter(pieces.into_iter().map(Ok).collect::<Vec<_>>()),
        Err(error) => stream::iter(vec![Err(error)]),
    });
    let state = Some((pieces, GzDecoder::new(Vec::new())));
    stream::try_unfold(state, |state| async move {
        let broken = |_| "not gzip".to_owned();
        let Some((mut pieces, mut decoder)) = state else {
            return Ok(None);
        };
        loop {
            let Some(piece) = pieces.next().await else {
                let rest = decoder.finish().map_err(broken)?;
                return Ok(Some((Bytes::from(rest), None)));
            };
            decoder.write_all(&piece?).map_err(broken)?;
            let ready = std::mem::take(decoder.get_mut());
            if !ready.is_empty() {
                return Ok(Some((Bytes::from(ready), Some((pieces, decoder)))));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn unpack(packed: Vec<u8>, piece: usize) -> std::result::Result<Vec<u8>, String> {
        let pieces: Vec<_> = packed.chunks(piece).map(Bytes::copy_from_slice).collect();
        let pieces = pieces.into_iter().map(Ok::<_, std::io::Error>);
        let body = Body::from_stream(stream::iter(pieces));
        let mut unpacked = std::pin::pin!(unpacked(body));
        let mut all = Vec::new();
        while let Some(piece) = unpacked.next().await {
            all.extend(piece?);
        }
        Ok(all)
    }

    #[test]
    fn metadata_are_attributes_within_limits() {
        let of = |name: String, value: &str| {
            let mut headers = HeaderMap::new();
            let name = axum::http::HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.insert(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            metadata(&headers).map_err(|error| format!("{error:?}"))
        };
        let found = of("X-Metadata-Author".to_owned(), "me").unwrap();
        assert_eq!(found["e2b.author"], "me");
        assert!(of("X-Other".to_owned(), "me").unwrap().is_empty());
        for (key, value, why) in [
            (String::new(), "v", "1 to 246 bytes"),
            ("k".repeat(247), "v", "1 to 246 bytes"),
            ("k".to_owned(), "\u{e9}", "printable ASCII"),
            ("k".to_owned(), &*"v".repeat(4096), "at most 4096"),
        ] {
            let error = of(format!("X-Metadata-{key}"), value).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[tokio::test]
    async fn a_compressed_body_is_unpacked_whole_or_refused() {
        let text = vec![7; 300_000];
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&text).unwrap();
        let packed = encoder.finish().unwrap();
        for piece in [1, 5, 1 << 20] {
            assert_eq!(unpack(packed.clone(), piece).await.unwrap(), text);
        }
        assert!(
            unpack(packed[..packed.len() - 5].to_vec(), 100)
                .await
                .is_err()
        );
        assert!(unpack(b"plain text".to_vec(), 100).await.is_err());
    }
}
