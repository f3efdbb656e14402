//! Calling side: calls, streams of chunks, and cancellation on drop.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, Sleep};

use crate::action::Action;
use crate::caller::Caller;
use crate::codec::{CallId, Control, Flow, Grant, Meta};
use crate::engine::{Engine, Stats};
use crate::error::{CallError, RpcError};
use crate::in_flight::{Body, StreamItem};
use crate::outbox::Kind;
use crate::session::CloseReason;

/// Time a caller waits beyond its deadline, so that the callee's error can arrive.
const ERROR_GRACE: Duration = Duration::from_millis(250);

/// Handle for calls to the other end of a connection.
/// Cheap to clone; it does not keep the connection open.
#[derive(Clone)]
pub struct Peer(Arc<Engine>);

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.caller()).finish()
    }
}

impl Peer {
    pub(crate) fn of(engine: Arc<Engine>) -> Self {
        Self(engine)
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.0
    }

    /// Calls and waits for the result. Dropping the future cancels the call.
    pub async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, CallError> {
        self.request::<A>(params).call().await
    }

    /// Calls and returns the chunks before the result.
    /// Dropping the stream cancels the call.
    pub async fn stream<A: Action>(&self, params: &A::Params) -> Result<Chunks<A>, CallError> {
        self.request::<A>(params).stream().await
    }

    /// Calls without a response.
    pub async fn notify<A: Action>(&self, params: &A::Params) -> Result<(), CallError> {
        if let Some(reason) = self.0.outgoing().closed_reason() {
            return Err(CallError::NotSent(reason.to_owned()));
        }
        let text = self
            .0
            .codec()
            .call(None, A::NAME, params, &Meta::default())
            .map_err(shape)?;
        check_size(text.len(), self.0.limits.message_bytes)?;
        self.0
            .outbox
            .push(text, Kind::Call)
            .await
            .map_err(|_| not_sent())
    }

    /// Starts a call with further settings beside its parameters.
    pub fn request<'a, A: Action>(&'a self, params: &'a A::Params) -> Request<'a, A> {
        Request {
            engine: &self.0,
            params,
            meta: Meta::default(),
            action: PhantomData,
        }
    }

    /// Returns the caller at the other end.
    /// Its token identifies it, or else the transport.
    pub fn caller(&self) -> Caller {
        self.0.caller()
    }

    /// Returns the counters of this connection.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Returns the number of calls of this side that wait for a response.
    pub fn in_flight(&self) -> usize {
        self.0.outgoing().in_flight()
    }

    /// Whether a new call would fail without being sent.
    pub fn is_closed(&self) -> bool {
        self.0.outgoing().closed_reason().is_some()
    }

    /// Stops pings and silence detection, or resumes them.
    /// Used for a peer that is stopped on purpose.
    pub fn expect_silence(&self, expected: bool) {
        self.0.silence_expected.store(expected, Ordering::Relaxed);
    }

    /// Whether the peer has announced its end with an immediate restart.
    pub fn restarts(&self) -> bool {
        matches!(self.0.bye(), Some(CloseReason::Bye { restart: true, .. }))
    }
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn shape(error: serde_json::Error) -> CallError {
    CallError::Shape(error.to_string())
}

fn not_sent() -> CallError {
    CallError::NotSent("the connection is closed".to_owned())
}

fn check_size(size: usize, limit: usize) -> Result<(), CallError> {
    if size > limit {
        Err(CallError::TooLarge { size, limit })
    } else {
        Ok(())
    }
}

/// A call that is not sent yet; see [`Peer::request`].
#[must_use = "nothing is sent until `call`, `send` or `stream`"]
pub struct Request<'a, A: Action> {
    engine: &'a Arc<Engine>,
    params: &'a A::Params,
    meta: Meta,
    action: PhantomData<fn() -> A>,
}

impl<A: Action> fmt::Debug for Request<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("action", &A::NAME)
            .field("meta", &self.meta)
            .finish_non_exhaustive()
    }
}

