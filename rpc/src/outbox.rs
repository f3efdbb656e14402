//! Queue in front of the writer: first in, first out, with two entry points.
//!
//! Calls, answers and chunks wait for a slot and keep their order while they wait. Control messages and refusals do
//! not wait, because their sender must never block. Their number is limited by the calls in flight, and by
//! `control_queue` for a peer that does not read. A single queue keeps a cancel behind the call it cancels.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::unread::UnreadCounter;

/// Bytes of a message that take one further slot in the queue.
const SLOT_BYTES: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    /// Wakes the writer.
    wake: Notify,
    all_slots: usize,
    control_queue: usize,
    unread: UnreadCounter,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<String>,
    /// Messages that wait for a slot, in order of arrival.
    waiting: VecDeque<WaitingMessage>,
    next: u64,
    /// Free slots.
    free: usize,
    /// Slots and bytes of the queued messages.
    queued: TakenBatch,
    /// Slots of queued messages that did not wait for them.
    unslotted: usize,
    /// Whether the writer must check that the peer is still there.
    probe: bool,
    closed: bool,
}

#[derive(Debug)]
struct WaitingMessage {
    number: u64,
    message: String,
    weight: usize,
    response: bool,
    queued: oneshot::Sender<()>,
}

/// Slots and bytes that a batch holds until it is sent.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TakenBatch {
    slots: usize,
    /// Bytes of responses.
    unread: usize,
}

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A call of this side.
    Call,
    /// A response to a call of the peer, held until the peer reads it.
    Response,
}

/// Error: the outbox is closed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// Reason why a control message was not queued.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PushError {
    Closed,
    /// The peer does not read its messages.
    Flooded,
}

