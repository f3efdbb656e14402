//! The queue in front of the writer: first in, first out, with two ways in.
//!
//! Calls, answers and chunks wait for a place. Control messages and refusals do not: they are
//! few (bounded by the calls in flight, and by `control_queue` for a peer that does not read), and
//! whoever sends them must never wait. One queue keeps a cancel behind the call it cancels.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore};

/// Bytes of a message that take one further place in the queue.
const SLOT_BYTES: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    /// Wakes the writer.
    wake: Notify,
    slots: Semaphore,
    all_slots: usize,
    control_queue: usize,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<String>,
    /// Places taken by what is in the queue.
    taken: usize,
    /// Places that messages in the queue would have taken had they waited for them.
    unslotted: usize,
    closed: bool,
}

/// The outbox takes nothing any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// Why a control message was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotTaken {
    Closed,
    /// The peer does not read what it is told.
    Flooded,
}

impl Outbox {
    pub(crate) fn new(slots: usize, control_queue: usize) -> Self {
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            slots: Semaphore::new(slots),
            all_slots: slots,
            control_queue,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message once there is a place for it.
    pub(crate) async fn push(&self, message: String) -> Result<(), Closed> {
        let weight = (1 + message.len() / SLOT_BYTES).min(self.all_slots);
        let many = u32::try_from(weight).unwrap_or(u32::MAX);
        self.slots
            .acquire_many(many)
            .await
            .map_err(|_| Closed)?
            .forget();
        let mut state = self.state();
        if state.closed {
            return Err(Closed);
        }
        state.queue.push_back(message);
        state.taken += weight;
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Queues a message without waiting for a place.
    pub(crate) fn push_now(&self, message: String) -> Result<(), NotTaken> {
        let mut state = self.state();
        if state.closed {
            return Err(NotTaken::Closed);
        }
        if state.unslotted >= self.control_queue {
            return Err(NotTaken::Flooded);
        }
        state.unslotted += 1 + message.len() / SLOT_BYTES;
        state.queue.push_back(message);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Moves all that waits into `batch`; `None` once closed and empty. The places are free again
    /// when the returned count is given to [`sent`](Self::sent).
    pub(crate) async fn take(&self, batch: &mut VecDeque<String>) -> Option<usize> {
        loop {
            {
                let mut state = self.state();
                if !state.queue.is_empty() {
                    std::mem::swap(batch, &mut state.queue);
                    state.unslotted = 0;
                    return Some(std::mem::take(&mut state.taken));
                }
                if state.closed {
                    return None;
                }
            }
            self.wake.notified().await;
        }
    }

    /// What was taken has been sent.
    pub(crate) fn sent(&self, places: usize) {
        self.slots.add_permits(places);
    }

    /// Takes no more; what is queued is still sent.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.slots.close();
        self.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn control_messages_need_no_place_and_keep_their_order() {
        let outbox = Outbox::new(1, 8);
        outbox.push("call".into()).await.unwrap();
        outbox.push_now("cancel".into()).unwrap();
        let mut batch = VecDeque::new();
        assert_eq!(outbox.take(&mut batch).await, Some(1));
        assert_eq!(batch, ["call", "cancel"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_makes_senders_wait_until_the_batch_is_sent() {
        let outbox = Outbox::new(1, 8);
        outbox.push("first".into()).await.unwrap();
        let second = tokio::time::timeout(
            std::time::Duration::from_secs(1),
            outbox.push("second".into()),
        );
        assert!(second.await.is_err());
        let mut batch = VecDeque::new();
        let places = outbox.take(&mut batch).await.unwrap();
        outbox.sent(places);
        outbox.push("third".into()).await.unwrap();
    }

    #[tokio::test]
    async fn a_message_heavier_than_the_queue_takes_all_of_it() {
        let outbox = Outbox::new(2, 8);
        outbox.push("x".repeat(10 * SLOT_BYTES)).await.unwrap();
        let mut batch = VecDeque::new();
        assert_eq!(outbox.take(&mut batch).await, Some(2));
    }

    #[test]
    fn a_peer_that_does_not_read_is_found_out() {
        let outbox = Outbox::new(1, 2);
        outbox.push_now("1".into()).unwrap();
        outbox.push_now("2".into()).unwrap();
        assert_eq!(outbox.push_now("3".into()), Err(NotTaken::Flooded));
    }

    #[tokio::test]
    async fn closing_sends_what_is_queued_and_refuses_the_rest() {
        let outbox = Outbox::new(4, 4);
        outbox.push("last".into()).await.unwrap();
        outbox.close();
        assert_eq!(outbox.push("late".into()).await, Err(Closed));
        let mut batch = VecDeque::new();
        assert_eq!(outbox.take(&mut batch).await, Some(1));
        batch.clear();
        assert_eq!(outbox.take(&mut batch).await, None);
    }
}