impl<A: Action> Request<'_, A> {
    /// Sets the timeout of the call.
    /// It travels as remaining time, and the callee enforces it.
    pub fn deadline(mut self, left: Duration) -> Self {
        self.meta.deadline = Some(left);
        self
    }

    /// Sets the idempotency key, so that a repeated call does not run again.
    /// The server keeps the outcome for ten minutes and returns it to every repetition.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.meta.key = Some(key.into());
        self
    }

    /// Sets the context of the call. Omitted if it cannot be written as JSON.
    pub fn context(mut self, context: &impl Serialize) -> Self {
        self.meta.context = serde_json::to_string(context).ok().map(Into::into);
        self
    }

    /// Sets how many chunks a stream may be ahead of its reader, at least one.
    /// A codec with a fixed window ignores it.
    pub fn credit(mut self, chunks: u32) -> Self {
        self.meta.credit = chunks.max(1);
        self
    }

    fn encode(&self, id: i64) -> Result<String, CallError> {
        let text = self
            .engine
            .codec()
            .call(Some(id), A::NAME, self.params, &self.meta)
            .map_err(shape)?;
        check_size(text.len(), self.engine.limits.message_bytes)?;
        Ok(text)
    }

    /// Sends the call and waits for its result.
    pub async fn call(self) -> Result<A::Result, CallError> {
        self.send().await?.result().await
    }

    /// Sends the call. When this returns, the call has its position in the order.
    pub async fn send(mut self) -> Result<PendingCall<A>, CallError> {
        self.meta.credit = 0;
        let registered = self.engine.outgoing().register_call();
        let (id, answer) = registered.map_err(CallError::NotSent)?;
        // The guard exists before the call is sent. Wherever this future is dropped, the guard removes the call, and
        // cancels it if it was sent.
        let mut guard = Guard::new(self.engine, id);
        let text = self.encode(id)?;
        let deadline = self.meta.deadline.map(|left| {
            let until = Instant::now().checked_add(left.saturating_add(ERROR_GRACE));
            (left, until)
        });
        in_time(deadline, guard.send(text)).await??;
        Ok(PendingCall {
            guard,
            answer,
            deadline,
            action: PhantomData,
        })
    }

    /// Sends the call and returns the stream of its chunks.
    pub async fn stream(mut self) -> Result<Chunks<A>, CallError> {
        match self.engine.codec().flow() {
            Flow::Window(window) => self.meta.credit = window,
            Flow::Credit if self.meta.credit == 0 => {
                self.meta.credit = self.engine.limits.stream_credit;
            }
            Flow::Credit => {}
        }
        let registered = self.engine.outgoing().register_stream(self.meta.credit);
        let (id, items) = registered.map_err(CallError::NotSent)?;
        let mut guard = Guard::new(self.engine, id);
        let text = self.encode(id)?;
        let sleep = |left: Duration| Box::pin(tokio::time::sleep(left.saturating_add(ERROR_GRACE)));
        let mut deadline = self.meta.deadline.map(|left| (left, sleep(left)));
        match &mut deadline {
            None => guard.send(text).await?,
            Some((left, until)) => tokio::select! {
                biased;
                sent = guard.send(text) => sent?,
                () = until => return Err(CallError::Timeout(*left)),
            },
        }
        Ok(Chunks {
            guard,
            items,
            window: self.meta.credit,
            read: 0,
            granted: 0,
            deadline,
            end: None,
            action: PhantomData,
        })
    }
}

type Deadline = (Duration, Option<Instant>);

/// Waits for `work`, at most until the deadline of the call.
async fn in_time<T>(
    deadline: Option<Deadline>,
    work: impl Future<Output = T>,
) -> Result<T, CallError> {
    match deadline {
        Some((left, Some(until))) => tokio::time::timeout_at(until, work)
            .await
            .map_err(|_| CallError::Timeout(left)),
        // A deadline too far in the future to represent never passes.
        Some((_, None)) | None => Ok(work.await),
    }
}

/// A sent call. Dropping it cancels the call.
#[must_use = "dropping it cancels the call"]
pub struct PendingCall<A: Action> {
    guard: Guard,
    answer: oneshot::Receiver<Result<Body, RpcError>>,
    deadline: Option<Deadline>,
    action: PhantomData<fn() -> A>,
}

impl<A: Action> fmt::Debug for PendingCall<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("PendingCall");
        out.field("action", &A::NAME).finish_non_exhaustive()
    }
}

