//! What is on a entry, kept with its box for a later process. One writer a box: changes that come while it writes are written
//! together, and whoever made one can wait until it is on disk.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::{BoxError, BoxState};

use crate::box_actor::entry::BoxEntry;

/// What was changed and what is kept of it.
#[derive(Default)]
pub(crate) struct Persistence {
    /// Changes so far.
    changes: u64,
    /// So many of them have been written, or could not be.
    settled: u64,
    writing: bool,
    /// What came of the last writing.
    outcome: Option<BoxError>,
}

impl BoxEntry {
    /// Notes a change and sees to it that it is kept.
    pub(crate) fn changed(self: &Arc<Self>) {
        let mut is_first = false;
        self.persistence.send_modify(|persistence| {
            persistence.changes += 1;
            is_first = !std::mem::replace(&mut persistence.writing, true);
        });
        if is_first {
            tokio::spawn(write(Arc::clone(self)));
        }
    }

    /// Returns once every change so far is kept; the error if that cannot be.
    pub(crate) async fn kept(&self) -> Result<(), BoxError> {
        let mut persistence = self.persistence.subscribe();
        let changes = persistence.borrow().changes;
        let settled = persistence
            .wait_for(|persistence| persistence.settled >= changes)
            .await;
        // The sender is `self`, so it cannot be gone.
        settled.map_or(Ok(()), |persistence| {
            persistence.outcome.clone().map_or(Ok(()), Err)
        })
    }
}

/// What a box lacks whose record is not what it is: a later process would know it as it was, or not at all.
const RECORD: &str = "record";

/// How long it takes until writing is tried again, if nothing changes meanwhile.
const PAUSE: Duration = Duration::from_secs(5);

async fn write(entry: Arc<BoxEntry>) {
    let mut coming = entry.persistence.subscribe();
    loop {
        let changes = entry.persistence.borrow().changes;
        entry.live().facts.degraded.retain(|what| what != RECORD);
        let outcome = write_once(&entry).await.err();
        let failed = outcome.is_some();
        if failed {
            entry.live().facts.degraded.push(RECORD.to_owned());
        }
        if let Some(error) = &outcome {
            let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
            tracing::error!(%owner, %box_id, %error, "the box's record was not kept");
        }
        let mut again = false;
        entry.persistence.send_modify(|persistence| {
            persistence.settled = changes;
            persistence.outcome = outcome;
            again = failed || persistence.changes > changes;
            persistence.writing = again;
        });
        if !again {
            return;
        }
        if failed {
            let more = coming.wait_for(|persistence| persistence.changes > changes);
            let _ = tokio::time::timeout(PAUSE, more).await;
        }
    }
}

/// Keeps what the entry says now. A box that is still being made has no record: it would not be whole for whoever adopts it.
async fn write_once(entry: &Arc<BoxEntry>) -> Result<(), BoxError> {
    if entry.live().state == BoxState::Starting {
        return Ok(());
    }
    let Some(place) = entry.place_now() else {
        return Ok(());
    };
    if !place.backend.capabilities().outlive {
        return Ok(());
    }
    let record = serde_json::to_string(&entry.record());
    let record = record.map_err(|error| BoxError::internal(error.to_string()))?;
    let kept = tokio::task::spawn_blocking(move || place.backend.keep(place.id, &record)).await;
    kept.map_err(|_| BoxError::internal("the box's record could not be kept"))?
}
