//! Files that clients read: whole, in ranges, and conditionally.

use axum::body::{Body, Bytes};
use axum::http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH,
    IF_RANGE, LAST_MODIFIED, RANGE,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{
    FileChunk, FileKind, FileOutcome, FilePart, FileRead, FileReadParams, FileStat, FileStatInfo,
    FileStatParams,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code, Invalid};
use futures::StreamExt as _;

use super::context::Context;
use super::stream::{Step, StreamedCall};

/// The media type of files.
const OCTETS: &str = "application/octet-stream";

/// How often a file is read that is replaced just before.
const ATTEMPTS: usize = 5;

/// A file, and the request for it.
#[derive(Debug)]
pub struct Download<'a> {
    /// The file, as the parameters of its read.
    pub params: FileReadParams,
    /// The method: `HEAD` has no body.
    pub method: &'a Method,
    /// The headers `Range`, `If-Range`, `If-Match` and `If-None-Match`.
    pub headers: &'a HeaderMap,
}

impl Download<'_> {
    /// Answers with the file, or with the requested range of it.
    ///
    /// The client gets one version of the file: a change during the download ends it early. Errors: `not_found`, `validation`
    /// (not a regular file), `denied`.
    pub async fn response(self, context: &Context) -> Result<Response, BoxError> {
        for _ in 1..ATTEMPTS {
            match self.attempt(context).await {
                Err(error) if error.code() == Code::Conflict => {}
                answered => return answered,
            }
        }
        self.attempt(context).await
    }

    /// Answers, or fails with `conflict` if the file changes between the two calls.
    async fn attempt(&self, context: &Context) -> Result<Response, BoxError> {
        let stat = stat_file(context, &self.params).await?;
        let etag = format!("\"{}\"", stat.etag);
        if let Some(status) = self.unmet_condition(&etag) {
            return Ok((status, [(ETAG, etag)]).into_response());
        }
        let Ok(range) = self.range(stat.size, &etag) else {
            let all = format!("bytes */{}", stat.size);
            let status = StatusCode::RANGE_NOT_SATISFIABLE;
            return Ok((status, [(CONTENT_RANGE, all)]).into_response());
        };
        let (first, length) = range.unwrap_or((0, stat.size));
        let mut has_length = true;
        let body = if *self.method == Method::HEAD {
            Body::empty()
        } else if length == 0 {
            // Files of `/proc` have content, and no size.
            let mut chunks = read_file(context, self.params.clone())
                .await?
                .into_data_stream();
            let first = chunks.next().await;
            has_length = first.is_none();
            Body::from_stream(futures::stream::iter(first).chain(chunks))
        } else {
            let mut params = self.params.clone();
            if range.is_some() {
                params.part = Some(FilePart::Bytes {
                    offset: first,
                    len: Some(length),
                });
            }
            params.if_match = Some(stat.etag.clone());
            read_file(context, params).await?
        };
        let mut response = body.into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(OCTETS));
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        if has_length {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        let modified = std::time::UNIX_EPOCH + std::time::Duration::from_millis(stat.modified_at.0);
        for (name, text) in [
            (ETAG, etag),
            (LAST_MODIFIED, httpdate::fmt_http_date(modified)),
        ] {
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.insert(name, value);
            }
        }
        if range.is_some() {
            let last = (first + length).saturating_sub(1);
            let part = HeaderValue::try_from(format!("bytes {first}-{last}/{}", stat.size));
            if let Ok(part) = part {
                headers.insert(CONTENT_RANGE, part);
            }
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        }
        Ok(response)
    }

    /// Returns the status of a condition that is not met.
    fn unmet_condition(&self, etag: &str) -> Option<StatusCode> {
        if self.headers.contains_key(IF_MATCH) && !self.lists(&IF_MATCH, etag) {
            return Some(StatusCode::PRECONDITION_FAILED);
        }
        let is_known = self.lists(&IF_NONE_MATCH, etag);
        is_known.then_some(StatusCode::NOT_MODIFIED)
    }

    /// Returns whether a header lists this etag, or all.
    fn lists(&self, name: &axum::http::HeaderName, etag: &str) -> bool {
        let values = self.headers.get_all(name).into_iter();
        let mut listed = values
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(str::trim);
        listed.any(|listed| listed == "*" || listed.strip_prefix("W/").unwrap_or(listed) == etag)
    }

    /// Returns the first requested range, as its start and length; `None` for the whole file.
    fn range(&self, size: u64, etag: &str) -> Result<Option<(u64, u64)>, Unsatisfiable> {
        if self
            .headers
            .get(IF_RANGE)
            .is_some_and(|known| known != etag)
        {
            return Ok(None);
        }
        let text = self
            .headers
            .get(RANGE)
            .and_then(|value| value.to_str().ok());
        text.map_or(Ok(None), |text| parse_range(text, size))
    }
}

