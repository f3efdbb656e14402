//! Who waits for what. No I/O, no clock, no waiting: every rule about ids is here and tested alone.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::codec::{CallId, Codec, Grant, Message, Part, parse_params};
use crate::error::RpcError;
use crate::large;
use crate::limits::Limits;

/// A part of a received text, kept with the text so that it is parsed where it is used.
#[derive(Debug)]
pub(crate) struct Body {
    text: String,
    range: Range<usize>,
    /// Whether the whole text is known to be JSON.
    checked: bool,
}

impl Drop for Body {
    fn drop(&mut self) {
        if self.text.capacity() >= large::LARGE {
            large::keep(std::mem::take(&mut self.text));
        }
    }
}

impl Body {
    /// `part` must be a slice of `text`.
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
        // Parameters that were not written are an empty object.
        if self.range.is_empty() {
            "{}"
        } else {
            &self.text[self.range.clone()]
        }
    }

    /// As parameters, of which `_meta` may be a member.
    pub(crate) fn parse_params<T: DeserializeOwned>(
        &self,
        meta_inside: bool,
        codec: &dyn Codec,
        limits: &Limits,
    ) -> Result<T, RpcError> {
        parse_params(self.as_str(), meta_inside).or_else(|error| {
            if self.checked {
                return Err(error);
            }
            match codec.read_again(&self.text, limits) {
                Err(unreadable) => Err(unreadable.error),
                Ok(Message::Call {
                    params,
                    meta_inside,
                    ..
                }) => parse_params(params, meta_inside),
                Ok(_) => Err(error),
            }
        })
    }

    /// As a result or chunk.
    pub(crate) fn parse<T: DeserializeOwned>(
        &self,
        codec: &dyn Codec,
        limits: &Limits,
    ) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.as_str()).or_else(|error| {
            if self.checked {
                return Err(error);
            }
            match codec.read_again(&self.text, limits) {
                Ok(Message::Answer {
                    outcome: Ok(body), ..
                }) => serde_json::from_str(body),
                _ => Err(error),
            }
        })
    }
}

type ById = BuildHasherDefault<IdHasher>;

/// Mixes an id. Good enough for tables that a peer can put no more into than it has calls in flight.
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

/// What a streaming call of ours gets.
#[derive(Debug)]
pub(crate) enum Item {
    Chunk(Body),
    End(Result<Body, RpcError>),
}

#[derive(Debug)]
enum Waiter {
    Call(oneshot::Sender<Result<Body, RpcError>>),
    Stream(mpsc::Sender<Item>),
}

/// Our calls that wait for an answer.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    last: i64,
    waiting: HashMap<i64, Waiter, ById>,
    /// Why nothing more can be asked.
    over: Option<String>,
}

/// What became of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Delivered,
    /// Nobody waits for it any more.
    Late,
    /// The peer sent more chunks than it was granted: the call has been failed.
    Overrun,
}

impl Outgoing {
    fn add(&mut self, waiter: Waiter) -> Result<i64, String> {
        if let Some(reason) = &self.over {
            return Err(reason.clone());
        }
        self.last += 1;
        self.waiting.insert(self.last, waiter);
        Ok(self.last)
    }

    /// Takes an id for a call that is answered once.
    pub(crate) fn call(
        &mut self,
    ) -> Result<(i64, oneshot::Receiver<Result<Body, RpcError>>), String> {
        let (sender, receiver) = oneshot::channel();
        Ok((self.add(Waiter::Call(sender))?, receiver))
    }

    /// Takes an id for a call that streams, with room for `credit` chunks and the end.
    pub(crate) fn stream(&mut self, credit: u32) -> Result<(i64, mpsc::Receiver<Item>), String> {
        let (sender, receiver) = mpsc::channel(credit as usize + 1);
        Ok((self.add(Waiter::Stream(sender))?, receiver))
    }

    /// Gives up on a call. Whether it was still waiting.
    pub(crate) fn forget(&mut self, id: i64) -> bool {
        self.waiting.remove(&id).is_some()
    }

    /// Whether chunks are waited for under this id.
    pub(crate) fn is_stream(&self, id: &CallId) -> bool {
        match id {
            CallId::Number(id) => matches!(self.waiting.get(id), Some(Waiter::Stream(_))),
            _ => false,
        }
    }

