//! A value that tasks can wait for.

use std::ops::Deref;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A value behind a lock, with a signal after each change.
///
/// `tokio::sync::watch` is made for many receivers: an empty channel has nine queues of tasks and an
/// allocation of its own, some 400 bytes. Each box has three such values and rarely a waiting task.
pub(crate) struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Notify::new(),
        }
    }

    /// Returns the value for reading. Callers never hold it across an await.
    pub(crate) fn read(&self) -> impl Deref<Target = T> + '_ {
        self.lock()
    }

    /// Changes the value and wakes all waiting tasks.
    pub(crate) fn modify<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_waiters();
        result
    }

    /// Waits until `read` returns something of the value.
    pub(crate) async fn wait_for<R>(&self, mut read: impl FnMut(&T) -> Option<R>) -> R {
        if let Some(result) = read(&self.lock()) {
            return result;
        }
        loop {
            let mut changed = pin!(self.changed.notified());
            // Enabled before the value is read, so that no change in between is missed.
            changed.as_mut().enable();
            if let Some(result) = read(&self.lock()) {
                return result;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_waiting_task_sees_the_change_that_it_waits_for() {
        let number = Watched::new(1);
        let mut waiting = Box::pin(number.wait_for(|number| (*number > 2).then_some(*number)));
        assert_eq!((&mut waiting).now_or_never(), None);
        assert_eq!(number.modify(|number| std::mem::replace(number, 2)), 1);
        assert_eq!((&mut waiting).now_or_never(), None);
        number.modify(|number| *number = 3);
        assert_eq!(waiting.await, 3);
        assert_eq!(*number.read(), 3);
        // A task that comes later waits for no change.
        assert_eq!(number.wait_for(|number| Some(*number)).await, 3);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_change_is_missed_between_threads() {
        let turn = Arc::new(Watched::new(0_u32));
        let play = |mine: u32| {
            let turn = Arc::clone(&turn);
            tokio::spawn(async move {
                for _ in 0..5_000 {
                    turn.wait_for(|turn| (turn % 2 == mine).then_some(())).await;
                    turn.modify(|turn| *turn += 1);
                }
            })
        };
        let (first, second) = (play(0), play(1));
        first.await.unwrap();
        second.await.unwrap();
        assert_eq!(*turn.read(), 10_000);
    }
}
