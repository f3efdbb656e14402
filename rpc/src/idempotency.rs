//! Idempotency keys: a call with a key runs once, however often it is sent.
//!
//! This holds across connections. The first call with a key runs in a separate task that survives the loss of its
//! connection. A caller that sends the key again waits for that run, or gets its outcome if it is over.
//!
//! The store keeps outcomes, including errors, within [`IdempotencyLimits`], and drops the oldest first. A key belongs
//! to one caller and one action. With other parameters it is a `conflict`. Calls with a key cannot stream.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::caller::Caller;
use crate::error::{Code, RpcError};

/// Maximum length of a key in bytes.
pub(crate) const KEY_BYTES: usize = 256;

/// Limits of an [`IdempotencyStore`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IdempotencyLimits {
    /// Maximum number of keys, including running ones.
    /// If all of them run, a new key fails with `capacity`.
    pub(crate) entries: usize,
    /// Maximum bytes of stored outcomes.
    pub(crate) bytes: usize,
    /// Time for which an outcome is kept.
    pub(crate) age: Duration,
}

impl Default for IdempotencyLimits {
    fn default() -> Self {
        Self {
            entries: 4096,
            bytes: 64 * 1024 * 1024,
            age: Duration::from_mins(10),
        }
    }
}

/// The result as JSON, or the error.
pub(crate) type Outcome = Result<Arc<str>, RpcError>;

/// Keys that a router remembers, with the outcomes of their calls.
#[derive(Debug, Default)]
pub(crate) struct IdempotencyStore {
    limits: IdempotencyLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<CallKey, Entry>,
    /// Finished keys, oldest first.
    finished: VecDeque<(Instant, CallKey)>,
    bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CallKey {
    pub(crate) owner: Caller,
    pub(crate) action: &'static str,
    pub(crate) key: String,
}

#[derive(Debug)]
struct Entry {
    fingerprint: u64,
    outcome: watch::Receiver<Option<Outcome>>,
    run: Arc<SharedRun>,
}

#[derive(Debug, Default)]
struct SharedRun {
    waiting: AtomicUsize,
    task: Mutex<Option<AbortHandle>>,
}

/// Decision about a call with a key.
#[derive(Debug)]
pub(crate) enum Lookup {
    /// First call with the key: run it and report the outcome.
    First(RunGuard, Waiter),
    /// Repeated call: wait for the outcome.
    Repeat(Waiter),
}

impl IdempotencyStore {
    /// Creates a store with these limits.
    #[cfg(test)]
    fn new(limits: IdempotencyLimits) -> Self {
        Self {
            limits,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(
        self: &Arc<Self>,
        name: CallKey,
        fingerprint: u64,
    ) -> Result<Lookup, RpcError> {
        if name.key.is_empty() || name.key.len() > KEY_BYTES {
            return Err(RpcError::validation(format!(
                "key: {} bytes; must have 1 to {KEY_BYTES}",
                name.key.len()
            )));
        }
        let mut state = self.state();
        state.expire(self.limits.age);
        if let Some(entry) = state.entries.get(&name) {
            if entry.fingerprint != fingerprint {
                return Err(RpcError::conflict(
                    "key: already used with other parameters; use a new key",
                ));
            }
            return Ok(Lookup::Repeat(Waiter::new(
                entry.outcome.clone(),
                Arc::clone(&entry.run),
            )));
        }
        if state.entries.len() >= self.limits.entries && !state.drop_oldest() {
            return Err(RpcError::limit(
                Code::Capacity,
                "number of running calls with a key",
                "entries",
                self.limits.entries,
            ));
        }
        let (sender, outcome) = watch::channel(None);
        let run = Arc::new(SharedRun::default());
        let waiting = Waiter::new(outcome.clone(), Arc::clone(&run));
        state.entries.insert(
            name.clone(),
            Entry {
                fingerprint,
                outcome,
                run: Arc::clone(&run),
            },
        );
        Ok(Lookup::First(
            RunGuard {
                store: Arc::clone(self),
                name: Some(name),
                sender,
                run,
            },
            waiting,
        ))
    }

    fn finish(&self, name: CallKey, size: usize) {
        let mut state = self.state();
        state.bytes += size;
        state.finished.push_back((Instant::now(), name));
        while state.bytes > self.limits.bytes && state.drop_oldest() {}
    }
}

fn size_of(outcome: &Outcome) -> usize {
    match outcome {
        Ok(text) => text.len(),
        Err(error) => error.message().len(),
    }
}

impl State {
    fn drop_oldest(&mut self) -> bool {
        let Some((_, name)) = self.finished.pop_front() else {
            return false;
        };
        if let Some(entry) = self.entries.remove(&name) {
            let size = entry.outcome.borrow().as_ref().map_or(0, size_of);
            self.bytes = self.bytes.saturating_sub(size);
        }
        true
    }

    fn expire(&mut self, age: Duration) {
        while self
            .finished
            .front()
            .is_some_and(|(at, _)| at.elapsed() >= age)
        {
            self.drop_oldest();
        }
    }
}

/// Held by the only run of a key; dropping it early records a failure.
#[derive(Debug)]
pub(crate) struct RunGuard {
    store: Arc<IdempotencyStore>,
    name: Option<CallKey>,
    sender: watch::Sender<Option<Outcome>>,
    run: Arc<SharedRun>,
}

impl RunGuard {
    pub(crate) fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    /// Sets the task of the run, so that its last waiting caller can cancel it.
    pub(crate) fn set_task(run: &Waiter, task: AbortHandle) {
        *run.run.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(name) = self.name.take() {
            let size = size_of(&outcome);
            self.sender.send_replace(Some(outcome));
            self.run
                .task
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            self.store.finish(name, size);
        }
    }
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.end(Err(if std::thread::panicking() {
            RpcError::internal("the handler of this call failed")
        } else {
            RpcError::cancelled("the call was cancelled")
        }));
    }
}

/// One caller's wait for the outcome of a key.
#[derive(Debug)]
pub(crate) struct Waiter {
    outcome: watch::Receiver<Option<Outcome>>,
    run: Arc<SharedRun>,
}

impl Waiter {
    fn new(outcome: watch::Receiver<Option<Outcome>>, run: Arc<SharedRun>) -> Self {
        run.waiting.fetch_add(1, Ordering::AcqRel);
        Self { outcome, run }
    }