impl<A: Action> PendingCall<A> {
    /// Waits for the result.
    pub async fn result(mut self) -> Result<A::Result, CallError> {
        let answer = in_time(self.deadline, &mut self.answer).await?;
        self.guard.finished = true;
        let engine = &self.guard.engine;
        let body = answer.map_err(|_| lost(engine))??;
        body.parse(engine.codec(), &engine.limits).map_err(shape)
    }
}

fn lost(engine: &Engine) -> CallError {
    CallError::Lost(
        engine
            .outgoing()
            .closed_reason()
            .unwrap_or("the connection is closed")
            .to_owned(),
    )
}

/// Removes a call on drop, and cancels it if the peer may be working on it.
#[derive(Debug)]
struct Guard {
    engine: Arc<Engine>,
    id: i64,
    sent: bool,
    /// Whether the response has arrived, so that the guard cancels nothing.
    finished: bool,
}

impl Guard {
    fn new(engine: &Arc<Engine>, id: i64) -> Self {
        Self {
            engine: Arc::clone(engine),
            id,
            sent: false,
            finished: false,
        }
    }

    async fn send(&mut self, text: String) -> Result<(), CallError> {
        // From here on the call may be sent, even while this future is dropped.
        self.sent = true;
        let sent = self.engine.outbox.push(text, Kind::Call).await;
        sent.map_err(|_| not_sent())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let waiting = self.engine.outgoing().remove(self.id);
        if self.sent && waiting {
            self.engine.control(&Control::Cancel {
                id: CallId::Number(self.id),
            });
        }
    }
}

/// The chunks of a call, in order, and then its result.
pub struct Chunks<A: Action> {
    guard: Guard,
    items: mpsc::Receiver<StreamItem>,
    window: u32,
    /// Chunks read, and how many of those this side has acknowledged.
    read: u64,
    granted: u64,
    deadline: Option<(Duration, Pin<Box<Sleep>>)>,
    end: Option<Result<Body, CallError>>,
    action: PhantomData<fn() -> A>,
}

impl<A: Action> fmt::Debug for Chunks<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunks")
            .field("action", &A::NAME)
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
}

impl<A: Action> Chunks<A> {
    /// Discards the remaining chunks and returns the result.
    pub async fn finish(mut self) -> Result<A::Result, CallError> {
        while let Some(chunk) = self.next().await {
            chunk?;
        }
        let end = self
            .end
            .take()
            .unwrap_or_else(|| Err(lost(&self.guard.engine)));
        let engine = &self.guard.engine;
        end?.parse(engine.codec(), &engine.limits).map_err(shape)
    }

    fn grant(&mut self) {
        let unread = self.read - self.granted;
        if unread < u64::from(self.window.div_ceil(2)) {
            return;
        }
        self.granted = self.read;
        let id = CallId::Number(self.guard.id);
        let grant = match self.guard.engine.codec().flow() {
            Flow::Credit => Grant::More(u32::try_from(unread).unwrap_or(u32::MAX)),
            Flow::Window(window) => Grant::UpTo {
                read: self.read,
                window,
            },
        };
        self.guard.engine.control(&Control::Grant { id, grant });
    }
}

impl<A: Action> Stream for Chunks<A> {
    /// A chunk. An error ends the stream.
    /// [`finish`](Chunks::finish) would return the same error.
    type Item = Result<A::Chunk, CallError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.end.is_some() {
            return Poll::Ready(None);
        }
        if let Some((left, sleep)) = &mut this.deadline
            && sleep.as_mut().poll(cx).is_ready()
        {
            let error = CallError::Timeout(*left);
            this.end = Some(Err(error.clone()));
            return Poll::Ready(Some(Err(error)));
        }
        match ready!(this.items.poll_recv(cx)) {
            Some(StreamItem::Chunk(body)) => {
                this.read += 1;
                this.grant();
                let engine = &this.guard.engine;
                let chunk = body.parse(engine.codec(), &engine.limits);
                Poll::Ready(Some(chunk.map_err(shape)))
            }
            Some(StreamItem::End(outcome)) => {
                this.guard.finished = true;
                let failed = outcome.as_ref().err().cloned().map(CallError::from);
                this.end = Some(outcome.map_err(CallError::from));
                Poll::Ready(failed.map(Err))
            }
            None => {
                this.guard.finished = true;
                let error = lost(&this.guard.engine);
                this.end = Some(Err(error.clone()));
                Poll::Ready(Some(Err(error)))
            }
        }
    }
}
