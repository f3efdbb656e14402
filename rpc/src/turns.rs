//! Turns: calls with the same key run one after the other, in order of arrival.
//!
//! Taking a turn does not wait. A handler that takes it before its first wait keeps the order in which its call was
//! sent. Calls with other keys never wait for it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Turns of all keys. Cheap to clone.
pub struct Turns<K>(Arc<Mutex<State<K>>>);

struct State<K> {
    next: u64,
    queues: HashMap<K, VecDeque<Waiter>>,
}

/// One call in the queue of one key.
struct Waiter {
    number: u64,
    shared: bool,
    waker: Option<Waker>,
}

/// A position in the order. Dropping it ends the turn.
pub struct Turn<K: Hash + Eq> {
    turns: Turns<K>,
    keys: Vec<K>,
    number: u64,
}

impl<K> Clone for Turns<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            next: 0,
            queues: HashMap::new(),
        })))
    }
}

impl<K> fmt::Debug for Turns<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

impl<K: Hash + Eq> fmt::Debug for Turn<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turn").field(&self.number).finish()
    }
}

impl<K> Turns<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        // The queues are consistent after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq + Clone> Turns<K> {
    /// Takes a turn after all earlier ones with one of these keys.
    pub fn take(&self, keys: impl IntoIterator<Item = K>) -> Turn<K> {
        self.enqueue(keys, false)
    }

    /// Like `take`, for a call that changes nothing.
    /// It does not wait for other shared turns.
    pub fn take_shared(&self, keys: impl IntoIterator<Item = K>) -> Turn<K> {
        self.enqueue(keys, true)
    }

    fn enqueue(&self, keys: impl IntoIterator<Item = K>, shared: bool) -> Turn<K> {
        // Takes all keys at once, or two calls could each wait for the other.
        let mut state = self.state();
        state.next += 1;
        let number = state.next;
        let mut taken: Vec<K> = Vec::with_capacity(1);
        for key in keys {
            let queue = state.queues.entry(key.clone()).or_default();
            if queue.back().is_some_and(|last| last.number == number) {
                // The key is a duplicate.
                continue;
            }
            queue.push_back(Waiter {
                number,
                shared,
                waker: None,
            });
            taken.push(key);
        }
        drop(state);
        Turn {
            turns: self.clone(),
            keys: taken,
            number,
        }
    }
}

impl<K: Hash + Eq> Turn<K> {
    /// Waits until every earlier turn that is not shared with this one has ended.
    pub async fn wait(&self) {
        for key in &self.keys {
            poll_fn(|cx| {
                let mut state = self.turns.state();
                let Some(queue) = state.queues.get_mut(key) else {
                    return Poll::Ready(());
                };
                let mut only_shared = true;
                for (at, waiter) in queue.iter_mut().enumerate() {
                    if waiter.number == self.number {
                        if at == 0 || (waiter.shared && only_shared) {
                            return Poll::Ready(());
                        }
                        waiter.waker = Some(cx.waker().clone());
                        return Poll::Pending;
                    }
                    only_shared &= waiter.shared;
                }
                Poll::Ready(())
            })
            .await;
        }
    }
}

impl<K: Hash + Eq> Drop for Turn<K> {
    fn drop(&mut self) {
        let mut woken = Vec::new();
        let mut state = self.turns.state();
        for key in &self.keys {
            let Some(queue) = state.queues.get_mut(key) else {
                continue;
            };
            queue.retain(|waiter| waiter.number != self.number);
            if queue.is_empty() {
                state.queues.remove(key);
                continue;
            }
            // The first turn, and those that may run beside it.
            let shared = queue[0].shared;
            let next = queue.iter_mut().enumerate();
            let next = next.take_while(|(at, waiter)| *at == 0 || (shared && waiter.shared));
            woken.extend(next.filter_map(|(_, waiter)| waiter.waker.take()));
        }
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    fn is_ready(turn: &Turn<&'static str>) -> bool {
        turn.wait().now_or_never().is_some()
    }

    #[test]
    fn turns_come_in_the_order_of_taking() {
        let turns = Turns::default();
        let [one, two, three] = [(); 3].map(|()| turns.take(["a"]));
        let other = turns.take(["b"]);
        assert!(is_ready(&one) && is_ready(&other));
        assert!(!is_ready(&two) && !is_ready(&three));
        drop(two);
        assert!(
            !is_ready(&three),
            "a dropped turn does not let the next one overtake"
        );
        drop(one);
        assert!(is_ready(&three));
        drop((three, other));
        assert!(turns.state().queues.is_empty(), "no queue remains");
    }

    #[test]
    fn shared_turns_run_together_and_wait_for_exclusive_ones() {
        let turns = Turns::default();
        let readers = [(); 2].map(|()| turns.take_shared(["a"]));
        let writer = turns.take(["a"]);
        let late = turns.take_shared(["a"]);
        assert!(readers.iter().all(is_ready));
        assert!(!is_ready(&writer) && !is_ready(&late));
        drop(readers);
        assert!(is_ready(&writer) && !is_ready(&late));
        drop(writer);
        assert!(is_ready(&late));
    }

    #[test]
    fn a_call_with_two_keys_waits_for_both() {
        let turns = Turns::default();
        let (a, b) = (turns.take(["a"]), turns.take(["b"]));
        let both = turns.take(["a", "b", "a"]);
        let behind = turns.take(["b"]);
        drop(a);
        assert!(!is_ready(&both));
        drop(b);
        assert!(is_ready(&both) && !is_ready(&behind));
        drop(both);
        assert!(is_ready(&behind));
    }

    #[tokio::test]
    async fn the_end_of_a_turn_wakes_the_next_call() {
        let turns = Turns::default();
        let first = turns.take(["a"]);
        let waiting = turns.take(["a"]);
        let come = tokio::spawn(async move { waiting.wait().await });
        tokio::task::yield_now().await;
        drop(first);
        come.await.unwrap();
    }
}
