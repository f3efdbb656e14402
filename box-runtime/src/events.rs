//! `box.events`: what happened to boxes, kept for a while.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{BoxEvent, BoxEvents, BoxEventsParams, BoxEventsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle};
use tokio::sync::{mpsc, watch};

use crate::caller::Caller;
use crate::card::Card;
use crate::handlers::{CHUNKS_AHEAD, forwarded};
use crate::runtime::BoxRuntime;

/// Events that are kept, of all boxes together. The oldest go first.
const KEPT: usize = 4096;

/// Longer messages are cut: what an agent or a backend says may be of any length.
const MESSAGE: usize = 512;

/// What happened, to whose box.
type Kept = (Arc<str>, BoxEvent);

/// What happened lately, and the number of the last of it.
pub(crate) struct Events {
    kept: Mutex<VecDeque<Kept>>,
    last: watch::Sender<u64>,
}

impl Events {
    pub(crate) fn new() -> Self {
        // Numbers go on rising from one process to the next, as long as clocks do: nobody makes a thousand events a
        // millisecond. A caller's place in the stream of an earlier process is before everything that happens in this one.
        let first = UnixMs::now().0.saturating_mul(1000);
        Self {
            kept: Mutex::default(),
            last: watch::Sender::new(first),
        }
    }

    /// Every change is one push, so a poisoned lock still holds sound events.
    fn kept(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened to a box.
    pub(crate) fn tell(&self, card: &Card, kind: &str, message: &str) {
        let mut kept = self.kept();
        let seq = *self.last.borrow() + 1;
        let cut = message.floor_char_boundary(MESSAGE);
        let event = BoxEvent {
            seq,
            at: UnixMs::now(),
            session_id: card.spec.session_id.clone(),
            kind: kind.to_owned(),
            message: message[..cut].to_owned(),
        };
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((Arc::clone(&card.owner), event));
        // Within the lock, so that numbers and places agree.
        self.last.send_replace(seq);
    }

    /// What the caller sees of what came after this number, and the number of the last event there is.
    fn after(&self, caller: &Caller, params: &BoxEventsParams, after: u64) -> (Vec<BoxEvent>, u64) {
        let kept = self.kept();
        let from = kept.partition_point(|(_, event)| event.seq <= after);
        let wanted = kept.range(from..).filter(|(owner, event)| {
            let session = params.session_id.as_ref();
            caller.sees(owner) && session.is_none_or(|session| *session == event.session_id)
        });
        let events = wanted.map(|(_, event)| event.clone()).collect();
        (events, *self.last.borrow())
    }
}

impl BoxRuntime {
    /// What happened to the caller's boxes, or to one of them, also if it is gone; with `follow`, until dropped. What a reader
    /// leaves for too long is gone, as is what happened before this process began.
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
            return Ok(BoxEventsResult { next });
        };
        loop {
            news.mark_unchanged();
            let (found, last) = events.after(caller, &params, next);
            next = last;
            for event in found {
                if chunks.send(event).await.is_err() {
                    return Err(BoxError::cancelled("nobody takes the events"));
                }
            }
            // The sender lives with the handle.
            if !params.follow || news.changed().await.is_err() {
                return Ok(BoxEventsResult { next });
            }
        }
    }
}

impl Handle<BoxEvents> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxEventsParams,
        mut call: Call<BoxEvents>,
    ) -> Result<BoxEventsResult, BoxError> {
        let caller = Caller::of(&call);
        if call.chunks().is_none() {
            return self.events(&caller, params, None).await;
        }
        let (sender, chunks) = mpsc::channel(CHUNKS_AHEAD);
        let running = self.events(&caller, params, Some(sender));
        forwarded(running, chunks, call).await
    }
}
