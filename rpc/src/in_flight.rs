//! Tables of the outgoing and incoming calls in flight.
//!
//! They do no I/O, read no clock and never block, so all rules about ids are here and tested alone.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::buffer_pool;
use crate::codec::{CallId, Codec, Grant, Message, Part, parse_params};
use crate::error::RpcError;
use crate::limits::Limits;

/// A part of a received text, kept with the text and parsed on use.
#[derive(Debug)]
pub(crate) struct Body {
    text: String,
    range: Range<usize>,
    /// Whether the whole text is known to be JSON.
    checked: bool,
}

impl Drop for Body {
    fn drop(&mut self) {
        if self.text.capacity() >= buffer_pool::MIN_POOLED {
            buffer_pool::recycle(std::mem::take(&mut self.text));
        }
    }
}

impl Body {
    /// Returns the range of `part`, which must be a slice of `text`.
    pub(crate) fn range_of(text: &str, part: &str) -> Range<usize> {
        let start = (part.as_ptr() as usize).wrapping_sub(text.as_ptr() as usize);
        if text.get(start..start.saturating_add(part.len())).is_some() {
            start..start + part.len()
        } else {
            0..0
        }
    }

    pub(crate) fn new(text: String, range: Range<usize>, checked: bool) -> Self {
        Self {
            text,
            range,
            checked,
        }
    }

    fn as_str(&self) -> &str {
        // Omitted parameters are an empty object.
        if self.range.is_empty() {
            "{}"
        } else {
            &self.text[self.range.clone()]
        }
    }

    /// Parses the body as parameters, which may contain `_meta`.
    pub(crate) fn parse_params<T: DeserializeOwned>(
        &self,
        has_meta: bool,
        codec: &dyn Codec,
        limits: &Limits,
    ) -> Result<T, RpcError> {
        parse_params(self.as_str(), has_meta).or_else(|error| {
            if self.checked {
                return Err(error);
            }
            match codec.decode_fully(&self.text, limits) {
                Err(failure) => Err(failure.error),
                Ok(Message::Call {
                    params, has_meta, ..
                }) => parse_params(params, has_meta),
                Ok(_) => Err(error),
            }
        })
    }

    /// Parses the body as a result or chunk.
    pub(crate) fn parse<T: DeserializeOwned>(
        &self,
        codec: &dyn Codec,
        limits: &Limits,
    ) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.as_str()).or_else(|error| {
            if self.checked {
                return Err(error);
            }
            match codec.decode_fully(&self.text, limits) {
                Ok(Message::Response {
                    outcome: Ok(body), ..
                }) => serde_json::from_str(body),
                _ => Err(error),
            }
        })
    }
}

type ById = BuildHasherDefault<IdHasher>;

/// Hasher for call ids.
/// It suffices because a peer can add no more entries to a table than it has calls in flight.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(23);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number.cast_unsigned());
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number.cast_unsigned() as u64);
    }
}

/// Item that a streaming call of this side receives.
#[derive(Debug)]
pub(crate) enum StreamItem {
    Chunk(Body),
    End(Result<Body, RpcError>),
}

#[derive(Debug)]
enum Waiter {
    Call(oneshot::Sender<Result<Body, RpcError>>),
    Stream(mpsc::Sender<StreamItem>),
}

/// Calls of this side that wait for a response.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    last: i64,
    waiting: HashMap<i64, Waiter, ById>,
    /// Reason why no further call can be sent.
    closed: Option<String>,
}

/// Outcome of delivering a response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Delivered,
    /// The call no longer waits for it.
    Late,
    /// The peer sent more chunks than its credit: the call has failed.
    CreditExceeded,
}

impl Outgoing {
    fn add(&mut self, waiter: Waiter) -> Result<i64, String> {
        if let Some(reason) = &self.closed {
            return Err(reason.clone());
        }
        self.last += 1;
        self.waiting.insert(self.last, waiter);
        Ok(self.last)
    }

    /// Allocates an id for a call with a single response.
    pub(crate) fn register_call(
        &mut self,
    ) -> Result<(i64, oneshot::Receiver<Result<Body, RpcError>>), String> {
        let (sender, receiver) = oneshot::channel();
        Ok((self.add(Waiter::Call(sender))?, receiver))
    }

