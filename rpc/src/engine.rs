//! State that both tasks of a connection and all its handles share.
//!
//! The module `incoming` handles each incoming message, and `controls` the control messages among them.

mod controls;
mod incoming;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::CloseReason;
use crate::action::{HandlerFuture, Router};
use crate::caller::{Auth, Caller};
use crate::codec::{CallId, Codec, Codecs, Control, ControlPolicy};
use crate::in_flight::{Incoming, Outgoing};
use crate::limits::Limits;
use crate::outbox::{Closed, Kind, Outbox, PushError};
use crate::unread::ALL_UNREAD_BYTES;

/// Counters of notable events on a connection that are no errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Messages received.
    pub received: u64,
    /// Texts that could not be parsed as a message.
    pub unparsable: u64,
    /// Responses to calls that no longer waited.
    pub late_responses: u64,
    /// Calls refused because of a limit.
    pub refused: u64,
    /// Messages longer than the limit.
    pub oversized: u64,
    /// Bytes of responses held because the peer has not read them yet.
    pub unread_bytes: usize,
}

#[derive(Debug, Default)]
struct Counters {
    unparsable: AtomicU64,
    late_responses: AtomicU64,
    refused: AtomicU64,
    oversized: AtomicU64,
}

fn count(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::Relaxed)
}

/// An admitted call, which the reader polls.
pub(crate) type StartedCall = (CallId, HandlerFuture);

pub(crate) struct Engine {
    pub(crate) limits: Limits,
    pub(crate) router: Router,
    pub(crate) outbox: Outbox,
    pub(crate) received: AtomicU64,
    /// Notified when no call of the peer runs any more.
    pub(crate) idle: Notify,
    /// The close reason, once the connection is over.
    pub(crate) closed: watch::Sender<Option<CloseReason>>,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    codecs: Codecs,
    codec: OnceLock<&'static dyn Codec>,
    control_policy: Option<Arc<dyn ControlPolicy>>,
    auth: Auth,
    admitted: AtomicBool,
    /// The caller identified by its token, once its hello carried one.
    token: OnceLock<Caller>,
    /// Whether the peer is known to answer pings.
    answers_pings: AtomicBool,
    /// Whether the peer is known to be temporarily unable to answer.
    pub(crate) silence_expected: AtomicBool,
    counters: Counters,
    bye: OnceLock<CloseReason>,
    stop: StopRequest,
}

/// A request to end the connection.
#[derive(Debug, Default)]
struct StopRequest {
    request: Mutex<Option<(CloseReason, Duration)>>,
    requested: Notify,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("codec", &self.codec.get())
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The tables hold no invariant that a panic could break for the next caller.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(crate) fn new(router: Router, options: crate::Options) -> Self {
        let crate::Options {
            limits,
            codecs,
            control_policy,
            auth,
        } = options;
        Self {
            outbox: Outbox::new(limits.queue_slots, limits.control_queue),
            limits,
            router,
            received: AtomicU64::new(0),
            idle: Notify::new(),
            closed: watch::Sender::new(None),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            codecs,
            codec: codecs.fixed().map_or_else(OnceLock::new, OnceLock::from),
            control_policy,
            admitted: AtomicBool::new(matches!(auth, Auth::Caller(_))),
            auth,
            token: OnceLock::new(),
            answers_pings: AtomicBool::new(codecs.fixed().is_some()),
            silence_expected: AtomicBool::new(false),
            counters: Counters::default(),
            bye: OnceLock::new(),
            stop: StopRequest::default(),
        }
    }

    pub(crate) fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        lock(&self.outgoing)
    }

    pub(crate) fn incoming(&self) -> MutexGuard<'_, Incoming> {
        lock(&self.incoming)
    }

    /// Returns the codec; the first offered one if this side speaks first.
    pub(crate) fn codec(&self) -> &'static dyn Codec {
        *self.codec.get_or_init(|| self.codecs.preferred())
    }

    /// Returns the codec, once it is known.
    pub(crate) fn known_codec(&self) -> Option<&'static dyn Codec> {
        self.codec.get().copied()
    }

    pub(crate) fn answers_pings(&self) -> bool {
        self.answers_pings.load(Ordering::Relaxed)
            && !self.silence_expected.load(Ordering::Relaxed)
            && self.codec.get().is_some()
    }

    pub(crate) fn caller(&self) -> Caller {
        match &self.auth {
            Auth::Caller(caller) => caller.clone(),
            Auth::Tokens(_) => self.token.get().cloned().unwrap_or(Caller::Anonymous),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            received: read(&self.received),
            unparsable: read(&self.counters.unparsable),
            late_responses: read(&self.counters.late_responses),
            refused: read(&self.counters.refused),
            oversized: read(&self.counters.oversized),
            unread_bytes: self.outbox.unread(),
        }
    }

    /// Whether the peer has identified itself.
    /// Without a required identity, one readable message is enough.
    pub(crate) fn is_peer_known(&self) -> bool {
        self.admitted.load(Ordering::Relaxed) && self.codec.get().is_some()
    }

    /// Whether the connection may hold this many more bytes of responses.
    pub(crate) fn has_room_for(&self, bytes: usize) -> bool {
        self.outbox.unread().saturating_add(bytes) <= self.limits.unread_bytes
    }

    /// Sends the response to a call of the peer, once the outbox has capacity.
    pub(crate) async fn respond(self: &Arc<Self>, text: String) -> Result<(), Closed> {
        let mut pushing = std::pin::pin!(self.outbox.push(text, Kind::Response));
        let first = std::future::poll_fn(|cx| Poll::Ready(pushing.as_mut().poll(cx))).await;
        self.enforce_unread_limit();
        match first {
            Poll::Ready(pushed) => pushed,
            Poll::Pending => pushing.await,
        }
    }

    /// Closes the connection that holds most bytes if the total is over the limit.
    fn enforce_unread_limit(self: &Arc<Self>) {
        if self.limits.unread_bytes != usize::MAX
            && let Some(largest) = self
                .outbox
                .unread_counter()
                .connection_over_limit(self, ALL_UNREAD_BYTES)
        {
            largest.stop(CloseReason::Flooded, Duration::ZERO);
        }
    }

    /// Requests the end of the connection; queued messages get `flush` to be written.
    pub(crate) fn stop(&self, reason: CloseReason, flush: Duration) {
        lock(&self.stop.request).get_or_insert((reason, flush));
        self.stop.requested.notify_one();
    }

    pub(crate) async fn stopped(&self) -> (CloseReason, Duration) {
        loop {
            let requested = self.stop.requested.notified();
            if let Some(request) = lock(&self.stop.request).clone() {
                return request;
            }
            requested.await;
        }
    }

    /// Whether the connection has been asked to end.
    pub(crate) fn is_stopping(&self) -> bool {
        lock(&self.stop.request).is_some()
    }

    /// Returns the close reason that the peer announced.
    pub(crate) fn bye(&self) -> Option<&CloseReason> {
        self.bye.get()
    }

    /// Sends without waiting. Closes the connection of a peer that never reads.
    pub(crate) fn push_now(self: &Arc<Self>, text: String) {
        if self.outbox.push_now(text) == Err(PushError::Flooded) {
            self.stop(CloseReason::Flooded, Duration::ZERO);
        }
        self.enforce_unread_limit();
    }

    pub(crate) fn control(self: &Arc<Self>, control: &Control<'_>) {
        if let Some(text) = self.codec().control(control) {
            self.push_now(text);
        }
    }
}