/// No byte of the file is in the range.
#[derive(Debug, PartialEq, Eq)]
struct Unsatisfiable;

/// Parses `bytes=a-b`, `a-` or `-n`; returns `None` for other units and forms, which do not count.
fn parse_range(text: &str, size: u64) -> Result<Option<(u64, u64)>, Unsatisfiable> {
    let first = text
        .strip_prefix("bytes=")
        .and_then(|list| list.split(',').next());
    let Some((start, end)) = first.and_then(|range| range.trim().split_once('-')) else {
        return Ok(None);
    };
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let (start, end) = match (start.trim(), end.trim()) {
        ("", count) => {
            let Some(count) = number(count) else {
                return Ok(None);
            };
            if count == 0 {
                return Err(Unsatisfiable);
            }
            (size.saturating_sub(count), size)
        }
        (start, "") => match number(start) {
            Some(start) => (start, size),
            None => return Ok(None),
        },
        (start, last) => match (number(start), number(last)) {
            (Some(start), Some(last)) if start <= last => (start, last.saturating_add(1).min(size)),
            _ => return Ok(None),
        },
    };
    if start >= size {
        return Err(Unsatisfiable);
    }
    Ok(Some((start, end - start)))
}

/// Returns the attributes of a regular file, behind links.
async fn stat_file(context: &Context, file: &FileReadParams) -> Result<FileStatInfo, BoxError> {
    let params = FileStatParams {
        follow: true,
        user: file.user.clone(),
        expand: file.expand,
        ..FileStatParams::new(file.box_id.clone(), vec![file.path.clone()])
    };
    let runtime = context.runtime();
    let found = runtime
        .forward::<FileStat>(&context.caller, &params)
        .await?;
    match found.paths.into_values().next() {
        Some(FileOutcome::Stat(stat)) if stat.kind == FileKind::File => Ok(stat),
        Some(FileOutcome::Stat(stat)) if stat.kind == FileKind::Directory => {
            Err(Invalid::new("path", "is a directory; name a regular file").into())
        }
        Some(FileOutcome::Stat(_)) => Err(Invalid::new("path", "must be a regular file").into()),
        Some(FileOutcome::Error(error)) => {
            let detail = Detail {
                errno: error.errno,
                ..Detail::about(Subject::File)
            };
            Err(BoxError::new(error.code, error.message).with_detail(&detail))
        }
        None => Err(BoxError::unavailable("the agent sent no attributes")),
    }
}

/// Returns a body with the content of a file, or with a part of it.
///
/// It fails if the read fails, so that the client sees the loss.
pub async fn read_file(context: &Context, params: FileReadParams) -> Result<Body, BoxError> {
    let context = context.clone();
    let call = StreamedCall::<FileChunk, FileStatInfo>::new(|chunks| async move {
        let runtime = context.runtime();
        let read = runtime.forward_streamed::<FileRead>(&context.caller, &params, chunks);
        read.await
    });
    let call = call.begun().await?;
    let chunks = futures::stream::unfold(Some(call), |call| async move {
        let mut call = call?;
        match call.next().await {
            Step::Chunk(chunk) => Some((Ok::<Bytes, _>(chunk.data.0), Some(call))),
            Step::End(Err(error)) => Some((Err(error), None)),
            Step::End(Ok(_)) | Step::Idle => None,
        }
    });
    Ok(Body::from_stream(chunks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_as_http_says() {
        for (text, range) in [
            ("bytes=0-3", Ok(Some((0, 4)))),
            ("bytes=2-", Ok(Some((2, 8)))),
            ("bytes=-3", Ok(Some((7, 3)))),
            ("bytes=-30", Ok(Some((0, 10)))),
            ("bytes=9-100", Ok(Some((9, 1)))),
            ("bytes=1-2, 5-6", Ok(Some((1, 2)))),
            ("bytes=10-", Err(Unsatisfiable)),
            ("bytes=-0", Err(Unsatisfiable)),
            ("bytes=3-2", Ok(None)),
            ("lines=0-3", Ok(None)),
            ("bytes=x-", Ok(None)),
        ] {
            assert_eq!(parse_range(text, 10), range, "{text}");
        }
        assert_eq!(parse_range("bytes=0-", 0), Err(Unsatisfiable));
    }

    #[test]
    fn conditions_compare_etags() {
        let method = Method::GET;
        let unmet = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            let download = Download {
                params: FileReadParams::new("b".parse().unwrap(), "/f"),
                method: &method,
                headers: &headers,
            };
            download.unmet_condition("\"t\"")
        };
        assert_eq!(
            unmet("if-none-match", "\"s\", W/\"t\""),
            Some(StatusCode::NOT_MODIFIED)
        );
        assert_eq!(unmet("if-none-match", "\"s\""), None);
        assert_eq!(
            unmet("if-match", "\"s\""),
            Some(StatusCode::PRECONDITION_FAILED)
        );
        assert_eq!(unmet("if-match", "*"), None);
    }
}
