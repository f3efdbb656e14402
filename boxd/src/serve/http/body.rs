//! Request bodies: limited in length, and drained if no handler reads them.

use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use box_gateways::http::refusal::{Refusal, RefusalReason};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Frame, SizeHint};

/// The maximum length of a body: `server.max_body_mb`. RPC messages have a separate limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct BodyLimit(usize);

/// The maximum bytes of an unwanted body that the server drains.
///
/// A client that sends its whole body before it reads can then still receive the response.
const MAX_DRAINED_BYTES: usize = 1024 * 1024;

/// The maximum time to drain an unwanted body.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A body that fails beyond the limit, and returns to its [`Unread`] when it is dropped.
struct LimitedBody {
    body: Limited<Body>,
    unread: Unread,
}

/// The part of a body that its handler has not read, once the handler has dropped it.
#[derive(Clone, Default)]
pub(super) struct Unread(Arc<Mutex<Option<Limited<Body>>>>);

impl BodyLimit {
    pub(super) fn of_megabytes(megabytes: NonZeroU64) -> Self {
        let bytes = megabytes.get().saturating_mul(1 << 20);
        Self(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Limits a body, and keeps what its handler does not read.
    pub(super) fn limit(self, body: Body) -> (Body, Unread) {
        let unread = Unread::default();
        let body = LimitedBody {
            body: Limited::new(body, self.0),
            unread: unread.clone(),
        };
        (Body::new(body), unread)
    }

    /// Refuses a body by its declared length, before the server reads any of it.
    pub(super) fn check_length(self, headers: &HeaderMap) -> Result<(), Refusal> {
        let declared = headers
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        match declared {
            Some(length) if length > self.0 as u64 => Err(Refusal::new(
                RefusalReason::TooLarge,
                format!(
                    "body: {length} bytes exceed server.max_body_mb, {} bytes; send less at once, or raise the setting",
                    self.0
                ),
            )),
            _ => Ok(()),
        }
    }
}

impl Unread {
    /// Reads the rest of an unwanted body within limits.
    pub(super) async fn drain(self) {
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(rest) = rest else {
            return;
        };
        let mut rest = Limited::new(rest, MAX_DRAINED_BYTES);
        let read = async { while let Some(Ok(_)) = rest.frame().await {} };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, read).await;
    }
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for LimitedBody {
    fn drop(&mut self) {
        let rest = std::mem::replace(&mut self.body, Limited::new(Body::empty(), 0));
        let mut unread = self.unread.0.lock().unwrap_or_else(PoisonError::into_inner);
        *unread = Some(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(megabytes: u64) -> BodyLimit {
        BodyLimit::of_megabytes(NonZeroU64::new(megabytes).unwrap())
    }

    #[test]
    fn a_declared_body_over_the_limit_is_refused() {
        let limit = limit(256);
        let declared = |length: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_LENGTH, length.parse().unwrap());
            limit.check_length(&headers)
        };
        assert_eq!(declared("268435456"), Ok(()));
        let refused = declared("268435457").unwrap_err();
        assert_eq!(refused.reason, RefusalReason::TooLarge);
        let shown = format!("{refused:?}");
        assert!(shown.contains("server.max_body_mb") && shown.contains("268435456"));
        assert_eq!(limit.check_length(&HeaderMap::new()), Ok(()));
    }

    #[test]
    fn a_limit_beyond_all_lengths_is_no_error() {
        let limit = limit(u64::MAX);
        assert_eq!(limit.0, usize::MAX);
    }

    #[tokio::test]
    async fn a_dropped_body_is_drained_once() {
        let (body, unread) = limit(1).limit(Body::from("unread"));
        unread.clone().drain().await;
        drop(body);
        assert!(unread.0.lock().unwrap().is_some());
        unread.clone().drain().await;
        assert!(unread.0.lock().unwrap().is_none());
    }
}