    /// Hands an answer to whoever waits for it.
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
                Ok(body) => Item::Chunk(body),
                Err(error) => Item::End(Err(error)),
            };
            // One place is kept for the end.
            if matches!(item, Item::Chunk(_)) && sender.capacity() <= 1 {
                let error = RpcError::internal("the peer sent more chunks than it was granted");
                let _ = sender.try_send(Item::End(Err(error)));
                self.waiting.remove(number);
                return Delivery::Overrun;
            }
            return match sender.try_send(item) {
                Ok(()) => Delivery::Delivered,
                Err(_) => Delivery::Late,
            };
        }
        if matches!(part, Part::Chunk { .. }) {
            return Delivery::Late;
        }
        let taken = match self.waiting.remove(number) {
            None => false,
            Some(Waiter::Call(sender)) => sender.send(outcome).is_ok(),
            Some(Waiter::Stream(sender)) => sender.try_send(Item::End(outcome)).is_ok(),
        };
        if taken {
            Delivery::Delivered
        } else {
            Delivery::Late
        }
    }

    /// Nothing more can be asked; what was asked may still be answered.
    pub(crate) fn refuse(&mut self, reason: &str) {
        self.over.get_or_insert_with(|| reason.to_owned());
    }

    /// Nothing more will be answered. Waiting calls learn it by their channel closing.
    pub(crate) fn end(&mut self, reason: &str) {
        self.over.get_or_insert_with(|| reason.to_owned());
        self.waiting.clear();
    }

    pub(crate) fn over(&self) -> Option<&str> {
        self.over.as_deref()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

/// Why a call of the peer's was ended from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Its caller withdrew it.
    Cancelled,
    /// The connection is over.
    Closed,
}

#[derive(Debug)]
struct Entry {
    made: Made,
    abort: Option<AbortHandle>,
    credit: Option<Arc<Credit>>,
    ended: Option<Ended>,
}

/// What a call of the peer's is made for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Made {
    pub(crate) action: &'static str,
    /// Kept only where somebody asks for it.
    pub(crate) context: Option<Arc<str>>,
}

/// The peer's calls that are running here.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    running: HashMap<CallId, Entry, ById>,
    calls: usize,
    streams: usize,
    unanswered: u64,
    /// The connection is closing: no more.
    pub(crate) closing: bool,
    /// What runs when the connection ends is not withdrawn: this process ends, and the next one goes on with it.
    pub(crate) left: bool,
}

/// Why a call was not admitted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Duplicate,
    TooManyCalls,
    TooManyStreams,
    Closing,
}

impl Incoming {
    /// Admits a call. With `credit` it is counted as a stream.
    pub(crate) fn admit(
        &mut self,
        id: Option<CallId>,
        made: Made,
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
                made,
                abort: None,
                credit,
                ended: None,
            },
        );
        Ok(id)
    }

    /// The call runs as this task. Ends it at once if it was cancelled before.
    pub(crate) fn runs_as(&mut self, id: &CallId, task: AbortHandle) {
        if let Some(entry) = self.running.get_mut(id) {
            if entry.ended.is_some() {
                task.abort();
            }
            entry.abort = Some(task);
        }
    }

    /// The id is free again; why the call was ended, if it was. Its place is still taken.
    pub(crate) fn answered(&mut self, id: &CallId) -> Option<Ended> {
        self.running.remove(id).and_then(|entry| entry.ended)
    }

    /// Why a running call is being ended, if it is.
    pub(crate) fn ended(&self, id: &CallId) -> Option<Ended> {
        self.running.get(id).and_then(|entry| entry.ended)
    }

    /// The place of an answered call is free again. Whether nothing is left.
    pub(crate) fn free(&mut self, stream: bool) -> bool {
        if stream {
            self.streams -= 1;
        } else {
            self.calls -= 1;
        }
        self.is_idle()
    }

    /// What a running call is made for.
    pub(crate) fn made(&self, id: &CallId) -> Option<&Made> {
        self.running.get(id).map(|entry| &entry.made)
    }

    /// Ends one call. Whether there was one.
    pub(crate) fn cancel(&mut self, id: &CallId) -> bool {
        self.running.get_mut(id).is_some_and(|entry| {
            entry.ended.get_or_insert(Ended::Cancelled);
            if let Some(task) = &entry.abort {
                task.abort();
            }
            true
        })
    }

    /// Gives a stream more credit. Whether there was one.
    pub(crate) fn grant(&self, id: &CallId, grant: Grant) -> bool {
        let credit = self.running.get(id).and_then(|entry| entry.credit.as_ref());
        credit.is_some_and(|credit| credit.add(grant))
    }

    /// Ends all calls, unless they are left to the next process.
    pub(crate) fn end(&mut self) {
        self.closing = true;
        for entry in self.running.values_mut() {
            entry.ended.get_or_insert(Ended::Closed);
            if let Some(task) = entry.abort.as_ref().filter(|_| !self.left) {
                task.abort();
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.calls + self.streams == 0
    }
}

/// How many chunks a stream may still send.
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

    /// Waits for credit for one chunk and takes it. The chunk's number, from 1.
    pub(crate) async fn take(&self) -> u64 {
        loop {
            let more = self.more.notified();
            let sent = self.sent.load(Ordering::Acquire);
            if sent < self.allowed.load(Ordering::Acquire) {
                // Only the handler's one sink takes.
                self.sent.store(sent + 1, Ordering::Release);
                return sent + 1;
            }
            more.await;
        }
    }

    /// Whether the grant made sense.
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
