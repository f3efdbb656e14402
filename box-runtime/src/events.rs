//! `box.events`: recent events of boxes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{BoxEvent, BoxEvents, BoxEventsParams, BoxEventsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle};
use tokio::sync::{mpsc, watch};

use crate::box_actor::entry::BoxEntry;
use crate::caller::Rights as _;
use crate::handlers::streamed;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Events kept for each owner. The runtime drops the oldest first.
const KEPT: usize = 4096;

/// Maximum message length. Agents and backends may send longer messages.
const MESSAGE: usize = 512;

/// The recent events of all boxes.
///
/// Each owner has a separate list with separate numbers. Neither shows an owner how many events
/// other owners have.
pub(crate) struct Events {
    told: Mutex<Told>,
    /// The number before the first event.
    first: u64,
    /// The number of the last event, counted over all owners.
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct Told {
    /// The events by owner. The number of owners is at most the number of tokens.
    rows: HashMap<Arc<str>, Row>,
}

/// The events of one owner's boxes.
#[derive(Default)]
struct Row {
    kept: VecDeque<Kept>,
    /// The number of events so far, including dropped ones.
    count: u64,
}

/// An event with its number among the events of its owner.
struct Kept {
    event: BoxEvent,
    /// Its number among the events of all owners.
    of_all: u64,
    owner: Arc<str>,
}

impl Kept {
    /// Returns the number of the event for this caller.
    fn seq(&self, caller: &Caller) -> u64 {
        if caller.sees_all() {
            self.of_all
        } else {
            self.event.seq
        }
    }

    fn told_to(&self, caller: &Caller) -> BoxEvent {
        let mut event = self.event.clone();
        event.seq = self.seq(caller);
        if let Some(known) = caller.knows(&self.owner, &event.box_id) {
            event.box_id = known;
        }
        event
    }
}

/// The events that a reader has not seen yet.
struct Look {
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
            told: Mutex::default(),
            first,
            last: watch::Sender::new(first),
        }
    }

    /// Every change is a few assignments, so the data of a poisoned lock is valid.
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of a box.
    pub(crate) fn tell(&self, entry: &BoxEntry, kind: &str, message: &str) {
        let mut told = self.told();
        let of_all = *self.last.borrow() + 1;
        let row = told.rows.entry(Arc::clone(&entry.owner)).or_default();
        row.count += 1;
        let cut = message.floor_char_boundary(MESSAGE);
        let event = BoxEvent {
            seq: self.first + row.count,
            at: UnixMs::now(),
            box_id: entry.spec.box_id.clone(),
            kind: kind.to_owned(),
            message: message[..cut].to_owned(),
            lost: 0,
        };
        if row.kept.len() == KEPT {
            row.kept.pop_front();
        }
        row.kept.push_back(Kept {
            event,
            of_all,
            owner: Arc::clone(&entry.owner),
        });
        // Set under the lock, so that events are stored in the order of their numbers.
        self.last.send_replace(of_all);
    }

    /// Returns the number of the caller's last event.
    fn last(&self, told: &Told, caller: &Caller) -> u64 {
        if caller.sees_all() {
            return *self.last.borrow();
        }
        let count = told.rows.get(&caller.name()).map_or(0, |row| row.count);
        self.first + count
    }

    /// Returns the caller's events after this number, or all of them.
    fn look(&self, caller: &Caller, params: &BoxEventsParams, after: Option<u64>) -> Look {
        let told = self.told();
        let last = self.last(&told, caller);
        // A number above the last one comes from an earlier process with a clock ahead of this one.
        let from = after.unwrap_or(0).max(self.first);
        let from = if from > last { self.first } else { from };
        let rows = told.rows.iter().filter(|(owner, _)| caller.sees(owner));
        let mut new: Vec<&Kept> = rows
            .flat_map(|(_, row)| {
                let at = row.kept.partition_point(|kept| kept.seq(caller) <= from);
                row.kept.range(at..)
            })
            .collect();
        new.sort_unstable_by_key(|kept| kept.of_all);
        let missed = match after {
            Some(_) => (last - from).saturating_sub(new.len() as u64),
            None => 0,
        };
        let session = params.box_id.as_ref();
        let events = new.into_iter().map(|kept| kept.told_to(caller));
        Look {
            events: events
                .filter(|event| session.is_none_or(|session| *session == event.box_id))
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
        let mut news = events.last.subscribe();
        let Some(chunks) = chunks else {
            let next = events.last(&events.told(), caller);
            return Ok(BoxEventsResult { next, lost: 0 });
        };
        let (mut after, mut lost) = (params.after, 0);
        loop {
            news.mark_unchanged();
            let look = events.look(caller, &params, after);
            let next = look.last;
            after = Some(next);
            lost += look.lost;
            for mut event in look.events {
                event.lost = std::mem::take(&mut lost);
                if chunks.send(event).await.is_err() {
                    return Err(BoxError::cancelled("the reader is gone"));
                }
            }
            // The handle owns the sender, so this does not fail while the call runs.
            if !params.follow || news.changed().await.is_err() {
                return Ok(BoxEventsResult { next, lost });
            }
        }
    }
}

