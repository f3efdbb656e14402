//! A call of the peer, from its parameters to its response.

use std::fmt;
use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::action::{Action, Handle, HandlerFuture};
use crate::caller::Caller;
use crate::codec::{CallId, CallKind, Encoded, Meta, Payload};
use crate::engine::Engine;
use crate::error::{Code, Fault, RpcError};
use crate::idempotency::{CallKey, Lookup, Outcome, RunGuard, Waiter};
use crate::in_flight::{Body, Credit, EndReason};
use crate::peer::Peer;

/// Context of a call for its handler.
pub struct Call<A: Action> {
    peer: Peer,
    id: CallId,
    meta: Meta,
    deadline: Option<Instant>,
    chunks: Option<ChunkSink<A>>,
}

impl<A: Action> fmt::Debug for Call<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("action", &A::NAME)
            .field("meta", &self.meta)
            .finish_non_exhaustive()
    }
}

impl<A: Action> Call<A> {
    /// Returns the other end of the connection, for calls back.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the caller.
    /// Its token identifies it, or else the transport.
    pub fn caller(&self) -> Caller {
        self.peer.caller()
    }

    /// Returns the time left until the deadline of the caller, if it set one.
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns the idempotency key, if the caller sent one.
    pub fn key(&self) -> Option<&str> {
        self.meta.key.as_deref()
    }

    /// Returns the context of the call, if the caller sent one, parsed as `T`.
    pub fn context<T: DeserializeOwned>(&self) -> Option<Result<T, RpcError>> {
        let context = self.meta.context.as_deref()?;
        Some(
            serde_json::from_str(context).map_err(|error| {
                RpcError::fault(Fault::InvalidParams, format!("context: {error}"))
            }),
        )
    }

    /// Returns a handle that reports why the handler was dropped.
    pub fn cancellation(&self) -> Cancellation {
        Cancellation(self.peer.clone(), self.id.clone())
    }

    /// Returns the sink for chunks.
    /// `None` if the caller requested none; the result then contains everything.
    pub fn chunks(&mut self) -> Option<&mut ChunkSink<A>> {
        self.chunks.as_mut()
    }
}

/// Says whether the caller cancelled a call, or only its connection was lost.
#[derive(Debug, Clone)]
pub struct Cancellation(Peer, CallId);

impl Cancellation {
    /// Whether the caller cancelled the call.
    /// Valid while the handler runs and while it is dropped.
    pub fn was_cancelled(&self) -> bool {
        self.0.engine().incoming().end_reason(&self.1) == Some(EndReason::Cancelled)
    }
}

/// Sends the chunks of one call, no faster than its caller reads them.
pub struct ChunkSink<A: Action> {
    engine: Arc<Engine>,
    id: CallId,
    credit: Arc<Credit>,
    /// Length of the last chunk's text, an estimate for the next one.
    last: usize,
    action: PhantomData<fn(A::Chunk)>,
}

impl<A: Action> fmt::Debug for ChunkSink<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkSink")
            .field("action", &A::NAME)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl<A: Action> ChunkSink<A> {
    /// Sends one chunk once it has credit and a slot in the queue.
    pub async fn send(&mut self, chunk: &A::Chunk) -> Result<(), RpcError> {
        let index = self.credit.take().await;
        let text = self
            .engine
            .codec()
            .chunk(&self.id, index, chunk, self.last)
            .map_err(|error| RpcError::internal(format!("chunk: {error}")))?;
        self.last = text.len();
        let max = self.engine.limits.message_bytes;
        if text.len() > max {
            return Err(RpcError::limit(
                Code::TooLarge,
                "chunk",
                "message_bytes",
                max,
            ));
        }
        let sent = self.engine.respond(text).await;
        if sent.is_err() && self.engine.incoming().handed_over {
            // An error would end work that the next process is to continue.
            std::future::pending::<()>().await;
        }
        sent.map_err(|_| RpcError::cancelled("the connection is closed"))
    }
}

/// A decoded call, before its handler runs.
pub(crate) struct Dispatch {
    pub(crate) responder: Responder,
    pub(crate) body: Body,
    pub(crate) has_meta: bool,
    pub(crate) meta: Meta,
    pub(crate) credit: Option<Arc<Credit>>,
}