    pub(crate) async fn outcome(&mut self) -> Outcome {
        match self.outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome
                .clone()
                .unwrap_or_else(|| Err(RpcError::internal("no outcome"))),
            Err(_) => Err(RpcError::internal(
                "the call with this key ended without an outcome",
            )),
        }
    }

    /// Withdraws this caller; the run ends if no other caller waits for it.
    pub(crate) fn cancel_run_if_last(&self) {
        if self.run.waiting.load(Ordering::Acquire) == 1
            && let Some(task) = self
                .run
                .task
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take()
        {
            task.abort();
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.run.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(key: &str) -> CallKey {
        CallKey {
            owner: Caller::token("me"),
            action: "act",
            key: key.into(),
        }
    }

    fn guard(store: &Arc<IdempotencyStore>, key: &str) -> RunGuard {
        match store.begin(name(key), 0) {
            Ok(Lookup::First(guard, _)) => guard,
            other => panic!("{other:?}"),
        }
    }

    fn small(entries: usize, bytes: usize) -> Arc<IdempotencyStore> {
        Arc::new(IdempotencyStore::new(IdempotencyLimits {
            entries,
            bytes,
            age: Duration::from_mins(1),
        }))
    }

    async fn repeat(store: &Arc<IdempotencyStore>, key: &str) -> Option<Outcome> {
        match store.begin(name(key), 0) {
            Ok(Lookup::Repeat(mut waiting)) => Some(waiting.outcome().await),
            _ => None,
        }
    }

    #[tokio::test]
    async fn a_repeated_key_gets_the_first_outcome_or_error() {
        let store = small(8, 1024);
        guard(&store, "a").finish(Ok("{}".into()));
        guard(&store, "b").finish(Err(RpcError::denied("no")));
        assert_eq!(repeat(&store, "a").await, Some(Ok("{}".into())));
        assert_eq!(repeat(&store, "b").await, Some(Err(RpcError::denied("no"))));
    }

    #[tokio::test]
    async fn other_parameters_are_a_conflict() {
        let store = small(8, 1024);
        guard(&store, "a").finish(Ok("{}".into()));
        assert_eq!(
            store.begin(name("a"), 1).unwrap_err().code(),
            Code::Conflict
        );
    }

    #[tokio::test(start_paused = true)]
    async fn outcomes_expire_after_their_age() {
        let store = small(8, 1024);
        guard(&store, "a").finish(Ok("{}".into()));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(repeat(&store, "a").await.is_some());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(repeat(&store, "a").await.is_none());
    }

    #[tokio::test]
    async fn the_oldest_outcome_is_evicted_and_a_running_call_is_not() {
        let store = small(2, 1024);
        guard(&store, "a").finish(Ok("{}".into()));
        let _running = guard(&store, "b");
        let _running_too = guard(&store, "c");
        assert_eq!(
            store.begin(name("d"), 0).unwrap_err().code(),
            Code::Capacity
        );
    }

    #[tokio::test]
    async fn stored_bytes_are_bounded() {
        let store = small(100, 10);
        guard(&store, "a").finish(Ok("{12345678}".into()));
        guard(&store, "b").finish(Ok("{1}".into()));
        assert_eq!(store.state().entries.len(), 1);
        assert_eq!(store.state().bytes, 3);
    }

    #[tokio::test]
    async fn a_dropped_run_fails_its_repeats_as_cancelled() {
        let store = small(8, 1024);
        drop(guard(&store, "a"));
        let error = repeat(&store, "a").await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Cancelled);
    }
}
