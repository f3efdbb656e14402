//! `box.events`: what happened to boxes, kept for a while.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{BoxEvent, BoxEvents, BoxEventsParams, BoxEventsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle};
use tokio::sync::{mpsc, watch};

use crate::caller::Caller;
use crate::card::Card;
use crate::handlers::streamed;
use crate::runtime::BoxRuntime;

/// Events that are kept, of all boxes together. The oldest go first.
const KEPT: usize = 4096;

/// Longer messages are cut: what an agent or a backend says may be of any length.
const MESSAGE: usize = 512;

/// What happened, to whose box.
type Kept = (Arc<str>, BoxEvent);

/// What happened lately, and the number of the last of it.
pub(crate) struct Events {
    told: Mutex<Told>,
    /// The number before the first.
    first: u64,
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct Told {
    kept: VecDeque<Kept>,
    /// How many there were of each owner, and how many of those are gone. Owners are as many as there are tokens.
    counts: HashMap<Arc<str>, Count>,
}

#[derive(Default, Clone, Copy)]
struct Count {
    all: u64,
    gone: u64,
}

/// What a reader finds.
struct Look {
    events: Vec<BoxEvent>,
    /// The number of the last event there is.
    last: u64,
    /// How many of the caller's there have been until now.
    seen: u64,
    /// How many of the caller's are gone since the last look.
    lost: u64,
}

impl Events {
    pub(crate) fn new() -> Self {
        // Numbers go on rising from one process to the next, as long as clocks do: nobody makes a thousand events a
        // millisecond. A caller's place in the stream of an earlier process is before everything that happens in this one.
        let first = UnixMs::now().0.saturating_mul(1000);
        Self {
            told: Mutex::default(),
            first,
            last: watch::Sender::new(first),
        }
    }

    /// Every change is a few assignments, so a poisoned lock still holds sound events.
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened to a box.
    pub(crate) fn tell(&self, card: &Card, kind: &str, message: &str) {
        let mut told = self.told();
        let seq = *self.last.borrow() + 1;
        let cut = message.floor_char_boundary(MESSAGE);
        let event = BoxEvent {
            seq,
            at: UnixMs::now(),
            session_id: card.spec.session_id.clone(),
            kind: kind.to_owned(),
            message: message[..cut].to_owned(),
            lost: 0,
        };
        if told.kept.len() == KEPT
            && let Some((owner, _)) = told.kept.pop_front()
        {
            told.counts.entry(owner).or_default().gone += 1;
        }
        let owner = Arc::clone(&card.owner);
        told.counts.entry(Arc::clone(&owner)).or_default().all += 1;
        told.kept.push_back((owner, event));
        // Within the lock, so that numbers and places agree.
        self.last.send_replace(seq);
    }

