//! The running calls of clients that cancel a call in another request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

/// The running calls of an HTTP port.
#[derive(Debug, Default)]
pub(super) struct RunningCalls(Mutex<HashMap<String, Weak<RunningCall>>>);

/// A running call. It is forgotten when it is dropped.
#[derive(Debug)]
pub(super) struct RunningCall {
    key: String,
    calls: Arc<RunningCalls>,
    cancelled: Notify,
}

impl RunningCalls {
    /// Adds a call.
    pub(super) fn begin(self: &Arc<Self>, key: String) -> Arc<RunningCall> {
        let call = Arc::new(RunningCall {
            key: key.clone(),
            calls: Arc::clone(self),
            cancelled: Notify::new(),
        });
        self.lock().insert(key, Arc::downgrade(&call));
        call
    }

    /// Cancels a call, if it runs.
    pub(super) fn cancel(&self, key: &str) {
        let call = self.lock().get(key).and_then(Weak::upgrade);
        if let Some(call) = call {
            call.cancelled.notify_one();
        }
    }

    /// Locks the map; no code leaves it inconsistent under the lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Weak<RunningCall>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningCall {
    /// Returns once the client has cancelled the call.
    pub(super) async fn cancelled(&self) {
        self.cancelled.notified().await;
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        // A later call may have the same id.
        if calls
            .get(&self.key)
            .is_some_and(|call| call.strong_count() == 0)
        {
            calls.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_is_cancelled_by_its_key_and_forgotten_with_its_end() {
        let calls = Arc::<RunningCalls>::default();
        let (one, other) = (calls.begin("1".into()), calls.begin("2".into()));
        calls.cancel("1");
        calls.cancel("unknown");
        one.cancelled().await;
        let again = calls.begin("1".into());
        drop((one, other));
        assert_eq!(calls.lock().len(), 1, "the later call stays");
        drop(again);
        assert!(calls.lock().is_empty());
    }
}
