//! `box.events`: recent events of boxes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{BoxEvent, BoxEvents, BoxEventsParams, BoxEventsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle};
use tokio::sync::{mpsc, watch};

use crate::box_actor::entry::BoxEntry;
use crate::caller::Visibility as _;
use crate::handlers::streaming;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Events kept for each owner. The runtime drops the oldest first.
const EVENTS_PER_OWNER: usize = 4096;

/// Maximum message length. Agents and backends may send longer messages.
const MESSAGE_BYTES: usize = 512;

/// The recent events of all boxes.
///
/// Each owner has a separate list with separate numbers. Neither shows an owner how many events
/// other owners have.
pub(crate) struct Events {
    log: Mutex<EventLog>,
    /// The number before the first event.
    first: u64,
    /// The number of the last event, counted over all owners.
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct EventLog {
    /// The events by owner. The number of owners is at most the number of tokens.
    owners: HashMap<Arc<str>, OwnerEvents>,
}

/// The events of one owner's boxes.
#[derive(Default)]
struct OwnerEvents {
    events: VecDeque<StoredEvent>,
    /// The number of events so far, including dropped ones.
    count: u64,
}

/// An event with its number among the events of its owner.
struct StoredEvent {
    event: BoxEvent,
    /// Its number among the events of all owners.
    global_seq: u64,
    owner: Arc<str>,
}

impl StoredEvent {
    /// Returns the number of the event for this caller.
    fn seq(&self, caller: &Caller) -> u64 {
        if caller.can_see_all() {
            self.global_seq
        } else {
            self.event.seq
        }
    }

    fn for_caller(&self, caller: &Caller) -> BoxEvent {
        let mut event = self.event.clone();
        event.seq = self.seq(caller);
        if let Some(known) = caller.id_for(&self.owner, &event.box_id) {
            event.box_id = known;
        }
        event
    }
}

/// The events that a reader has not seen yet.
struct NewEvents {
    events: Vec<BoxEvent>,
    /// The number of the caller's last event.
    last: u64,
    /// The number of the caller's events dropped since the previous read.
    lost: u64,
}

impl Events {
    pub(crate) fn new() -> Self {
        // Numbers keep rising across processes, because they start at the clock and events are
        // rarer than one per microsecond. A number from an earlier process is below all numbers of
        // this process.
        let first = UnixMs::now().0.saturating_mul(1000);
        Self {
            log: Mutex::default(),
            first,
            last: watch::Sender::new(first),
        }
    }