    /// What the caller sees of what came after this number; `seen` is what its last look said.
    fn look(
        &self,
        caller: &Caller,
        params: &BoxEventsParams,
        after: u64,
        seen: Option<u64>,
    ) -> Look {
        let told = self.told();
        let from = told.kept.partition_point(|(_, event)| event.seq <= after);
        let new = told.kept.range(from..);
        let new: Vec<_> = new.filter(|(owner, _)| caller.sees(owner)).collect();
        let mut count = Count::default();
        for (_, of_owner) in told.counts.iter().filter(|(owner, _)| caller.sees(owner)) {
            count.all += of_owner.all;
            count.gone += of_owner.gone;
        }
        let first_kept = told
            .kept
            .front()
            .map_or(self.first + 1, |(_, event)| event.seq);
        let lost = match (seen, params.after) {
            (Some(seen), _) => count.all.saturating_sub(seen + new.len() as u64),
            // How many of those between were the caller's is not known any more.
            (None, Some(after)) => {
                let between = (first_kept - 1).saturating_sub(after.max(self.first));
                between.min(count.gone)
            }
            (None, None) => 0,
        };
        let wanted = |event: &&BoxEvent| {
            let session = params.session_id.as_ref();
            session.is_none_or(|session| *session == event.session_id)
        };
        let events = new.into_iter().map(|(_, event)| event).filter(wanted);
        Look {
            events: events.cloned().collect(),
            last: *self.last.borrow(),
            seen: count.all,
            lost,
        }
    }
}

impl BoxRuntime {
    /// What happened to the caller's boxes, or to one of them, also if it is gone; with `follow`, until dropped. What a reader
    /// leaves for too long is gone, and counted; what happened before this process began is gone, and not.
    pub async fn events(
        &self,
        caller: &Caller,
        params: BoxEventsParams,
        chunks: Option<mpsc::Sender<BoxEvent>>,
    ) -> Result<BoxEventsResult, BoxError> {
        let events = &self.shared().events;
        let mut news = events.last.subscribe();
        let mut next = params.after.unwrap_or_default();
        let Some(chunks) = chunks else {
            let next = *events.last.borrow();
            return Ok(BoxEventsResult { next, lost: 0 });
        };
        let (mut seen, mut lost) = (None, 0);
        loop {
            news.mark_unchanged();
            let look = events.look(caller, &params, next, seen);
            next = look.last;
            seen = Some(look.seen);
            lost += look.lost;
            for mut event in look.events {
                event.lost = std::mem::take(&mut lost);
                if chunks.send(event).await.is_err() {
                    return Err(BoxError::cancelled("nobody takes the events"));
                }
            }
            // The sender lives with the handle.
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
        let caller = Caller::of(&call);
        streamed(call, |chunks| self.events(&caller, params, chunks)).await
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    fn card(owner: &str, session: &str) -> Card {
        Card::new(owner.into(), &SpecDraft::new(session).build().unwrap())
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
        let (hers, his) = (card("alice", "a"), card("bob", "b"));
        let events = &runtime.shared().events;
        let (sender, mut chunks) = mpsc::channel(1);
        let follower = runtime.clone();
        let following = tokio::spawn(async move {
            let alice = Caller::named("alice");
            follower
                .events(&alice, asked(None, true), Some(sender))
                .await
        });
        let mut told = 3;
        for _ in 0..told {
            events.tell(&hers, "started", "");
        }
        // It has taken those three, and waits for its reader with two of them.
        let first = chunks.recv().await.unwrap();
        tokio::task::yield_now().await;
        for number in 0..2 * KEPT {
            let card = if number % 3 == 0 { &his } else { &hers };
            told += u64::from(number % 3 != 0);
            events.tell(card, "oom", "");
        }
        let (mut got, mut gaps) = (1, Vec::new());
        assert_eq!(first.lost, 0);
        while got + gaps.iter().map(|(_, lost)| lost).sum::<u64>() < told {
            let event = chunks.recv().await.unwrap();
            got += 1;
            assert_eq!(event.session_id.as_str(), "a");
            if event.lost > 0 {
                gaps.push((got, event.lost));
            }
        }
        let of_bob = KEPT.div_ceil(3) as u64;
        let kept = KEPT as u64 - of_bob;
        assert!(gaps.len() == 1 && gaps[0].0 == 4, "{gaps:?}");
        assert!(got.abs_diff(3 + kept) <= 1, "{got}");
        events.tell(&hers, "deleted", "");
        assert_eq!(chunks.recv().await.unwrap().lost, 0);
        following.abort();
    }

    #[tokio::test]
    async fn one_that_comes_back_too_late_is_told_too() {
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let card = card("alice", "a");
        let events = &runtime.shared().events;
        events.tell(&card, "started", "");
        let after = *events.last.borrow();
        for _ in 0..KEPT + 10 {
            events.tell(&card, "oom", "");
        }
        for (asked_after, lost) in [
            (Some(after), 10),
            (Some(after + 10), 0),
            (Some(1), 11),
            (None, 0),
        ] {
            let (sender, mut chunks) = mpsc::channel(2 * KEPT);
            let alice = Caller::named("alice");
            let asked = asked(asked_after, false);
            runtime.events(&alice, asked, Some(sender)).await.unwrap();
            assert_eq!(chunks.recv().await.unwrap().lost, lost, "{asked_after:?}");
            assert_eq!(chunks.recv().await.unwrap().lost, 0);
        }
    }
}