impl Outbox {
    pub(crate) fn new(slots: usize, control_queue: usize) -> Self {
        Self {
            state: Mutex::new(State {
                free: slots,
                ..State::default()
            }),
            wake: Notify::new(),
            all_slots: slots,
            control_queue,
            unread: UnreadCounter::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of responses, queued or waiting.
    pub(crate) fn unread(&self) -> usize {
        self.unread.bytes()
    }

    pub(crate) fn unread_counter(&self) -> &UnreadCounter {
        &self.unread
    }

    /// Queues a message once a slot is free.
    /// The first poll sets its position. If the future is dropped while the message waits, it is not sent.
    pub(crate) async fn push(&self, message: String, kind: Kind) -> Result<(), Closed> {
        let weight = (1 + message.len() / SLOT_BYTES).min(self.all_slots);
        let response = kind == Kind::Response;
        let (guard, queued) = {
            let mut state = self.state();
            if state.closed {
                return Err(Closed);
            }
            if response {
                self.unread.add(message.len());
            }
            if state.waiting.is_empty() && weight <= state.free {
                state.enqueue(message, weight, response);
                drop(state);
                self.wake.notify_one();
                return Ok(());
            }
            state.next += 1;
            let number = state.next;
            let (sender, queued) = oneshot::channel();
            state.waiting.push_back(WaitingMessage {
                number,
                message,
                weight,
                response,
                queued: sender,
            });
            (WaitGuard(self, number), queued)
        };
        let queued = queued.await;
        drop(guard);
        queued.map_err(|_| Closed)
    }

    /// Queues a message without waiting for a slot.
    pub(crate) fn push_now(&self, message: String) -> Result<(), PushError> {
        let mut state = self.state();
        if state.closed {
            return Err(PushError::Closed);
        }
        if state.unslotted >= self.control_queue {
            return Err(PushError::Flooded);
        }
        state.unslotted += 1 + message.len() / SLOT_BYTES;
        state.queued.unread += message.len();
        self.unread.add(message.len());
        state.queue.push_back(message);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Makes the writer check that the peer is still there.
    /// Does nothing if the writer has messages to write.
    pub(crate) fn probe(&self) {
        self.state().probe = true;
        self.wake.notify_one();
    }

    /// Moves all queued messages into `batch`; `None` once closed and empty.
    /// Moves none if the writer must only probe the peer. The slots are free again when the caller passes the result
    /// to [`sent`](Self::sent).
    pub(crate) async fn take(&self, batch: &mut VecDeque<String>) -> Option<TakenBatch> {
        loop {
            {
                let mut state = self.state();
                let probe = std::mem::take(&mut state.probe);
                if probe || !state.queue.is_empty() {
                    std::mem::swap(batch, &mut state.queue);
                    state.unslotted = 0;
                    return Some(std::mem::take(&mut state.queued));
                }
                if state.closed {
                    return None;
                }
            }
            self.wake.notified().await;
        }
    }

    /// Frees the slots of a sent batch.
    pub(crate) fn sent(&self, taken: TakenBatch) {
        self.unread.remove(taken.unread);
        let mut state = self.state();
        state.free += taken.slots;
        state.admit();
        drop(state);
        self.wake.notify_one();
    }

    /// Refuses further messages; queued ones are still sent.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        for waiting in waiting.iter().filter(|waiting| waiting.response) {
            self.unread.remove(waiting.message.len());
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Drops all messages that were not sent.
    pub(crate) fn clear(&self) {
        self.close();
        let queue = std::mem::take(&mut self.state().queue);
        self.unread.clear();
        drop(queue);
    }
}

impl State {
    fn enqueue(&mut self, message: String, weight: usize, response: bool) {
        self.free -= weight;
        self.queued.slots += weight;
        if response {
            self.queued.unread += message.len();
        }
        self.queue.push_back(message);
    }

    /// Queues the messages that have waited longest while slots are free.
    fn admit(&mut self) {
        while let Some(first) = self.waiting.front()
            && first.weight <= self.free
            && let Some(next) = self.waiting.pop_front()
        {
            self.enqueue(next.message, next.weight, next.response);
            let _ = next.queued.send(());
        }
    }
}

/// A message that waits for a slot. Dropping it withdraws the message.
struct WaitGuard<'a>(&'a Outbox, u64);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let Self(outbox, number) = self;
        let mut state = outbox.state();
        let at = state.waiting.iter().position(|it| it.number == *number);
        let Some(withdrawn) = at.and_then(|at| state.waiting.remove(at)) else {
            return;
        };
        // The next message may fit where this one did not.
        state.admit();
        if withdrawn.response {
            outbox.unread.remove(withdrawn.message.len());
        }
        drop(state);
        outbox.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(taken: Option<TakenBatch>) -> Option<usize> {
        taken.map(|taken| taken.slots)
    }

    #[tokio::test]
    async fn control_messages_need_no_slot_and_keep_their_order() {
        let outbox = Outbox::new(1, 8);
        outbox.push("call".into(), Kind::Call).await.unwrap();
        outbox.push_now("cancel".into()).unwrap();
        let mut batch = VecDeque::new();
        assert_eq!(slots(outbox.take(&mut batch).await), Some(1));
        assert_eq!(batch, ["call", "cancel"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_makes_senders_wait_until_the_batch_is_sent() {
        let outbox = Outbox::new(1, 8);
        outbox.push("first".into(), Kind::Call).await.unwrap();
        let second = tokio::time::timeout(
            std::time::Duration::from_secs(1),
            outbox.push("second".into(), Kind::Call),
        );
        assert!(second.await.is_err());
        let mut batch = VecDeque::new();
        let slots = outbox.take(&mut batch).await.unwrap();
        outbox.sent(slots);
        outbox.push("third".into(), Kind::Call).await.unwrap();
    }

    #[tokio::test]
    async fn a_message_larger_than_the_queue_takes_all_slots() {
        let outbox = Outbox::new(2, 8);
        outbox
            .push("x".repeat(10 * SLOT_BYTES), Kind::Call)
            .await
            .unwrap();
        let mut batch = VecDeque::new();
        assert_eq!(slots(outbox.take(&mut batch).await), Some(2));
    }

    #[test]
    fn a_peer_that_does_not_read_is_reported_as_flooded() {
        let outbox = Outbox::new(1, 2);
        outbox.push_now("1".into()).unwrap();
        outbox.push_now("2".into()).unwrap();
        assert_eq!(outbox.push_now("3".into()), Err(PushError::Flooded));
    }

    #[tokio::test]
    async fn closing_sends_queued_messages_and_refuses_new_ones() {
        let outbox = Outbox::new(4, 4);
        outbox.push("last".into(), Kind::Call).await.unwrap();
        outbox.close();
        assert_eq!(outbox.push("late".into(), Kind::Call).await, Err(Closed));
        let mut batch = VecDeque::new();
        assert_eq!(slots(outbox.take(&mut batch).await), Some(1));
        batch.clear();
        assert_eq!(outbox.take(&mut batch).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_messages_are_queued_in_order_of_arrival() {
        use futures::FutureExt as _;
        let outbox = Outbox::new(2, 8);
        outbox.push("0".into(), Kind::Call).await.unwrap();
        outbox.push("1".into(), Kind::Response).await.unwrap();
        let mut waiting: Vec<_> = ["2", "3", "4", "5"]
            .map(|text| Box::pin(outbox.push(text.into(), Kind::Response).fuse()))
            .into();
        for push in &mut waiting {
            assert!(push.as_mut().now_or_never().is_none(), "a slot is free");
        }
        assert_eq!(outbox.unread(), 5);
        // Withdrawn while it waits: it is not sent and holds no bytes.
        drop(waiting.remove(1));
        assert_eq!(outbox.unread(), 4);
        let mut all = Vec::new();
        while all.len() < 5 {
            let mut batch = VecDeque::new();
            let taken = outbox.take(&mut batch).await.unwrap();
            all.extend(batch);
            outbox.sent(taken);
            // The last to wait is polled first and must not be sent first.
            for push in waiting.iter_mut().rev() {
                let _ = push.as_mut().now_or_never();
            }
        }
        assert_eq!(all, ["0", "1", "2", "4", "5"]);
        assert_eq!(outbox.unread(), 0);
    }

    #[tokio::test]
    async fn clearing_releases_all_bytes() {
        let outbox = Outbox::new(1, 8);
        outbox.push("queued".into(), Kind::Response).await.unwrap();
        outbox.push_now("now".into()).unwrap();
        assert_eq!(outbox.unread(), 9);
        outbox.clear();
        assert_eq!(outbox.unread(), 0);
        assert_eq!(outbox.take(&mut VecDeque::new()).await, None);
    }
}