impl Handle<BoxEvents> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxEventsParams,
        call: Call<BoxEvents>,
    ) -> Result<BoxEventsResult, BoxError> {
        let caller = call.caller();
        streamed(call, |chunks| self.events(&caller, params, chunks)).await
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    fn entry(owner: &str, session: &str) -> BoxEntry {
        BoxEntry::new(owner.into(), &SpecDraft::new(session).build().unwrap())
    }

    fn asked(after: Option<u64>, follow: bool) -> BoxEventsParams {
        BoxEventsParams {
            after,
            follow,
            ..BoxEventsParams::default()
        }
    }

    #[tokio::test]
    async fn a_slow_reader_is_told_how_much_it_has_missed() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let (hers, his) = (entry("alice", "a"), entry("bob", "b"));
        let events = &runtime.shared().events;
        let (sender, mut chunks) = mpsc::channel(1);
        let follower = runtime.clone();
        let following = tokio::spawn(async move {
            let alice = Caller::token("alice");
            follower
                .events(&alice, asked(None, true), Some(sender))
                .await
        });
        let mut told = 3;
        for _ in 0..told {
            events.tell(&hers, "started", "");
        }
        // The call has read these three events and waits for its reader with two of them.
        let first = chunks.recv().await.unwrap();
        tokio::task::yield_now().await;
        for number in 0..2 * KEPT {
            let entry = if number % 3 == 0 { &his } else { &hers };
            told += u64::from(number % 3 != 0);
            events.tell(entry, "oom", "");
        }
        let (mut got, mut gaps) = (1, Vec::new());
        assert_eq!(first.lost, 0);
        while got + gaps.iter().map(|(_, lost)| lost).sum::<u64>() < told {
            let event = chunks.recv().await.unwrap();
            got += 1;
            assert_eq!(event.box_id.as_str(), "a");
            if event.lost > 0 {
                gaps.push((got, event.lost));
            }
        }
        let kept = KEPT as u64;
        assert!(gaps.len() == 1 && gaps[0].0 == 4, "{gaps:?}");
        assert!(got.abs_diff(3 + kept) <= 1, "{got}");
        events.tell(&hers, "deleted", "");
        assert_eq!(chunks.recv().await.unwrap().lost, 0);
        following.abort();
    }

    /// Returns the events after this number, and the number to continue from.
    async fn found(
        runtime: &BoxRuntime,
        caller: &Caller,
        after: Option<u64>,
    ) -> (Vec<BoxEvent>, u64) {
        let (sender, mut chunks) = mpsc::channel(4 * KEPT);
        let asked = asked(after, false);
        let told = runtime.events(caller, asked, Some(sender)).await.unwrap();
        assert_eq!(told.lost, 0);
        let mut events = Vec::new();
        while let Some(event) = chunks.recv().await {
            events.push(event);
        }
        (events, told.next)
    }

    #[tokio::test]
    async fn what_happens_to_others_shows_in_no_number() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let (hers, his) = (entry("alice", "box"), entry("bob", "box"));
        let (alice, local) = (Caller::token("alice"), Caller::Local);
        let events = &runtime.shared().events;
        events.tell(&hers, "started", "");
        let (first, next) = found(&runtime, &alice, None).await;
        for _ in 0..2 * KEPT {
            events.tell(&his, "oom", "");
        }
        assert_eq!(found(&runtime, &alice, Some(next)).await, (vec![], next));
        events.tell(&hers, "deleted", "");
        let (all, next) = found(&runtime, &alice, None).await;
        assert_eq!(all[0], first[0], "nothing of hers is gone");
        assert_eq!((all[1].seq, all[1].lost), (first[0].seq + 1, 0));
        assert_eq!(next, all[1].seq);
        // A local caller sees all boxes. It gets the same events with other numbers and box ids.
        let (all, _) = found(&runtime, &local, None).await;
        assert_eq!(all.len(), KEPT + 2);
        assert_eq!(all[KEPT + 1].seq, all[0].seq + 2 * KEPT as u64 + 1);
        assert_eq!(all[0].box_id.as_str(), "box@alice");
        assert_eq!(all[1].box_id.as_str(), "box@bob");
    }

    #[tokio::test]
    async fn a_place_of_a_process_whose_clock_was_ahead_is_before_everything() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let entry = entry("alice", "a");
        let events = &runtime.shared().events;
        events.tell(&entry, "started", "");
        let alice = Caller::token("alice");
        let (all, _) = found(&runtime, &alice, Some(u64::MAX)).await;
        assert_eq!(all.len(), 1);
    }

    #[tokio::test]
    async fn one_that_comes_back_too_late_is_told_too() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let entry = entry("alice", "a");
        let events = &runtime.shared().events;
        events.tell(&entry, "started", "");
        let after = *events.last.borrow();
        for _ in 0..KEPT + 10 {
            events.tell(&entry, "oom", "");
        }
        for (asked_after, lost) in [
            (Some(after), 10),
            (Some(after + 10), 0),
            (Some(1), 11),
            (None, 0),
        ] {
            let (sender, mut chunks) = mpsc::channel(2 * KEPT);
            let alice = Caller::token("alice");
            let asked = asked(asked_after, false);
            runtime.events(&alice, asked, Some(sender)).await.unwrap();
            assert_eq!(chunks.recv().await.unwrap().lost, lost, "{asked_after:?}");
            assert_eq!(chunks.recv().await.unwrap().lost, 0);
        }
    }
}
