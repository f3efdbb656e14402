//! A connection that fails if its client stalls.
//!
//! A client has a limited time to send a request's head, and to read a response. Between two requests it may be idle
//! for longer: clients keep connections for their next request.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// The maximum time from the first byte of a head, or from the connection, to the head's end.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may leave a response unread.
const UNREAD_TIMEOUT: Duration = Duration::from_mins(1);

/// How long a client may leave a stream of messages unread: it may pause between two of them.
const PAUSE_TIMEOUT: Duration = Duration::from_hours(1);

/// What the server expects from the client of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// The rest of a head, by this time.
    Head(Instant),
    /// Nothing: a request is being answered.
    Nothing,
    /// Nothing: a request is being answered with an event stream.
    Stream,
    /// Another request, or none.
    Next,
}

/// The progress of a connection, which its stream and its requests share.
#[derive(Debug, Clone)]
pub(super) struct Progress(Arc<Mutex<Expected>>);

impl Progress {
    /// Begins with the connection: its first head is expected.
    pub(super) fn new() -> Self {
        let expected = Expected::Head(Instant::now() + HEAD_TIMEOUT);
        Self(Arc::new(Mutex::new(expected)))
    }

    fn expected(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a head is complete; the request lasts until the result is dropped.
    pub(super) fn request(&self) -> RequestInProgress {
        *self.expected() = Expected::Nothing;
        RequestInProgress(Some(self.clone()))
    }

    /// Records received bytes.
    fn received(&self) {
        let mut expected = self.expected();
        if *expected == Expected::Next {
            *expected = Expected::Head(Instant::now() + HEAD_TIMEOUT);
        }
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct RequestInProgress(Option<Progress>);

impl RequestInProgress {
    /// Records that the response is an event stream, whose reader may pause.
    pub(super) fn streams(&self) {
        if let Some(progress) = &self.0 {
            *progress.expected() = Expected::Stream;
        }
    }

    /// Records that the connection serves another protocol from now on.
    pub(super) fn upgraded(mut self) {
        self.0 = None;
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        if let Some(progress) = &self.0 {
            *progress.expected() = Expected::Next;
        }
    }
}

/// A stream that fails once a head or a write has waited longer than its limit.
#[derive(Debug)]
pub(super) struct ClientStream<S> {
    stream: S,
    progress: Progress,
    /// The timer of an incomplete head.
    head: Option<Pin<Box<Sleep>>>,
    /// The timer that runs while a write waits.
    writing: Option<Pin<Box<Sleep>>>,
}

impl<S> ClientStream<S> {
    pub(super) fn new(stream: S, progress: Progress) -> Self {
        Self {
            stream,
            progress,
            head: None,
            writing: None,
        }
    }

    /// Returns the result of a write, or an error once it has waited too long.
    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.writing = None;
            return polled;
        }
        let limit = match *self.progress.expected() {
            Expected::Stream => PAUSE_TIMEOUT,
            _ => UNREAD_TIMEOUT,
        };
        let timer = || Box::pin(sleep(limit));
        let waiting = self.writing.get_or_insert_with(timer);
        ready!(waiting.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Waits for the time by which a head must be complete, if one is expected.
    fn poll_late_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Expected::Head(until) = *self.progress.expected() else {
            self.head = None;
            return Poll::Pending;
        };
        let timer = self
            .head
            .get_or_insert_with(|| Box::pin(sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if polled.is_pending() {
            return self.poll_late_head(cx);
        }
        if buffer.filled().len() > before {
            self.progress.received();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bounded(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.bounded(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.bounded(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.bounded(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_times_out_and_a_slow_one_does_not() {
        let (client, server) = tokio::io::duplex(16);
        let mut server = ClientStream::new(server, Progress::new());
        let slow = tokio::spawn(async move {
            let mut client = client;
            for _ in 0..4 {
                tokio::time::sleep(UNREAD_TIMEOUT / 2).await;
                client.read_exact(&mut [0; 16]).await.unwrap();
            }
            client
        });
        server.write_all(&[1; 64]).await.unwrap();
        let _client = slow.await.unwrap();
        let error = server.write_all(&[1; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reader_of_an_event_stream_may_pause() {
        let (mut client, server) = tokio::io::duplex(16);
        let progress = Progress::new();
        let mut server = ClientStream::new(server, progress.clone());
        let answering = progress.request();
        answering.streams();
        let paused = tokio::spawn(async move {
            tokio::time::sleep(UNREAD_TIMEOUT * 5).await;
            client.read_exact(&mut [0; 32]).await.unwrap();
            client
        });
        server.write_all(&[1; 32]).await.unwrap();
        let _client = paused.await.unwrap();
        let began = Instant::now();
        let error = server.write_all(&[1; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), PAUSE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_a_time_limit_and_an_idle_connection_a_longer_one() {
        let (mut client, server) = tokio::io::duplex(16);
        let progress = Progress::new();
        let mut server = ClientStream::new(server, progress.clone());
        let began = Instant::now();
        let error = server.read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), HEAD_TIMEOUT, "the first head");

        // The connection may be idle after a request for longer than a head may take.
        drop(progress.request());
        let idle = tokio::time::timeout(HEAD_TIMEOUT * 9, server.read(&mut [0; 8])).await;
        assert!(idle.is_err());
        // A head that comes in pieces has no more time than another.
        let began = Instant::now();
        for _ in 0..3 {
            client.write_all(b"x").await.unwrap();
            assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 1);
            tokio::time::sleep(HEAD_TIMEOUT / 4).await;
        }
        let error = server.read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), HEAD_TIMEOUT);
        // The body of a request has no such limit.
        let request = progress.request();
        client.write_all(b"x").await.unwrap();
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 1);
        let body = tokio::time::timeout(HEAD_TIMEOUT * 9, server.read(&mut [0; 8])).await;
        assert!(body.is_err());
        // Neither has another protocol.
        request.upgraded();
        client.write_all(b"x").await.unwrap();
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 1);
        let socket = tokio::time::timeout(HEAD_TIMEOUT * 9, server.read(&mut [0; 8])).await;
        assert!(socket.is_err());
    }
}
