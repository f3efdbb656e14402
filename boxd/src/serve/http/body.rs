//! Request bodies: limited in length, and drained if no handler reads them.

use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, EXPECT};
use hyper::{HeaderMap, Request};

use super::response::{Refusal, RefusalReason};

/// A request with a body that no handler has taken yet.
pub(super) type IncomingRequest = Request<PendingBody>;

/// A body as it arrives; reading fails beyond [`MAX_BODY_BYTES`].
pub(super) type Body = Limited<Incoming>;

/// A body until a handler takes it.
#[derive(Debug)]
pub(super) struct PendingBody(Option<Body>);

impl PendingBody {
    pub(super) fn new(body: Incoming) -> Self {
        Self(Some(Limited::new(body, MAX_BODY_BYTES)))
    }

    /// Returns the body on the first call, then `None`.
    pub(super) fn take(&mut self) -> Option<Body> {
        self.0.take()
    }
}

/// The maximum length of a body. RPC messages have a separate limit.
pub(super) const MAX_BODY_BYTES: usize = 256 * 1024 * 1024;

/// The maximum bytes of an unwanted body that the server drains.
///
/// A client that sends its whole body before it reads can then still receive the response.
const MAX_DRAINED_BYTES: usize = 1024 * 1024;

/// The maximum time to drain an unwanted body.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Refuses a body by its declared length, before the server reads any of it.
pub(super) fn check_length(headers: &HeaderMap) -> Result<(), Refusal> {
    let declared = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match declared {
        Some(length) if length > MAX_BODY_BYTES as u64 => Err(Refusal::new(
            RefusalReason::TooLarge,
            format!("body: {length} bytes exceed http_body_bytes, {MAX_BODY_BYTES}"),
        )),
        _ => Ok(()),
    }
}

/// Drains an unwanted body within limits.
///
/// A client that sent `Expect: 100-continue` gets no request to continue.
pub(super) async fn drain(request: &mut IncomingRequest) {
    if request.headers().contains_key(EXPECT) {
        return;
    }
    let Some(body) = request.body_mut().take() else {
        return;
    };
    let mut body = Limited::new(body, MAX_DRAINED_BYTES);
    let read = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, read).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_body_over_the_limit_is_refused() {
        let declared = |length: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_LENGTH, length.parse().unwrap());
            check_length(&headers)
        };
        assert_eq!(declared("268435456"), Ok(()));
        let refused = declared("268435457").unwrap_err();
        assert_eq!(refused.reason, RefusalReason::TooLarge);
        let shown = format!("{refused:?}");
        assert!(shown.contains("http_body_bytes") && shown.contains("268435456"));
        assert_eq!(check_length(&HeaderMap::new()), Ok(()));
    }
}
