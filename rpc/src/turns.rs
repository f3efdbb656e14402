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
    lanes: HashMap<K, VecDeque<Place>>,
}

/// One call in the queue of one key.
struct Place {
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
            lanes: HashMap::new(),
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
        self.take_place(keys, false)
    }

    /// Like `take`, for a call that changes nothing.
    /// It does not wait for other shared turns.
    pub fn take_shared(&self, keys: impl IntoIterator<Item = K>) -> Turn<K> {
        self.take_place(keys, true)
    }

    fn take_place(&self, keys: impl IntoIterator<Item = K>, shared: bool) -> Turn<K> {
        // Takes all keys at once, or two calls could each wait for the other.
        let mut state = self.state();
        state.next += 1;
        let number = state.next;
        let mut taken: Vec<K> = Vec::with_capacity(1);
        for key in keys {
            let lane = state.lanes.entry(key.clone()).or_default();
            if lane.back().is_some_and(|last| last.number == number) {
                // The key is a duplicate.
                continue;
            }
            lane.push_back(Place {
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
    pub async fn comes(&self) {
        for key in &self.keys {
            poll_fn(|cx| {
                let mut state = self.turns.state();
                let Some(lane) = state.lanes.get_mut(key) else {
                    return Poll::Ready(());
                };
                let mut only_shared = true;
                for (at, place) in lane.iter_mut().enumerate() {
                    if place.number == self.number {
                        if at == 0 || (place.shared && only_shared) {
                            return Poll::Ready(());
                        }
                        place.waker = Some(cx.waker().clone());
                        return Poll::Pending;
                    }
                    only_shared &= place.shared;
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
            let Some(lane) = state.lanes.get_mut(key) else {
                continue;
            };
            lane.retain(|place| place.number != self.number);
            if lane.is_empty() {
                state.lanes.remove(key);
                continue;
            }
            // The first turn, and those that may run beside it.
            let shared = lane[0].shared;
            let next = lane.iter_mut().enumerate();
            let next = next.take_while(|(at, place)| *at == 0 || (shared && place.shared));
            woken.extend(next.filter_map(|(_, place)| place.waker.take()));
        }
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    fn has_come(turn: &Turn<&'static str>) -> bool {
        turn.comes().now_or_never().is_some()
    }

    #[test]
    fn turns_come_in_the_order_in_which_they_were_taken() {
        let turns = Turns::default();
        let [one, two, three] = [(); 3].map(|()| turns.take(["a"]));
        let other = turns.take(["b"]);
        assert!(has_come(&one) && has_come(&other));
        assert!(!has_come(&two) && !has_come(&three));
        drop(two);
        assert!(
            !has_come(&three),
            "a turn that is given up lets the next one pass nothing"
        );
        drop(one);
        assert!(has_come(&three));
        drop((three, other));
        assert!(turns.state().lanes.is_empty(), "nothing is kept");
    }

    #[test]
    fn shared_turns_come_together_and_wait_for_those_that_are_not() {
        let turns = Turns::default();
        let readers = [(); 2].map(|()| turns.take_shared(["a"]));
        let writer = turns.take(["a"]);
        let late = turns.take_shared(["a"]);
        assert!(readers.iter().all(has_come));
        assert!(!has_come(&writer) && !has_come(&late));
        drop(readers);
        assert!(has_come(&writer) && !has_come(&late));
        drop(writer);
        assert!(has_come(&late));
    }

    #[test]
    fn a_call_that_names_two_things_waits_for_both() {
        let turns = Turns::default();
        let (a, b) = (turns.take(["a"]), turns.take(["b"]));
        let both = turns.take(["a", "b", "a"]);
        let behind = turns.take(["b"]);
        drop(a);
        assert!(!has_come(&both));
        drop(b);
        assert!(has_come(&both) && !has_come(&behind));
        drop(both);
        assert!(has_come(&behind));
    }

    #[tokio::test]
    async fn a_turn_that_is_waited_for_wakes_its_call() {
        let turns = Turns::default();
        let first = turns.take(["a"]);
        let waiting = turns.take(["a"]);
        let come = tokio::spawn(async move { waiting.comes().await });
        tokio::task::yield_now().await;
        drop(first);
        come.await.unwrap();
    }
}
