//! A body whose error reaches the client after everything before it.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};

use super::context::Context as Request;

/// The body of a response from a box.
///
/// hyper discards what it has not sent yet when a body fails. If the head and an error came
/// together, the client would get nothing.
pub(super) struct FlushedBody {
    body: Incoming,
    error: Option<hyper::Error>,
    /// The request counts as a call of its caller until the response ends.
    _request: Request,
}

impl FlushedBody {
    pub(super) fn new(body: Incoming, request: Request) -> Self {
        Self {
            body,
            error: None,
            _request: request,
        }
    }
}

impl HttpBody for FlushedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Err(error)) => {
                // hyper sends what it has before it polls again.
                self.error = Some(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            frame => Poll::Ready(frame),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.error.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
