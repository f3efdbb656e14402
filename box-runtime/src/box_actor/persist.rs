//! Persistence of an entry with its box, for a later process.
//!
//! Each box has one writer. Changes during a write are combined into the next one, and a caller can
//! wait until its change is on disk.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::{BoxError, BoxState};

use crate::box_actor::entry::BoxEntry;

/// Progress of the writer.
#[derive(Default)]
pub(crate) struct Persistence {
    /// Number of changes.
    changes: u64,
    /// Number of changes that were written or failed.
    settled: u64,
    writing: bool,
    /// Error of the last write, if it failed.
    outcome: Option<BoxError>,
}

impl BoxEntry {
    /// Records a change and schedules a write.
    pub(crate) fn mark_changed(self: &Arc<Self>) {
        let is_first = self.persistence.modify(|persistence| {
            persistence.changes += 1;
            !std::mem::replace(&mut persistence.writing, true)
        });
        if is_first {
            tokio::spawn(write(Arc::clone(self)));
        }
    }

    /// Waits until all changes so far are written; returns the error if that fails.
    pub(crate) async fn wait_persisted(&self) -> Result<(), BoxError> {
        let changes = self.persistence.read().changes;
        let settled = self.persistence.wait_for(|persistence| {
            let is_settled = persistence.settled >= changes;
            is_settled.then(|| persistence.outcome.clone())
        });
        settled.await.map_or(Ok(()), Err)
    }

    /// Removes the obsolete records of the box.
    ///
    /// The status names them until they are removed, so that the end of the box completes a removal
    /// whose caller was dropped.
    pub(crate) async fn remove_obsolete_records(self: &Arc<Self>) {
        let obsolete = self.status().obsolete_records.clone();
        if obsolete.is_empty() {
            return;
        }
        if self.persistence.read().writing {
            // A write of an earlier status would bring a removed record back.
            self.mark_changed();
            // The error belongs to another record.
            let _ = self.wait_persisted().await;
        }
        for place in &obsolete {
            place.clone().remove_soon().await;
        }
        for place in &obsolete {
            self.status().keep_record(place);
        }
    }
}

/// Feature that a box lacks while its record is outdated.
///
/// A later process would adopt the box in its earlier state, or not at all.
const RECORD: &str = "record";

/// Delay before a failed write is retried without a new change.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

async fn write(entry: Arc<BoxEntry>) {
    loop {
        let changes = entry.persistence.read().changes;
        entry.status().facts.degraded.retain(|what| what != RECORD);
        let outcome = write_once(&entry).await.err();
        let failed = outcome.is_some();
        if failed {
            entry.status().facts.degraded.push(RECORD.to_owned());
        }
        if let Some(error) = &outcome {
            let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
            tracing::error!(%owner, %box_id, %error, "cannot write the record of a box");
        }
        let repeat = entry.persistence.modify(|persistence| {
            persistence.settled = changes;
            persistence.outcome = outcome;
            persistence.writing = failed || persistence.changes > changes;
            persistence.writing
        });
        if !repeat {
            return;
        }
        if failed {
            let more = entry
                .persistence
                .wait_for(|persistence| (persistence.changes > changes).then_some(()));
            let _ = tokio::time::timeout(RETRY_PAUSE, more).await;
        }
    }
}

/// Writes the current entry.
///
/// A starting box has no record of the backend, because an adopting process would find it
/// incomplete. If it was stopped, it keeps its record as a stopped box. A new one may have a record
/// of its own (`unstarted.rs`).
async fn write_once(entry: &Arc<BoxEntry>) -> Result<(), BoxError> {
    let (location, place, record) = {
        let status = entry.status();
        let is_starting = status.state == BoxState::Starting;
        let location = status.location.clone();
        let location = location.filter(|location| location.backend.capabilities().outlive);
        let location = location.filter(|_| !is_starting);
        let stopped = status.stopped.as_deref();
        let stopped = stopped.filter(|_| is_starting || status.state == BoxState::Stopped);
        let place = stopped.or_else(|| status.unstarted_place()).cloned();
        if location.is_none() && place.is_none() {
            return Ok(());
        }
        // Of the same status: another one belongs to another place.
        (location, place, entry.persisted_with(&status))
    };
    let record = serde_json::to_string(&record);
    let record = record.map_err(|error| BoxError::internal(error.to_string()))?;
    let writing = move || match (location, place) {
        (Some(location), _) => location.backend.persist(location.id, &record),
        (None, Some(place)) => place.write(&record),
        (None, None) => Ok(()),
    };
    let written = tokio::task::spawn_blocking(writing).await;
    written.map_err(|_| BoxError::internal("record write task failed"))?
}
