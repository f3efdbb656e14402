//! Calls that send chunks before their result, and response bodies made of them.

use std::future::Future;
use std::time::Duration;

use axum::body::{Body, Bytes};
use box_protocol::BoxError;
use futures::future::BoxFuture;
use futures::stream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

/// The number of chunks that wait for their reader.
const WAITING_CHUNKS: usize = 8;

/// A call that sends chunks before its result. Dropping it cancels the call.
pub struct StreamedCall<C, R> {
    call: Option<BoxFuture<'static, Result<R, BoxError>>>,
    chunks: mpsc::Receiver<C>,
    /// The result of a call whose last chunks are unread.
    ended: Option<Result<R, BoxError>>,
    /// A chunk that was read in advance.
    first: Option<C>,
}

impl<C, R> std::fmt::Debug for StreamedCall<C, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamedCall")
    }
}

/// A step of a streamed call.
#[derive(Debug)]
pub enum Step<C, R> {
    /// The next chunk.
    Chunk(C),
    /// Nothing happened for the keepalive interval.
    Idle,
    /// The result, after all chunks.
    End(Result<R, BoxError>),
}

impl<C: Send + 'static, R: Send + 'static> StreamedCall<C, R> {
    /// Prepares a call, which gets the sender of its chunks. It starts when it is first polled.
    pub fn new<F>(call: impl FnOnce(mpsc::Sender<C>) -> F) -> Self
    where
        F: Future<Output = Result<R, BoxError>> + Send + 'static,
    {
        let (sender, chunks) = mpsc::channel(WAITING_CHUNKS);
        Self {
            call: Some(Box::pin(call(sender))),
            chunks,
            ended: None,
            first: None,
        }
    }

    /// Waits for the first chunk. Errors: those of a call that ends without one.
    ///
    /// A handler can therefore answer an error with a status, before it answers with a stream.
    pub async fn begun(self) -> Result<Self, BoxError> {
        self.begun_within(std::future::pending()).await
    }

    /// Waits as above, but not after this future has ended.
    pub async fn begun_within(mut self, limit: impl Future<Output = ()>) -> Result<Self, BoxError> {
        let step = tokio::select! {
            biased;
            step = self.next() => step,
            () = limit => Step::Idle,
        };
        match step {
            Step::Chunk(chunk) => self.first = Some(chunk),
            Step::End(Err(error)) => return Err(error),
            Step::End(ended) => self.ended = Some(ended),
            Step::Idle => {}
        }
        Ok(self)
    }

    /// Returns the next chunk, or the result after the last one. It can be cancelled without loss.
    ///
    /// After the result it never returns.
    pub async fn next(&mut self) -> Step<C, R> {
        if let Some(chunk) = self.first.take() {
            return Step::Chunk(chunk);
        }
        loop {
            let Some(call) = &mut self.call else {
                // The call has dropped its sender.
                if let Some(chunk) = self.chunks.recv().await {
                    return Step::Chunk(chunk);
                }
                match self.ended.take() {
                    Some(ended) => return Step::End(ended),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(chunk) = self.chunks.recv() => return Step::Chunk(chunk),
                ended = call => {
                    self.ended = Some(ended);
                    self.call = None;
                }
            }
        }
    }

    /// Returns a response body of this call; `frame` writes each step, or nothing.
    ///
    /// `Idle` steps come after each `keepalive` without a chunk. The body ends after the result. Dropping it cancels the
    /// call.
    pub fn into_body(
        self,
        keepalive: Option<Duration>,
        frame: impl FnMut(Step<C, R>) -> Bytes + Send + 'static,
    ) -> Body {
        let state = Some((self, frame));
        let frames = stream::unfold(state, move |state| async move {
            let (mut call, mut frame) = state?;
            loop {
                let idle = async {
                    match keepalive {
                        Some(time) => sleep_until(Instant::now() + time).await,
                        None => std::future::pending().await,
                    }
                };
                let step = tokio::select! {
                    biased;
                    step = call.next() => step,
                    () = idle => Step::Idle,
                };
                let is_last = matches!(step, Step::End(_));
                let bytes = frame(step);
                let next = (!is_last).then_some((call, frame));
                if !bytes.is_empty() || is_last {
                    return Some((Ok::<_, std::convert::Infallible>(bytes), next));
                }
                (call, frame) = next?;
            }
        });
        Body::from_stream(frames)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn counting(last: u32) -> StreamedCall<u32, u32> {
        StreamedCall::new(move |chunks| async move {
            for number in 0..last {
                chunks
                    .send(number)
                    .await
                    .map_err(|_| BoxError::cancelled("left"))?;
            }
            Ok(last)
        })
    }

    #[tokio::test]
    async fn the_result_comes_after_all_chunks() {
        let mut call = counting(50).begun().await.unwrap();
        for expected in 0..50 {
            assert!(matches!(call.next().await, Step::Chunk(chunk) if chunk == expected));
        }
        assert!(matches!(call.next().await, Step::End(Ok(50))));
    }

    #[tokio::test]
    async fn an_error_before_the_first_chunk_is_an_error() {
        let failing = StreamedCall::<u32, u32>::new(|_| async { Err(BoxError::conflict("no")) });
        assert!(failing.begun().await.is_err());
        let mut empty = counting(0).begun().await.unwrap();
        assert!(matches!(empty.next().await, Step::End(Ok(0))));
    }

    #[tokio::test]
    async fn a_body_ends_with_its_result() {
        let body = counting(3).into_body(None, |step| match step {
            Step::Chunk(1) | Step::Idle => Bytes::new(),
            Step::Chunk(number) => format!("{number},").into(),
            Step::End(result) => format!("end {}", result.unwrap()).into(),
        });
        let all = axum::body::to_bytes(body, 100).await.unwrap();
        assert_eq!(all, "0,2,end 3");
    }

    #[tokio::test]
    async fn a_call_continues_after_the_wait_for_its_begin() {
        let silent = StreamedCall::new(|chunks| async move {
            tokio::task::yield_now().await;
            chunks
                .send(7)
                .await
                .map_err(|_| BoxError::cancelled("left"))?;
            Ok(8)
        });
        let mut call = silent.begun_within(async {}).await.unwrap();
        assert!(matches!(call.next().await, Step::Chunk(7)));
        assert!(matches!(call.next().await, Step::End(Ok(8))));
        let refused = StreamedCall::<u32, u32>::new(|_| async { Err(BoxError::conflict("no")) });
        assert!(refused.begun_within(async {}).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_call_has_idle_steps_and_dies_with_its_body() {
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let call = StreamedCall::<u32, u32>::new(|chunks| async move {
            std::future::pending::<()>().await;
            drop((chunks, held));
            Ok(0)
        });
        let body = call.into_body(Some(Duration::from_secs(3)), |_| "idle".into());
        let mut frames = body.into_data_stream();
        let frame = futures::StreamExt::next(&mut frames).await;
        assert_eq!(frame.unwrap().unwrap(), "idle");
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(frames);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
