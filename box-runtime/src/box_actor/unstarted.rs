//! Boxes created with `keep_failed` that have not started.
//!
//! # Steps
//! 1. The registry gives the entry of such a box a place for its record.
//! 2. The runtime writes the record (`persist.rs`) before it shows the box to a caller, so that a
//!    box that a caller has seen survives a crash, and when the box fails. A box that starts before
//!    that never has this record.
//! 3. After the start, the backend has a record, and the runtime removes this one. After a failed
//!    start, this one has the reason, until the runtime removes the entry.
//! 4. The next process starts the box again, or keeps it as failed. It has no decision of the
//!    policy about mounts, so a box with directories of the host fails.

use std::sync::Arc;

use box_protocol::{BoxError, BoxState};
use box_rpc::Caller;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::ActorStart;
use super::entry::{BoxEntry, BoxStatus, PersistedBox};
use super::mounts::mounted;
use super::request::{Create, Request};
use crate::records::{BoxRecords, RecordPlace};
use crate::runtime::BoxRuntime;

/// Number of processes that may end while they start the same box.
///
/// The start itself may crash the server.
const MAX_ATTEMPTS: u32 = 3;

/// What the next process needs to start a box again.
#[derive(Debug)]
pub(crate) struct Unstarted {
    place: RecordPlace,
    /// Whether the record is on disk, or must be.
    is_persistent: bool,
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
        let persistent = unstarted.filter(|unstarted| unstarted.is_persistent);
        persistent.map(|unstarted| &unstarted.place)
    }

    /// Makes the record of a box obsolete that has started or ended.
    pub(super) fn end_unstarted(&mut self) {
        let unstarted = self.unstarted.take();
        let persistent = unstarted.filter(|unstarted| unstarted.is_persistent);
        let place = persistent.map(|unstarted| unstarted.place);
        self.obsolete_records.extend(place);
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
    /// Gives a new box a place for its record.
    pub(crate) fn set_record_place(&self, records: &BoxRecords) {
        self.set_unstarted(records.place(Uuid::now_v7()), 1);
    }

    fn set_unstarted(&self, place: RecordPlace, attempts: u32) {
        self.status().unstarted = Some(Box::new(Unstarted {
            place,
            is_persistent: false,
            attempts,
        }));
    }

    /// Writes the record of a box that has not started, and returns when it is on disk.
    ///
    /// After an error, the box lists its record as degraded.
    pub(crate) async fn persist_unstarted(self: &Arc<Self>) -> Result<(), BoxError> {
        {
            let mut status = self.status();
            let Some(unstarted) = &mut status.unstarted else {
                return Ok(());
            };
            if !std::mem::replace(&mut unstarted.is_persistent, true) {
                // With the lock, so that another caller that finds it set waits for the write.
                self.mark_changed();
            }
        }
        self.wait_persisted().await
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
        let failed = failed.or_else(|| why_not_again(&entry, attempts));
        let (mut begin, mut message) = if let Some(reason) = failed {
            entry.set_not_started(reason);
            let mut status = entry.status();
            status.since = since.unwrap_or(status.since);
            // As after a failed start, other boxes may use the items.
            status.uses.clear();
            (ActorStart::Failed, "it has not started")
        } else {
            attempts += 1;
            let requests = vec![again(&entry)];
            (ActorStart::Requests(requests), "it starts again")
        };
        let place = self.shared().records.place(id);
        entry.set_unstarted(place, attempts);
        // This counts the attempt before it begins, because the start may crash the server.
        if let Err(error) = entry.persist_unstarted().await
            && matches!(begin, ActorStart::Requests(_))
        {
            entry.set_not_started(error.message().to_owned());
            (begin, message) = (ActorStart::Failed, "it has not started");
        }
        if self.register(&entry, begin).await.is_ok() {
            self.shared().events.record(&entry, "adopted", message);
        } else {
            entry.status().end_unstarted();
            entry.remove_obsolete_records().await;
        }
    }
}

/// Returns why this process does not start a box again, if it does not.
fn why_not_again(entry: &BoxEntry, attempts: u32) -> Option<String> {
    if attempts >= MAX_ATTEMPTS {
        return Some(format!(
            "the server ended {attempts} times while it started the box"
        ));
    }
    let spec = &entry.spec;
    let has_mounts = spec.host_path.is_some() || mounted(&spec.extra_mounts).next().is_some();
    has_mounts.then(|| {
        let why = "the server ended while it started the box with directories of the host";
        format!("{why}; delete it and create it again")
    })
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
