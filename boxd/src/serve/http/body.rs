//! Request bodies: limited in length, and drained if no handler reads them.

use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, EXPECT};
use hyper::{HeaderMap, Request};

use super::answer::{Refusal, Why};

/// A request with a body that no handler has taken yet.
pub(super) type Asked = Request<Unread>;

/// A body as it arrives; reading fails beyond [`LONGEST`].
pub(super) type Body = Limited<Incoming>;

/// A body until a handler takes it.
#[derive(Debug)]
pub(super) struct Unread(Option<Body>);

impl Unread {
    pub(super) fn new(body: Incoming) -> Self {
        Self(Some(Limited::new(body, LONGEST)))
    }

    /// Returns the body on the first call, then `None`.
    pub(super) fn take(&mut self) -> Option<Body> {
        self.0.take()
    }
}

/// The maximum length of a body. RPC messages have a separate limit.
pub(super) const LONGEST: usize = 256 * 1024 * 1024;

/// The maximum bytes of an unwanted body that the server drains.
///
/// A client that sends its whole body before it reads can then still receive the answer.
const UNWANTED: usize = 1024 * 1024;

/// The maximum time to drain an unwanted body.
const UNWANTED_TIME: Duration = Duration::from_secs(5);

/// Refuses a body by its declared length, before the server reads any of it.
pub(super) fn check_length(headers: &HeaderMap) -> Result<(), Refusal> {
    let said = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match said {
        Some(length) if length > LONGEST as u64 => Err(Refusal::new(
            Why::TooLarge,
            format!("the body has {length} bytes, the limit (http_body_bytes) is {LONGEST}"),
        )),
        _ => Ok(()),
    }
}

/// Drains an unwanted body within limits.
///
/// A client that sent `Expect: 100-continue` gets no request to continue.
pub(super) async fn discard(asked: &mut Asked) {
    if asked.headers().contains_key(EXPECT) {
        return;
    }
    let Some(body) = asked.body_mut().take() else {
        return;
    };
    let mut body = Limited::new(body, UNWANTED);
    let read = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = tokio::time::timeout(UNWANTED_TIME, read).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_is_said_to_be_too_long_is_refused_with_the_limit() {
        let said = |length: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_LENGTH, length.parse().unwrap());
            check_length(&headers)
        };
        assert_eq!(said("268435456"), Ok(()));
        let refused = said("268435457").unwrap_err();
        assert_eq!(refused.why, Why::TooLarge);
        let shown = format!("{refused:?}");
        assert!(shown.contains("http_body_bytes") && shown.contains("268435456"));
        assert_eq!(check_length(&HeaderMap::new()), Ok(()));
    }
}
