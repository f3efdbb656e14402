//! The registry of managed processes, with their state and relays.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxId, CommandId};
use tokio::time::Instant;

pub(super) type Key = (BoxId, CommandId);

/// All managed processes.
#[derive(Debug, Default)]
pub(in crate::langbot) struct Processes(Mutex<HashMap<Key, Arc<Process>>>);

/// The gateway's state of a process, beyond that of its box.
#[derive(Debug)]
pub(in crate::langbot) struct Process {
    running: AtomicBool,
    /// Whether a relay is attached.
    attached: AtomicBool,
    /// Bytes of standard output that relays have forwarded.
    forwarded: AtomicU64,
    /// When its state last changed.
    changed: Mutex<Instant>,
}

impl Process {
    pub(super) fn new(forwarded: u64) -> Arc<Self> {
        Arc::new(Self {
            running: AtomicBool::new(true),
            attached: AtomicBool::new(false),
            forwarded: AtomicU64::new(forwarded),
            changed: Mutex::new(Instant::now()),
        })
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }

    fn changed(&self) -> Instant {
        *self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ended(&self) {
        self.running.store(false, Ordering::Release);
        *self.changed.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Attaches a relay, unless another one is attached.
    pub(in crate::langbot) fn attach(self: &Arc<Self>) -> Option<Attachment> {
        let free = !self.attached.swap(true, Ordering::AcqRel);
        free.then(|| Attachment(Arc::clone(self)))
    }
}

/// The only relay of a process; dropping it detaches the relay.
#[derive(Debug)]
pub(in crate::langbot) struct Attachment(Arc<Process>);

impl Attachment {
    /// Returns the output offset where reading continues.
    pub(in crate::langbot) fn forwarded(&self) -> u64 {
        self.0.forwarded.load(Ordering::Acquire)
    }

    /// Records the output offset up to which the relay has forwarded.
    pub(in crate::langbot) fn record_forwarded(&self, offset: u64) {
        self.0.forwarded.store(offset, Ordering::Release);
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.0.attached.store(false, Ordering::Release);
    }
}

impl Processes {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Process>>> {
        // Only lookups and assignments run under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves an entry for a process within the limit.
    ///
    /// A process that replaces another one of the same id needs no new entry.
    pub(super) fn begin(&self, key: Key, limit: usize) -> Result<Arc<Process>, BoxError> {
        let mut all = self.lock();
        let running = all
            .iter()
            .filter(|(other, process)| **other != key && process.is_running());
        if running.count() >= limit {
            let message = format!("Box managed process capacity reached ({limit})");
            return Err(BoxError::capacity(message).with_detail(&Detail {
                limit: Some("max_managed_processes".to_owned()),
                max: u64::try_from(limit).ok(),
                ..Detail::default()
            }));
        }
        let process = Process::new(0);
        all.insert(key, Arc::clone(&process));
        Ok(process)
    }

    /// Adds a process that is already running, unless it is registered.
    pub(super) fn add(&self, key: Key, process: &Arc<Process>) {
        self.lock()
            .entry(key)
            .or_insert_with(|| Arc::clone(process));
    }

    /// Returns the oldest ended processes beyond the number to keep.
    pub(super) fn oldest_ended(&self, limit: usize) -> Vec<Key> {
        let mut ended: Vec<_> = {
            let all = self.lock();
            let ended = all.iter().filter(|(_, process)| !process.is_running());
            ended
                .map(|(key, process)| (process.changed(), key.clone()))
                .collect()
        };
        let excess = ended.len().saturating_sub(limit);
        ended.sort_by_key(|(changed, _)| *changed);
        ended.truncate(excess);
        ended.into_iter().map(|(_, key)| key).collect()
    }

    pub(in crate::langbot) fn find(
        &self,
        session: &BoxId,
        process: &CommandId,
    ) -> Option<Arc<Process>> {
        self.lock()
            .get(&(session.clone(), process.clone()))
            .cloned()
    }

    /// Removes a process, unless another one has its id by now.
    pub(super) fn forget(&self, key: &Key, process: &Arc<Process>) {
        let mut all = self.lock();
        if all
            .get(key)
            .is_some_and(|known| Arc::ptr_eq(known, process))
        {
            all.remove(key);
        }
        process.ended();
    }

    /// Removes every process of a deleted box.
    pub(in crate::langbot) fn forget_session(&self, session: &BoxId) {
        self.lock().retain(|(of, _), _| of != session);
    }

    pub(in crate::langbot) fn running_in(&self, session: &BoxId) -> usize {
        let all = self.lock();
        all.iter()
            .filter(|((of, _), process)| of == session && process.is_running())
            .count()
    }

    /// Returns the numbers of running and of ended processes.
    pub(in crate::langbot) fn counts(&self) -> (usize, usize) {
        let all = self.lock();
        let running = all.values().filter(|process| process.is_running()).count();
        (running, all.len() - running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(process: &str) -> Key {
        (BoxId::new("s").unwrap(), CommandId::new(process).unwrap())
    }

    #[tokio::test]
    async fn running_processes_are_counted_and_limited() {
        let processes = Processes::default();
        let first = processes.begin(key("a"), 1).unwrap();
        let full = processes.begin(key("b"), 1).unwrap_err();
        assert_eq!(full.message(), "Box managed process capacity reached (1)");
        // A process of the same id replaces it.
        let again = processes.begin(key("a"), 1).unwrap();
        processes.forget(&key("a"), &first);
        assert_eq!(processes.counts(), (1, 0));
        again.ended();
        assert_eq!(processes.counts(), (0, 1));
        assert!(processes.begin(key("b"), 1).is_ok());
        assert_eq!(processes.running_in(&key("b").0), 1);
        processes.forget_session(&key("b").0);
        assert_eq!(processes.counts(), (0, 0));
    }

    #[tokio::test]
    async fn the_oldest_ended_processes_are_removed_first() {
        let processes = Processes::default();
        for name in ["a", "b", "c"] {
            processes.begin(key(name), 9).unwrap().ended();
        }
        assert_eq!(processes.oldest_ended(2), [key("a")]);
        assert!(processes.oldest_ended(3).is_empty());
    }

    #[tokio::test]
    async fn a_process_has_one_relay_at_a_time() {
        let process = Process::new(7);
        let relay = process.attach().unwrap();
        assert_eq!(relay.forwarded(), 7);
        assert!(process.attach().is_none());
        relay.record_forwarded(9);
        drop(relay);
        assert_eq!(process.attach().unwrap().forwarded(), 9);
    }
}
