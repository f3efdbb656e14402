//! Which processes there are, which of them run, and which have a relay.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxId, CommandId};
use tokio::time::Instant;

pub(super) type Key = (BoxId, CommandId);

/// The processes there are.
#[derive(Debug, Default)]
pub(in crate::langbot) struct Processes(Mutex<HashMap<Key, Arc<Process>>>);

/// What is known of one beyond what its box knows.
#[derive(Debug)]
pub(in crate::langbot) struct Process {
    running: AtomicBool,
    /// A relay is attached.
    attached: AtomicBool,
    /// Bytes of standard output that relays have passed on.
    passed_on: AtomicU64,
    /// When it was last seen to change.
    changed: Mutex<Instant>,
}

impl Process {
    pub(super) fn new(passed_on: u64) -> Arc<Self> {
        Arc::new(Self {
            running: AtomicBool::new(true),
            attached: AtomicBool::new(false),
            passed_on: AtomicU64::new(passed_on),
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

    /// Attaches a relay, unless there is one.
    pub(in crate::langbot) fn attach(self: &Arc<Self>) -> Option<Attachment> {
        let free = !self.attached.swap(true, Ordering::AcqRel);
        free.then(|| Attachment(Arc::clone(self)))
    }
}

/// The one relay of a process, until it is dropped.
#[derive(Debug)]
pub(in crate::langbot) struct Attachment(Arc<Process>);

impl Attachment {
    /// Where reading goes on.
    pub(in crate::langbot) fn passed_on(&self) -> u64 {
        self.0.passed_on.load(Ordering::Acquire)
    }

    /// So much has been passed on.
    pub(in crate::langbot) fn pass_on(&self, offset: u64) {
        self.0.passed_on.store(offset, Ordering::Release);
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

    /// Takes a place for a process, if there is one. The process of the same id that it replaces needs none.
    pub(super) fn begin(&self, key: Key, most: usize) -> Result<Arc<Process>, BoxError> {
        let mut all = self.lock();
        let running = all
            .iter()
            .filter(|(other, process)| **other != key && process.is_running());
        if running.count() >= most {
            let message = format!("Box managed process capacity reached ({most})");
            return Err(BoxError::capacity(message).with_detail(&Detail {
                limit: Some("max_managed_processes".to_owned()),
                max: u64::try_from(most).ok(),
                ..Detail::default()
            }));
        }
        let process = Process::new(0);
        all.insert(key, Arc::clone(&process));
        Ok(process)
    }

    /// Adds one that runs already, unless it is known.
    pub(super) fn add(&self, key: Key, process: &Arc<Process>) {
        self.lock()
            .entry(key)
            .or_insert_with(|| Arc::clone(process));
    }

    /// Those that ended first, beyond so many that have ended.
    pub(super) fn too_old(&self, most: usize) -> Vec<Key> {
        let mut ended: Vec<_> = {
            let all = self.lock();
            let ended = all.iter().filter(|(_, process)| !process.is_running());
            ended
                .map(|(key, process)| (process.changed(), key.clone()))
                .collect()
        };
        let over = ended.len().saturating_sub(most);
        ended.sort_by_key(|(changed, _)| *changed);
        ended.truncate(over);
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

    /// Lets go of a process, unless another has its id by now.
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

    /// Lets go of every process of a box that is gone.
    pub(in crate::langbot) fn forget_session(&self, session: &BoxId) {
        self.lock().retain(|(of, _), _| of != session);
    }

    pub(in crate::langbot) fn running_in(&self, session: &BoxId) -> usize {
        let all = self.lock();
        all.iter()
            .filter(|((of, _), process)| of == session && process.is_running())
            .count()
    }

    /// How many run, and how many have ended.
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
    async fn running_ones_are_counted_and_bounded() {
        let processes = Processes::default();
        let first = processes.begin(key("a"), 1).unwrap();
        let full = processes.begin(key("b"), 1).unwrap_err();
        assert_eq!(full.message(), "Box managed process capacity reached (1)");
        // One of the same id takes its place.
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
    async fn the_oldest_of_the_ended_go_first() {
        let processes = Processes::default();
        for name in ["a", "b", "c"] {
            processes.begin(key(name), 9).unwrap().ended();
        }
        assert_eq!(processes.too_old(2), [key("a")]);
        assert!(processes.too_old(3).is_empty());
    }

    #[tokio::test]
    async fn a_process_has_one_relay_at_a_time() {
        let process = Process::new(7);
        let relay = process.attach().unwrap();
        assert_eq!(relay.passed_on(), 7);
        assert!(process.attach().is_none());
        relay.pass_on(9);
        drop(relay);
        assert_eq!(process.attach().unwrap().passed_on(), 9);
    }
}