    /// Every change is a few assignments, so the data of a poisoned lock is valid.
    fn log(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of a box.
    pub(crate) fn record(&self, entry: &BoxEntry, kind: &str, message: &str) {
        let mut log = self.log();
        let global_seq = *self.last.borrow() + 1;
        let owned = log.owners.entry(Arc::clone(&entry.owner)).or_default();
        owned.count += 1;
        let cut = message.floor_char_boundary(MESSAGE_BYTES);
        let event = BoxEvent {
            seq: self.first + owned.count,
            at: UnixMs::now(),
            box_id: entry.spec.box_id.clone(),
            kind: kind.to_owned(),
            message: message[..cut].to_owned(),
            lost: 0,
        };
        if owned.events.len() == EVENTS_PER_OWNER {
            owned.events.pop_front();
        }
        owned.events.push_back(StoredEvent {
            event,
            global_seq,
            owner: Arc::clone(&entry.owner),
        });
        // Set under the lock, so that events are stored in the order of their numbers.
        self.last.send_replace(global_seq);
    }

    /// Returns the number of the caller's last event.
    fn last(&self, log: &EventLog, caller: &Caller) -> u64 {
        if caller.can_see_all() {
            return *self.last.borrow();
        }
        let owned = log.owners.get(&caller.name());
        let count = owned.map_or(0, |owned| owned.count);
        self.first + count
    }

    /// Returns the caller's events after this number, or all of them.
    fn after(&self, caller: &Caller, params: &BoxEventsParams, after: Option<u64>) -> NewEvents {
        let log = self.log();
        let last = self.last(&log, caller);
        // A number above the last one comes from an earlier process with a clock ahead of this one.
        let from = after.unwrap_or(0).max(self.first);
        let from = if from > last { self.first } else { from };
        let visible = log.owners.iter();
        let visible = visible.filter(|(owner, _)| caller.can_see(owner));
        let mut new: Vec<&StoredEvent> = visible
            .flat_map(|(_, owned)| {
                let events = &owned.events;
                let at = events.partition_point(|event| event.seq(caller) <= from);
                events.range(at..)
            })
            .collect();
        new.sort_unstable_by_key(|event| event.global_seq);
        let missed = match after {
            Some(_) => (last - from).saturating_sub(new.len() as u64),
            None => 0,
        };
        let box_id = params.box_id.as_ref();
        let events = new.into_iter().map(|event| event.for_caller(caller));
        NewEvents {
            events: events
                .filter(|event| box_id.is_none_or(|box_id| *box_id == event.box_id))
                .collect(),
            last,
            lost: missed,
        }
    }
}

impl BoxRuntime {
    /// Returns the events of the caller's boxes, or of one box.
    ///
    /// The box may have ended already. With `follow`, the call continues until it is dropped. The
    /// result counts the events that the runtime dropped before a slow reader took them. It does
    /// not count events from before this process started.
    pub async fn events(
        &self,
        caller: &Caller,
        params: BoxEventsParams,
        chunks: Option<mpsc::Sender<BoxEvent>>,
    ) -> Result<BoxEventsResult, BoxError> {
        let events = &self.shared().events;
        let mut changes = events.last.subscribe();
        let Some(chunks) = chunks else {
            let next = events.last(&events.log(), caller);
            return Ok(BoxEventsResult { next, lost: 0 });
        };
        let (mut after, mut lost) = (params.after, 0);
        loop {
            changes.mark_unchanged();
            let new = events.after(caller, &params, after);
            let next = new.last;
            after = Some(next);
            lost += new.lost;
            for mut event in new.events {
                event.lost = std::mem::take(&mut lost);
                if chunks.send(event).await.is_err() {
                    return Err(BoxError::cancelled("the reader has disconnected"));
                }
            }
            // The handle owns the sender, so this does not fail while the call runs.
            if !params.follow || changes.changed().await.is_err() {
                return Ok(BoxEventsResult { next, lost });
            }
        }
    }
}

streaming! {
    BoxEvents: events(BoxEventsParams) -> BoxEventsResult;
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    fn entry(owner: &str, box_id: &str) -> BoxEntry {
        BoxEntry::new(owner.into(), &SpecDraft::new(box_id).build().unwrap())
    }

    fn params(after: Option<u64>, follow: bool) -> BoxEventsParams {
        BoxEventsParams {
            after,
            follow,
            ..BoxEventsParams::default()
        }
    }

    #[tokio::test]
    async fn a_slow_reader_gets_the_number_of_missed_events() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let (hers, his) = (entry("alice", "a"), entry("bob", "b"));
        let events = &runtime.shared().events;
        let (sender, mut chunks) = mpsc::channel(1);
        let follower = runtime.clone();
        let following = tokio::spawn(async move {
            let alice = Caller::token("alice");
            follower
                .events(&alice, params(None, true), Some(sender))
                .await
        });
        let mut recorded = 3;
        for _ in 0..recorded {
            events.record(&hers, "started", "");
        }
        // The call has read these three events and waits for its reader with two of them.
        let first = chunks.recv().await.unwrap();
        tokio::task::yield_now().await;
        for number in 0..2 * EVENTS_PER_OWNER {
            let entry = if number % 3 == 0 { &his } else { &hers };
            recorded += u64::from(number % 3 != 0);
            events.record(entry, "oom", "");
        }
        let (mut got, mut gaps) = (1, Vec::new());
        assert_eq!(first.lost, 0);
        while got + gaps.iter().map(|(_, lost)| lost).sum::<u64>() < recorded {
            let event = chunks.recv().await.unwrap();
            got += 1;
            assert_eq!(event.box_id.as_str(), "a");
            if event.lost > 0 {
                gaps.push((got, event.lost));
            }
        }
        let limit = EVENTS_PER_OWNER as u64;
        assert!(gaps.len() == 1 && gaps[0].0 == 4, "{gaps:?}");
        assert!(got.abs_diff(3 + limit) <= 1, "{got}");
        events.record(&hers, "deleted", "");
        assert_eq!(chunks.recv().await.unwrap().lost, 0);
        following.abort();
    }

