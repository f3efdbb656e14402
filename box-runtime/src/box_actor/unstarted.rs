//! Boxes whose creator wants to find them even if they fail, before they have started.
//!
//! # Steps
//! 1. The registry gives the entry of such a box a place for its record, before a caller can see it.
//! 2. The writer of the entry writes the record (`persist.rs`). `box.get` waits for that, so that a
//!    box that a caller has seen survives a crash.
//! 3. After the start, the backend has a record, and the runtime removes this one. After a failed
//!    start, this one has the reason, until the runtime removes the entry.
//! 4. The next process starts the box again, or keeps it as failed.

use std::sync::Arc;

use box_protocol::BoxState;
use box_rpc::Caller;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::ActorStart;
use super::entry::{BoxEntry, BoxStatus, PersistedBox};
use super::request::{Create, Request};
use crate::records::{BoxRecords, RecordPlace};
use crate::runtime::BoxRuntime;

/// Number of processes that may end while they start the same box.
///
/// The start may be what ends them.
const MAX_ATTEMPTS: u32 = 3;

/// What the next process needs to start a box again.
#[derive(Debug)]
pub(crate) struct Unstarted {
    place: RecordPlace,
    /// Number of processes that have begun to start it.
    attempts: u32,
}

/// Persistent form of [`Unstarted`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PersistedStart {
    attempts: u32,
    /// Why the box could not start.
    failed: Option<String>,
}

impl BoxStatus {
    /// Returns the place of the record of a box that has not started.
    pub(super) fn unstarted_place(&self) -> Option<&RecordPlace> {
        let is_unstarted = matches!(self.state, BoxState::Starting | BoxState::Failed);
        let unstarted = self.unstarted.as_deref().filter(|_| is_unstarted);
        unstarted.map(|unstarted| &unstarted.place)
    }

    pub(super) fn persisted_start(&self) -> Option<PersistedStart> {
        self.unstarted_place()?;
        let failed = self.state == BoxState::Failed;
        Some(PersistedStart {
            attempts: self.unstarted.as_ref()?.attempts,
            failed: failed.then(|| self.reason.clone().unwrap_or_default()),
        })
    }
}

impl BoxEntry {
    /// Gives a new box a record before it has started.
    pub(crate) fn outlive_start(self: &Arc<Self>, records: &BoxRecords) {
        self.set_unstarted(records.place(Uuid::now_v7()), 1);
    }

    fn set_unstarted(self: &Arc<Self>, place: RecordPlace, attempts: u32) {
        self.status().unstarted = Some(Box::new(Unstarted { place, attempts }));
        self.mark_changed();
    }

    /// Waits until the record of a box that has not started is on disk.
    pub(crate) async fn wait_unstarted_record(&self) {
        if self.status().unstarted.is_some() {
            // After an error, the box lists its record as degraded.
            let _ = self.wait_persisted().await;
        }
    }

    /// Removes the record of a box that has started or ended.
    pub(super) async fn remove_unstarted_record(self: &Arc<Self>) {
        let (unstarted, has_started) = {
            let mut status = self.status();
            (status.unstarted.take(), status.state == BoxState::Running)
        };
        let Some(unstarted) = unstarted else { return };
        if !has_started {
            // A write that has begun would bring the record back.
            self.mark_changed();
            let _ = self.wait_persisted().await;
        }
        let removing = move || unstarted.place.remove();
        let _ = tokio::task::spawn_blocking(removing).await;
    }
}

impl BoxRuntime {
    /// Starts a box again that an earlier process was starting, or keeps it as failed.
    pub(crate) async fn adopt_unstarted(
        &self,
        id: Uuid,
        record: PersistedBox,
        start: PersistedStart,
    ) {
        let PersistedStart {
            mut attempts,
            failed,
        } = start;
        let entry = self.adopted_entry(record, "").await;
        let since = failed.is_some().then(|| entry.status().since);
        let failed = failed.or_else(|| {
            let too_many = attempts >= MAX_ATTEMPTS;
            too_many.then(|| format!("the server ended {attempts} times while it started the box"))
        });
        let (begin, message) = if let Some(reason) = failed {
            entry.set_not_started(reason);
            let mut status = entry.status();
            status.since = since.unwrap_or(status.since);
            (ActorStart::Failed, "it has not started")
        } else {
            attempts += 1;
            let requests = vec![again(&entry)];
            (ActorStart::Requests(requests), "it starts again")
        };
        let place = self.shared().records.place(id);
        // A start that ends this process counts.
        entry.set_unstarted(place, attempts);
        let _ = entry.wait_persisted().await;
        if self.register(&entry, begin).await.is_ok() {
            self.shared().events.record(&entry, "adopted", message);
        } else {
            entry.remove_unstarted_record().await;
        }
    }
}

/// Returns the request to start a box again. No caller waits for the reply.
fn again(entry: &BoxEntry) -> Request {
    let mut spec = entry.spec.clone();
    // The host name of the box.
    spec.name.clone_from(&entry.status().name);
    let (reply, _) = oneshot::channel();
    Request::Create(Box::new(Create {
        caller: Caller::named(&entry.owner),
        max_boxes: None,
        spec,
        must_be_new: false,
        keep_failed: true,
        origin: None,
        reply,
    }))
}