impl Dispatch {
    /// Parses the parameters, runs the handler and answers.
    pub(crate) async fn run<A: Action, S: Handle<A>>(self, state: Arc<S>) {
        let Self {
            responder,
            body,
            has_meta,
            mut meta,
            credit,
        } = self;
        let (codec, limits) = (responder.engine.codec(), &responder.engine.limits);
        let params: A::Params = match body.parse_params(has_meta, codec, limits) {
            Ok(params) => params,
            Err(error) => return responder.send_error(&error),
        };
        drop(body);
        let engine = Arc::clone(&responder.engine);
        let chunks = credit.map(|credit| ChunkSink {
            engine: Arc::clone(&engine),
            id: responder.id.clone(),
            credit,
            last: 0,
            action: PhantomData,
        });
        let limit = meta.deadline;
        let key = meta.key.take();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut call = Call {
            peer: Peer::of(Arc::clone(&engine)),
            id: responder.id.clone(),
            meta,
            deadline,
            chunks,
        };
        let Some(key) = key else {
            let outcome = {
                // Pinned here: as an argument, a large future is copied twice. The block drops a late
                // handler before the response, which may wait for a peer that does not read.
                let handling = pin!(state.handle(params, call));
                within(limit, handling).await
            };
            let text = match outcome {
                Ok(result) => responder.encode(&result),
                Err(error) => responder.encode_error(&error),
            };
            return responder.send(text).await;
        };
        if call.chunks.is_some() {
            return responder.send_error(&RpcError::validation(
                "key: a streaming call cannot have an idempotency key; omit credit or key",
            ));
        }
        let fingerprint = fingerprint(&params);
        let call_key = CallKey {
            owner: call.caller(),
            action: A::NAME,
            key: key.clone(),
        };
        call.meta.key = Some(key);
        let waiting = match engine.router.idempotency().begin(call_key, fingerprint) {
            Err(error) => return responder.send_error(&error),
            Ok(Lookup::Repeat(waiting)) => waiting,
            Ok(Lookup::First(guard, waiting)) => {
                let mut run: HandlerFuture = Box::pin(async move {
                    let outcome = {
                        let handling = pin!(state.handle(params, call));
                        within(limit, handling).await
                    };
                    guard.finish(outcome.and_then(|result| encoded(&result)));
                });
                // Polled here, so that it starts in the order of sending, like a call without a key.
                let first = poll_fn(|cx| Poll::Ready(run.as_mut().poll(cx))).await;
                if first.is_pending() {
                    let run = tokio::spawn(run);
                    RunGuard::set_task(&waiting, run.abort_handle());
                }
                waiting
            }
        };
        KeyedCall {
            responder: Some(responder),
            waiting,
            limit,
        }
        .run()
        .await;
    }
}

async fn within<T>(
    limit: Option<Duration>,
    work: Pin<&mut impl Future<Output = Result<T, RpcError>>>,
) -> Result<T, RpcError> {
    match limit {
        None => work.await,
        Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            Err(RpcError::timeout(format!(
                "not done within the deadline of {} ms",
                limit.as_millis()
            )))
        }),
    }
}

fn encoded(result: &impl serde::Serialize) -> Outcome {
    match serde_json::to_string(result) {
        Ok(text) => Ok(text.into()),
        Err(error) => Err(RpcError::internal(format!("result: {error}"))),
    }
}

/// Hashes the parameters, to detect a key reused with other ones.
fn fingerprint(params: &impl serde::Serialize) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(params)
        .unwrap_or_default()
        .hash(&mut hasher);
    hasher.finish()
}

/// Sends exactly one response to a call.
/// Dropped before that, it sends the reason: the call was cancelled, or its handler panicked.
#[derive(Debug)]
pub(crate) struct Responder {
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: CallId,
    /// Whether the call counts as a stream and ends like one.
    pub(crate) stream: bool,
    pub(crate) batch: Option<Arc<Batch>>,
    pub(crate) sent: bool,
}

impl Responder {
    /// Returns the text of a result, or of the error of writing it.
    fn encode(&self, result: &dyn Payload) -> String {
        let kind = if self.stream {
            CallKind::Stream
        } else {
            CallKind::Plain
        };
        match self.engine.codec().result(&self.id, result, kind) {
            Ok(text) if text.len() > self.engine.limits.message_bytes => {
                let max = self.engine.limits.message_bytes;
                self.encode_error(&RpcError::limit(
                    Code::TooLarge,
                    "result",
                    "message_bytes",
                    max,
                ))
            }
            Ok(text) => text,
            Err(error) => self.encode_error(&RpcError::internal(format!("result: {error}"))),
        }
    }

