//! Files that clients send: written in pieces, with bounded memory.

use std::error::Error as StdError;

use axum::body::Bytes;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest};
use box_protocol::actions::{FileStatInfo, FileWrite, FileWriteParams, UploadPiece};
use box_protocol::{BoxError, Code, Invalid, UploadId};
use bytes::BytesMut;
use futures::{Stream, StreamExt as _};
use http_body_util::LengthLimitError;

use super::context::Context;
use super::refusal::{Refusal, RefusalReason};

/// The bytes of one piece.
const PIECE_BYTES: usize = 1024 * 1024;

/// Writes a file from a stream of bytes: a request body, or a part of a form.
///
/// `params` has everything but the data. The file appears when all its bytes have arrived. If the stream fails or the call is
/// dropped, the file stays as it was.
pub async fn write_file<E: Into<Box<dyn StdError + Send + Sync>>>(
    context: &Context,
    params: FileWriteParams,
    bytes: impl Stream<Item = Result<Bytes, E>>,
) -> Result<FileStatInfo, BoxError> {
    let mut upload = Upload {
        context,
        params,
        id: UploadId::fresh(),
        offset: 0,
        is_open: false,
    };
    let mut bytes = std::pin::pin!(bytes);
    let mut piece = BytesMut::new();
    while let Some(more) = bytes.next().await {
        let more = more.map_err(|error| {
            let error = error.into();
            if exceeds_limit(&*error) {
                return BoxError::new(Code::TooLarge, TOO_LONG);
            }
            Invalid::new("body", error.to_string()).into()
        })?;
        piece.extend_from_slice(&more);
        while piece.len() > PIECE_BYTES {
            let full = piece.split_to(PIECE_BYTES).freeze();
            upload.send(full, false).await?;
        }
    }
    upload.send(piece.freeze(), true).await
}

/// The message for a body over the limit of the server.
const TOO_LONG: &str =
    "body: longer than server.max_body_mb; send the file in several requests, or raise the setting";

/// Returns whether a body failed because it exceeds the limit of the server.
fn exceeds_limit(error: &(dyn StdError + 'static)) -> bool {
    error.is::<LengthLimitError>() || error.source().is_some_and(exceeds_limit)
}

/// An upload in progress. Dropping it removes the pieces that the agent has received.
struct Upload<'a> {
    context: &'a Context,
    params: FileWriteParams,
    id: UploadId,
    offset: u64,
    is_open: bool,
}

impl Upload<'_> {
    async fn send(&mut self, data: Bytes, done: bool) -> Result<FileStatInfo, BoxError> {
        let length = data.len() as u64;
        let mut params = self.params.clone();
        params.data = data.into();
        if !done || self.is_open {
            params.upload = Some(UploadPiece {
                id: self.id.clone(),
                offset: self.offset,
                done,
                abort: false,
            });
        }
        self.is_open |= !done;
        let (runtime, caller) = (self.context.runtime(), &self.context.caller);
        let written = runtime.forward::<FileWrite>(caller, &params).await?;
        self.offset += length;
        self.is_open &= !done;
        Ok(written)
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.is_open {
            return;
        }
        let mut params = self.params.clone();
        params.upload = Some(UploadPiece {
            id: self.id.clone(),
            offset: self.offset,
            done: false,
            abort: true,
        });
        let context = self.context.clone();
        tokio::spawn(async move {
            let runtime = context.runtime();
            // It answers with `cancelled`.
            let _ = runtime.forward::<FileWrite>(&context.caller, &params).await;
        });
    }
}

/// A form with files: `multipart/form-data`.
#[derive(Debug)]
pub struct Parts(Multipart);

impl Parts {
    /// Returns the next part, which is a stream of its bytes.
    pub async fn next(&mut self) -> Result<Option<Field<'_>>, Refusal> {
        self.0.next_field().await.map_err(|error| malformed(&error))
    }
}

/// Reads a part of limited length.
pub async fn read_part(mut part: Field<'_>, max_bytes: usize) -> Result<Bytes, Refusal> {
    let mut read = BytesMut::new();
    while let Some(more) = part.chunk().await.map_err(|error| malformed(&error))? {
        if read.len() + more.len() > max_bytes {
            let message = format!("body: a part is longer than {max_bytes} bytes");
            return Err(Refusal::new(RefusalReason::TooLarge, message));
        }
        read.extend_from_slice(&more);
    }
    Ok(read.freeze())
}

fn malformed(error: &MultipartError) -> Refusal {
    if exceeds_limit(error) {
        return Refusal::new(RefusalReason::TooLarge, TOO_LONG);
    }
    let message = format!("body: not a complete multipart form: {}", error.body_text());
    Refusal::new(RefusalReason::Malformed, message)
}

impl<S: Send + Sync> FromRequest<S> for Parts {
    type Rejection = Refusal;

    async fn from_request(mut request: axum::extract::Request, state: &S) -> Result<Self, Refusal> {
        // The layers limit the body already, and a file is written in pieces.
        DefaultBodyLimit::disable().apply(&mut request);
        let form = Multipart::from_request(request, state).await;
        let form =
            form.map_err(|error| Refusal::new(RefusalReason::Malformed, error.body_text()))?;
        Ok(Self(form))
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use http_body_util::Limited;

    use super::*;

    #[tokio::test]
    async fn a_form_over_the_limit_is_too_large() {
        let content = "x".repeat(500);
        let form = format!(
            "--b\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n{content}\r\n--b--\r\n"
        );
        for (limit, reason) in [
            (200, RefusalReason::TooLarge),
            (10, RefusalReason::TooLarge),
        ] {
            let body = Body::new(Limited::new(Body::from(form.clone()), limit));
            let kind = "multipart/form-data; boundary=b";
            let request = Request::builder().header("content-type", kind);
            let request = request.body(body).unwrap();
            let mut parts = Parts::from_request(request, &()).await.unwrap();
            let refused = match parts.next().await {
                Ok(Some(part)) => read_part(part, 1000).await.unwrap_err(),
                other => other.unwrap_err(),
            };
            assert_eq!(refused.reason, reason);
        }
    }
}
