//! The registry's view of one box.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{Request, queue_full};

pub(super) struct Slot {
    pub(super) entry: Arc<BoxEntry>,
    /// The only sender to the box's task. Dropping it ends the box.
    pub(super) mailbox: Option<mpsc::Sender<Request>>,
    /// Calls that arrived after the task had stopped receiving.
    pub(super) waiting: Vec<Request>,
    pub(super) task: AbortHandle,
}

impl Slot {
    /// Passes a call to the task without waiting.
    pub(super) fn give(&mut self, work: Request, limit: usize) {
        let work = match &self.mailbox {
            None => work,
            Some(mailbox) => match mailbox.try_send(work) {
                Ok(()) => return,
                Err(mpsc::error::TrySendError::Full(work)) => {
                    return work.refuse(queue_full(limit));
                }
                Err(mpsc::error::TrySendError::Closed(work)) => work,
            },
        };
        if self.waiting.len() < limit {
            self.waiting.push(work);
        } else {
            work.refuse(queue_full(limit));
        }
    }
}