    /// Returns the text of an error; empty if the codec does not transmit it.
    fn encode_error(&self, error: &RpcError) -> String {
        let codec = self.engine.codec();
        let text = codec.error(Some(&self.id), error).unwrap_or_default();
        let max = self.engine.limits.message_bytes;
        if text.len() <= max {
            return text;
        }
        let error = RpcError::limit(Code::TooLarge, "error", "message_bytes", max);
        codec.error(Some(&self.id), &error).unwrap_or_default()
    }

    /// Sends the response once the queue has a slot.
    async fn send(mut self, mut text: String) {
        if !self.engine.has_room_for(text.len()) {
            let max = self.engine.limits.unread_bytes;
            let what = "bytes of unread responses";
            let error = RpcError::limit(Code::Overloaded, what, "unread_bytes", max);
            text = self.encode_error(&error);
        }
        if let Some(text) = self.complete(text) {
            let _ = self.engine.respond(text).await;
        }
    }

    /// Sends an error at once, without waiting for a slot.
    pub(crate) fn send_error(mut self, error: &RpcError) {
        let text = self.encode_error(error);
        if let Some(text) = self.complete(text) {
            self.engine.push_now(text);
        }
    }

    /// Frees the id and returns the text to send.
    ///
    /// The id is free before the caller sees the response, so the caller may reuse it at once. Returns `None` if the
    /// caller wants no response, or the batch is incomplete.
    fn complete(&mut self, text: String) -> Option<String> {
        self.sent = true;
        let reason = self.engine.incoming().complete(&self.id);
        if reason == Some(EndReason::Closed) {
            return None;
        }
        let silent =
            reason == Some(EndReason::Cancelled) && !self.engine.codec().responds_to_cancelled();
        let text = if silent || matches!(self.id, CallId::Unanswered(_)) {
            String::new()
        } else {
            text
        };
        match &self.batch {
            Some(batch) => {
                let max = self.engine.limits.message_bytes;
                let too_large = || {
                    self.encode_error(&RpcError::limit(
                        Code::TooLarge,
                        "batch answer",
                        "message_bytes",
                        max,
                    ))
                };
                batch.add(text, max, too_large)
            }
            None => Some(text).filter(|text| !text.is_empty()),
        }
    }
}

/// Waits for the outcome of a key on behalf of one call.
struct KeyedCall {
    responder: Option<Responder>,
    waiting: Waiter,
    /// Time this call may wait; the run has a separate limit.
    limit: Option<Duration>,
}

impl KeyedCall {
    async fn run(mut self) {
        let outcome = within(self.limit, pin!(self.waiting.outcome())).await;
        let Some(responder) = self.responder.take() else {
            return;
        };
        let text = match &outcome {
            Ok(text) => responder.encode(&Encoded(text)),
            Err(error) => responder.encode_error(error),
        };
        responder.send(text).await;
    }
}

impl Drop for KeyedCall {
    fn drop(&mut self) {
        // Only a cancelled call ends the run; a lost connection does not.
        if let Some(responder) = &self.responder
            && responder.engine.incoming().end_reason(&responder.id) == Some(EndReason::Cancelled)
        {
            self.waiting.cancel_run_if_last();
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.sent {
            let error = if std::thread::panicking() {
                RpcError::internal("the handler of this call failed")
            } else {
                RpcError::cancelled("the call was cancelled")
            };
            let text = self.encode_error(&error);
            if let Some(text) = self.complete(text) {
                self.engine.push_now(text);
            }
        }
        let idle = self.engine.incoming().release(self.stream);
        if idle {
            self.engine.idle.notify_waiters();
        }
    }
}

/// Collects the responses of a JSON-RPC batch and releases them together.
#[derive(Debug)]
pub(crate) struct Batch(Mutex<BatchState>);

#[derive(Debug)]
struct BatchState {
    text: String,
    missing: usize,
}

impl Batch {
    pub(crate) fn new(size: usize) -> Self {
        Self(Mutex::new(BatchState {
            text: String::new(),
            missing: size,
        }))
    }

    /// Adds the response of one member, empty if it has none.
    /// Returns the whole batch once it is complete.
    pub(crate) fn add(
        &self,
        mut response: String,
        max: usize,
        too_large: impl FnOnce() -> String,
    ) -> Option<String> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.missing -= 1;
        if state.text.len() + response.len() + 2 > max {
            response = too_large();
        }
        if !response.is_empty() {
            let before = if state.text.is_empty() { '[' } else { ',' };
            state.text.push(before);
            state.text.push_str(&response);
        }
        if state.missing > 0 || state.text.is_empty() {
            return None;
        }
        let mut text = std::mem::take(&mut state.text);
        text.push(']');
        Some(text)
    }
}
