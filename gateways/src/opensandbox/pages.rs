//! Lists of files, which a response has page by page.

use axum::response::Response;
use box_protocol::BoxError;
use box_protocol::actions::{FileKind, FileList, FileListParams, FileStatInfo};
use futures::{StreamExt as _, stream};
use serde::Serialize;

use crate::http::array::array_response;
use crate::http::context::Context;

/// A file as clients see it.
#[derive(Debug, Serialize)]
pub(super) struct FileEntry {
    path: String,
    r#type: FileKind,
    size: u64,
    modified_at: String,
    created_at: String,
    owner: String,
    group: String,
    mode: u32,
}

impl From<FileStatInfo> for FileEntry {
    fn from(stat: FileStatInfo) -> Self {
        Self {
            path: stat.path,
            r#type: stat.kind,
            size: stat.size,
            modified_at: stat.modified_at.to_string(),
            created_at: stat.created_at.unwrap_or(stat.modified_at).to_string(),
            owner: stat.owner,
            group: stat.group,
            mode: digits(stat.mode),
        }
    }
}

/// Returns the digits of permission bits: 0644 is 644.
pub(super) fn digits(bits: u32) -> u32 {
    format!("{:o}", bits & 0o7777).parse().unwrap_or(0)
}

/// A page, and the request of the next one.
type Page = (Vec<FileEntry>, Option<FileListParams>);

/// Returns the wanted entries of a page.
pub(super) async fn page(
    context: &Context,
    params: FileListParams,
    is_wanted: impl Fn(&FileStatInfo) -> bool,
) -> Result<Page, BoxError> {
    let runtime = context.runtime();
    let page = runtime
        .forward::<FileList>(&context.caller, &params)
        .await?;
    let wanted = page.entries.into_iter().filter(is_wanted);
    let entries = wanted.map(FileEntry::from).collect();
    let next = page.next.map(|after| FileListParams {
        after: Some(after),
        ..params
    });
    Ok((entries, next))
}

/// Answers with a page and all that follow. A page is read when the client has received the one before.
pub(super) fn response(
    context: Context,
    (first, rest): Page,
    is_wanted: impl Fn(&FileStatInfo) -> bool + Clone + Send + 'static,
) -> Response {
    let state = (context, rest, is_wanted);
    let rest = stream::try_unfold(state, |(context, params, is_wanted)| async move {
        let Some(params) = params else {
            return Ok(None);
        };
        let (entries, next) = page(&context, params, is_wanted.clone()).await?;
        Ok::<_, BoxError>(Some((entries, (context, next, is_wanted))))
    });
    array_response(stream::once(async { Ok(first) }).chain(rest))
}