    /// Allocates an id for a stream, with capacity for `credit` chunks and the end.
    pub(crate) fn register_stream(
        &mut self,
        credit: u32,
    ) -> Result<(i64, mpsc::Receiver<StreamItem>), String> {
        let (sender, receiver) = mpsc::channel(credit as usize + 1);
        Ok((self.add(Waiter::Stream(sender))?, receiver))
    }

    /// Removes a call. Returns whether it was still waiting.
    pub(crate) fn remove(&mut self, id: i64) -> bool {
        self.waiting.remove(&id).is_some()
    }

    /// Whether a call waits for chunks under this id.
    pub(crate) fn is_stream(&self, id: &CallId) -> bool {
        match id {
            CallId::Number(id) => matches!(self.waiting.get(id), Some(Waiter::Stream(_))),
            _ => false,
        }
    }

    /// Delivers a response to the call that waits for it.
    pub(crate) fn deliver(
        &mut self,
        id: &CallId,
        outcome: Result<Body, RpcError>,
        part: Part,
    ) -> Delivery {
        let CallId::Number(number) = id else {
            return Delivery::Late;
        };
        if let (Some(Waiter::Stream(sender)), Part::Chunk { .. } | Part::Either { .. }) =
            (self.waiting.get(number), part)
        {
            let item = match outcome {
                Ok(body) => StreamItem::Chunk(body),
                Err(error) => StreamItem::End(Err(error)),
            };
            // One slot is reserved for the end of the stream.
            if matches!(item, StreamItem::Chunk(_)) && sender.capacity() <= 1 {
                let error = RpcError::internal("the peer sent more chunks than it was granted");
                let _ = sender.try_send(StreamItem::End(Err(error)));
                self.waiting.remove(number);
                return Delivery::CreditExceeded;
            }
            return match sender.try_send(item) {
                Ok(()) => Delivery::Delivered,
                Err(_) => Delivery::Late,
            };
        }
        if matches!(part, Part::Chunk { .. }) {
            return Delivery::Late;
        }
        let delivered = match self.waiting.remove(number) {
            None => false,
            Some(Waiter::Call(sender)) => sender.send(outcome).is_ok(),
            Some(Waiter::Stream(sender)) => sender.try_send(StreamItem::End(outcome)).is_ok(),
        };
        if delivered {
            Delivery::Delivered
        } else {
            Delivery::Late
        }
    }

    /// Refuses new calls; the peer may still answer the sent ones.
    pub(crate) fn refuse_new(&mut self, reason: &str) {
        self.closed.get_or_insert_with(|| reason.to_owned());
    }

    /// Ends all calls. Waiting calls learn this when their channel closes.
    pub(crate) fn close(&mut self, reason: &str) {
        self.closed.get_or_insert_with(|| reason.to_owned());
        self.waiting.clear();
    }

    pub(crate) fn closed_reason(&self) -> Option<&str> {
        self.closed.as_deref()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

/// Reason why a call of the peer was ended from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The caller cancelled it.
    Cancelled,
    /// The connection is over.
    Closed,
}

#[derive(Debug)]
struct Entry {
    info: CallInfo,
    abort: Option<AbortHandle>,
    credit: Option<Arc<Credit>>,
    end_reason: Option<EndReason>,
}

/// Information about a call of the peer.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallInfo {
    pub(crate) action: &'static str,
    /// Context of the call; stored only if a later check needs it.
    pub(crate) context: Option<Arc<str>>,
}

/// Calls of the peer that run here.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    running: HashMap<CallId, Entry, ById>,
    calls: usize,
    streams: usize,
    unanswered: u64,
    /// Whether the connection is closing and admits no more calls.
    pub(crate) closing: bool,
    /// Whether running calls survive the end of the connection.
    /// This process ends, and the next one continues them.
    pub(crate) handed_over: bool,
}

/// Reason why a call was not admitted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Duplicate,
    TooManyCalls,
    TooManyStreams,
    Closing,
}