    /// Returns the events after this number, and the number to continue from.
    async fn found(
        runtime: &BoxRuntime,
        caller: &Caller,
        after: Option<u64>,
    ) -> (Vec<BoxEvent>, u64) {
        let (sender, mut chunks) = mpsc::channel(4 * EVENTS_PER_OWNER);
        let params = params(after, false);
        let answer = runtime.events(caller, params, Some(sender)).await.unwrap();
        assert_eq!(answer.lost, 0);
        let mut events = Vec::new();
        while let Some(event) = chunks.recv().await {
            events.push(event);
        }
        (events, answer.next)
    }

    #[tokio::test]
    async fn numbers_do_not_depend_on_events_of_other_owners() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let (hers, his) = (entry("alice", "box"), entry("bob", "box"));
        let (alice, local) = (Caller::token("alice"), Caller::Local);
        let events = &runtime.shared().events;
        events.record(&hers, "started", "");
        let (first, next) = found(&runtime, &alice, None).await;
        for _ in 0..2 * EVENTS_PER_OWNER {
            events.record(&his, "oom", "");
        }
        assert_eq!(found(&runtime, &alice, Some(next)).await, (vec![], next));
        events.record(&hers, "deleted", "");
        let (all, next) = found(&runtime, &alice, None).await;
        assert_eq!(all[0], first[0], "none of her events is lost");
        assert_eq!((all[1].seq, all[1].lost), (first[0].seq + 1, 0));
        assert_eq!(next, all[1].seq);
        // A local caller sees all boxes. It gets the same events with other numbers and box ids.
        let (all, _) = found(&runtime, &local, None).await;
        assert_eq!(all.len(), EVENTS_PER_OWNER + 2);
        assert_eq!(
            all[EVENTS_PER_OWNER + 1].seq,
            all[0].seq + 2 * EVENTS_PER_OWNER as u64 + 1
        );
        assert_eq!(all[0].box_id.as_str(), "box@alice");
        assert_eq!(all[1].box_id.as_str(), "box@bob");
    }

    #[tokio::test]
    async fn a_number_from_a_process_with_a_clock_ahead_reads_all_events() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let entry = entry("alice", "a");
        let events = &runtime.shared().events;
        events.record(&entry, "started", "");
        let alice = Caller::token("alice");
        let (all, _) = found(&runtime, &alice, Some(u64::MAX)).await;
        assert_eq!(all.len(), 1);
    }

    #[tokio::test]
    async fn a_reader_that_returns_late_gets_the_number_of_missed_events() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let entry = entry("alice", "a");
        let events = &runtime.shared().events;
        events.record(&entry, "started", "");
        let after = *events.last.borrow();
        for _ in 0..EVENTS_PER_OWNER + 10 {
            events.record(&entry, "oom", "");
        }
        for (asked_after, lost) in [
            (Some(after), 10),
            (Some(after + 10), 0),
            (Some(1), 11),
            (None, 0),
        ] {
            let (sender, mut chunks) = mpsc::channel(2 * EVENTS_PER_OWNER);
            let alice = Caller::token("alice");
            let params = params(asked_after, false);
            runtime.events(&alice, params, Some(sender)).await.unwrap();
            assert_eq!(chunks.recv().await.unwrap().lost, lost, "{asked_after:?}");
            assert_eq!(chunks.recv().await.unwrap().lost, 0);
        }
    }
}
