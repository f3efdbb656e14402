//! Request keys: a call with a key runs once, however often it is sent.
//!
//! This holds across connections. The first call with a key runs in a separate task that survives the loss of its
//! connection. A caller that sends the key again waits for that run, or gets its outcome if it is over.
//!
//! The store keeps outcomes, including errors, for [`KeyLimits::age`]. It keeps at most [`KeyLimits::entries`] of them
//! and [`KeyLimits::bytes`] in total, and drops the oldest first. A key belongs to one caller and one action. With
//! other parameters it is a `conflict`. Calls with a key cannot stream.

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

/// Limits of a [`KeyStore`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyLimits {
    /// Maximum number of keys, including running ones.
    /// If all of them run, a new key fails with `capacity`.
    pub entries: usize,
    /// Maximum bytes of stored outcomes.
    pub bytes: usize,
    /// Time for which an outcome is kept.
    pub age: Duration,
}

impl Default for KeyLimits {
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
pub struct KeyStore {
    limits: KeyLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Name, Entry>,
    /// Finished keys, oldest first.
    finished: VecDeque<(Instant, Name)>,
    bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    pub(crate) owner: Caller,
    pub(crate) action: &'static str,
    pub(crate) key: String,
}

#[derive(Debug)]
struct Entry {
    fingerprint: u64,
    outcome: watch::Receiver<Option<Outcome>>,
    run: Arc<Run>,
}

#[derive(Debug, Default)]
struct Run {
    waiting: AtomicUsize,
    task: Mutex<Option<AbortHandle>>,
}

/// Decision about a call with a key.
#[derive(Debug)]
pub(crate) enum Begun {
    /// First call with the key: run it and report the outcome.
    Run(Ticket, Waiting),
    /// Repeated call: wait for the outcome.
    Wait(Waiting),
}

impl KeyStore {
    /// Creates a store with these limits.
    pub fn new(limits: KeyLimits) -> Self {
        Self {
            limits,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(self: &Arc<Self>, name: Name, fingerprint: u64) -> Result<Begun, RpcError> {
        if name.key.is_empty() || name.key.len() > KEY_BYTES {
            return Err(RpcError::validation(format!(
                "key must have 1 to {KEY_BYTES} bytes"
            )));
        }
        let mut state = self.state();
        state.expire(self.limits.age);
        if let Some(entry) = state.entries.get(&name) {
            if entry.fingerprint != fingerprint {
                return Err(RpcError::conflict(
                    "key was used for a call with other parameters",
                ));
            }
            return Ok(Begun::Wait(Waiting::new(
                entry.outcome.clone(),
                Arc::clone(&entry.run),
            )));
        }
        if state.entries.len() >= self.limits.entries && !state.drop_oldest() {
            return Err(RpcError::limit(
                Code::Capacity,
                "running calls with a key",
                "entries",
                self.limits.entries,
            ));
        }
        let (sender, outcome) = watch::channel(None);
        let run = Arc::new(Run::default());
        let waiting = Waiting::new(outcome.clone(), Arc::clone(&run));
        state.entries.insert(
            name.clone(),
            Entry {
                fingerprint,
                outcome,
                run: Arc::clone(&run),
            },
        );
        Ok(Begun::Run(
            Ticket {
                store: Arc::clone(self),
                name: Some(name),
                sender,
                run,
            },
            waiting,
        ))
    }

    fn finish(&self, name: Name, size: usize) {
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
pub(crate) struct Ticket {
    store: Arc<KeyStore>,
    name: Option<Name>,
    sender: watch::Sender<Option<Outcome>>,
    run: Arc<Run>,
}

impl Ticket {
    pub(crate) fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    /// Sets the task of the run, so that its last waiting caller can cancel it.
    pub(crate) fn runs_as(run: &Waiting, task: AbortHandle) {
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

impl Drop for Ticket {
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
pub(crate) struct Waiting {
    outcome: watch::Receiver<Option<Outcome>>,
    run: Arc<Run>,
}

impl Waiting {
    fn new(outcome: watch::Receiver<Option<Outcome>>, run: Arc<Run>) -> Self {
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
    pub(crate) fn withdraw(&self) {
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

impl Drop for Waiting {
    fn drop(&mut self) {
        self.run.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(key: &str) -> Name {
        Name {
            owner: Caller::token("me"),
            action: "act",
            key: key.into(),
        }
    }

    fn ticket(store: &Arc<KeyStore>, key: &str) -> Ticket {
        match store.begin(name(key), 0) {
            Ok(Begun::Run(ticket, _)) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn small(entries: usize, bytes: usize) -> Arc<KeyStore> {
        Arc::new(KeyStore::new(KeyLimits {
            entries,
            bytes,
            age: Duration::from_mins(1),
        }))
    }

    async fn repeat(store: &Arc<KeyStore>, key: &str) -> Option<Outcome> {
        match store.begin(name(key), 0) {
            Ok(Begun::Wait(mut waiting)) => Some(waiting.outcome().await),
            _ => None,
        }
    }

    #[tokio::test]
    async fn a_repeat_gets_the_first_outcome_also_an_error() {
        let store = small(8, 1024);
        ticket(&store, "a").finish(Ok("{}".into()));
        ticket(&store, "b").finish(Err(RpcError::denied("no")));
        assert_eq!(repeat(&store, "a").await, Some(Ok("{}".into())));
        assert_eq!(repeat(&store, "b").await, Some(Err(RpcError::denied("no"))));
    }

    #[tokio::test]
    async fn other_parameters_are_a_conflict() {
        let store = small(8, 1024);
        ticket(&store, "a").finish(Ok("{}".into()));
        assert_eq!(
            store.begin(name("a"), 1).unwrap_err().code(),
            Code::Conflict
        );
    }

    #[tokio::test(start_paused = true)]
    async fn outcomes_are_forgotten_after_their_age() {
        let store = small(8, 1024);
        ticket(&store, "a").finish(Ok("{}".into()));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(repeat(&store, "a").await.is_some());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(repeat(&store, "a").await.is_none());
    }

    #[tokio::test]
    async fn the_oldest_outcome_makes_room_but_a_running_call_does_not() {
        let store = small(2, 1024);
        ticket(&store, "a").finish(Ok("{}".into()));
        let _running = ticket(&store, "b");
        let _running_too = ticket(&store, "c");
        assert_eq!(
            store.begin(name("d"), 0).unwrap_err().code(),
            Code::Capacity
        );
    }

    #[tokio::test]
    async fn bytes_are_bounded() {
        let store = small(100, 10);
        ticket(&store, "a").finish(Ok("{12345678}".into()));
        ticket(&store, "b").finish(Ok("{1}".into()));
        assert_eq!(store.state().entries.len(), 1);
        assert_eq!(store.state().bytes, 3);
    }

    #[tokio::test]
    async fn a_run_that_is_dropped_tells_its_repeats() {
        let store = small(8, 1024);
        drop(ticket(&store, "a"));
        let error = repeat(&store, "a").await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Cancelled);
    }
}