impl Incoming {
    /// Admits a call. A call with `credit` counts as a stream.
    pub(crate) fn admit(
        &mut self,
        id: Option<CallId>,
        info: CallInfo,
        credit: Option<Arc<Credit>>,
        limits: &Limits,
    ) -> Result<CallId, Refusal> {
        if self.closing {
            return Err(Refusal::Closing);
        }
        let id = id.unwrap_or_else(|| {
            self.unanswered += 1;
            CallId::Unanswered(self.unanswered)
        });
        if self.running.contains_key(&id) {
            return Err(Refusal::Duplicate);
        }
        if credit.is_some() {
            if self.streams >= limits.open_streams {
                return Err(Refusal::TooManyStreams);
            }
            self.streams += 1;
        } else {
            if self.calls >= limits.in_flight {
                return Err(Refusal::TooManyCalls);
            }
            self.calls += 1;
        }
        self.running.insert(
            id.clone(),
            Entry {
                info,
                abort: None,
                credit,
                end_reason: None,
            },
        );
        Ok(id)
    }

    /// Sets the task of a call. Aborts it at once if the call is already cancelled.
    pub(crate) fn set_task(&mut self, id: &CallId, task: AbortHandle) {
        if let Some(entry) = self.running.get_mut(id) {
            if entry.end_reason.is_some() {
                task.abort();
            }
            entry.abort = Some(task);
        }
    }

    /// Frees the id of a call and returns why it was ended, if it was.
    /// The call still counts against its limit.
    pub(crate) fn complete(&mut self, id: &CallId) -> Option<EndReason> {
        self.running.remove(id).and_then(|entry| entry.end_reason)
    }

    /// Returns why a running call is being ended, if it is.
    pub(crate) fn end_reason(&self, id: &CallId) -> Option<EndReason> {
        self.running.get(id).and_then(|entry| entry.end_reason)
    }

    /// Releases the slot of an answered call. Returns whether no call remains.
    pub(crate) fn release(&mut self, stream: bool) -> bool {
        if stream {
            self.streams -= 1;
        } else {
            self.calls -= 1;
        }
        self.is_idle()
    }

    /// Returns the information about a running call.
    pub(crate) fn info(&self, id: &CallId) -> Option<&CallInfo> {
        self.running.get(id).map(|entry| &entry.info)
    }

    /// Cancels one call. Returns whether it existed.
    pub(crate) fn cancel(&mut self, id: &CallId) -> bool {
        self.running.get_mut(id).is_some_and(|entry| {
            entry.end_reason.get_or_insert(EndReason::Cancelled);
            if let Some(task) = &entry.abort {
                task.abort();
            }
            true
        })
    }

    /// Gives a stream more credit. Returns whether it existed.
    pub(crate) fn grant(&self, id: &CallId, grant: Grant) -> bool {
        let credit = self.running.get(id).and_then(|entry| entry.credit.as_ref());
        credit.is_some_and(|credit| credit.add(grant))
    }

    /// Ends all calls, unless the next process continues them.
    pub(crate) fn abort_all(&mut self) {
        self.closing = true;
        for entry in self.running.values_mut() {
            entry.end_reason.get_or_insert(EndReason::Closed);
            if let Some(task) = entry.abort.as_ref().filter(|_| !self.handed_over) {
                task.abort();
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.calls + self.streams == 0
    }
}

/// Number of chunks that a stream may still send.
#[derive(Debug)]
pub(crate) struct Credit {
    allowed: AtomicU64,
    sent: AtomicU64,
    more: Notify,
}

impl Credit {
    pub(crate) fn new(initial: u32) -> Self {
        Self {
            allowed: AtomicU64::new(initial.into()),
            sent: AtomicU64::new(0),
            more: Notify::new(),
        }
    }

    /// Waits for credit for one chunk and takes it; returns its number, from 1.
    pub(crate) async fn take(&self) -> u64 {
        loop {
            let more = self.more.notified();
            let sent = self.sent.load(Ordering::Acquire);
            if sent < self.allowed.load(Ordering::Acquire) {
                // Only one sink, that of the handler, calls `take`.
                self.sent.store(sent + 1, Ordering::Release);
                return sent + 1;
            }
            more.await;
        }
    }

    /// Adds a grant. Returns whether it was valid.
    fn add(&self, grant: Grant) -> bool {
        match grant {
            Grant::More(more) => {
                let add = |allowed: u64| Some(allowed.saturating_add(more.into()));
                let _ = self
                    .allowed
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
            }
            Grant::UpTo { read, window } => {
                if read > self.sent.load(Ordering::Acquire) {
                    return false;
                }
                self.allowed
                    .fetch_max(read + u64::from(window), Ordering::AcqRel);
            }
        }
        self.more.notify_one();
        true
    }
}

#[cfg(test)]
mod tests;
