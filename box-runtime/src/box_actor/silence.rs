//! Times in which the agent of a box does not answer, because the box is frozen.

use std::sync::Arc;

use box_protocol::BoxState;
use box_rpc::Peer;

use super::entry::BoxEntry;

/// A copy of the files of a box, during which the box is frozen.
pub(crate) struct Silence {
    entry: Arc<BoxEntry>,
    peer: Option<Peer>,
}

impl BoxEntry {
    /// Begins a time in which the agent does not answer.
    pub(crate) fn expect_silence(self: &Arc<Self>, peer: Option<Peer>) -> Silence {
        self.copies.modify(|copies| *copies += 1);
        if let Some(peer) = &peer {
            peer.expect_silence(true);
        }
        Silence {
            entry: Arc::clone(self),
            peer,
        }
    }

    /// Returns whether the runtime copies the files of the box.
    pub(crate) fn is_copied(&self) -> bool {
        *self.copies.read() > 0
    }

    /// Returns whether the processes of the box are frozen.
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_copied() || self.status().state == BoxState::Paused
    }

    /// Waits until the runtime does not copy the files of the box.
    pub(crate) async fn wait_copied(&self) {
        self.copies
            .wait_for(|copies| (*copies == 0).then_some(()))
            .await;
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        self.entry
            .copies
            .modify(|copies| *copies = copies.saturating_sub(1));
        if let Some(peer) = &self.peer {
            peer.expect_silence(self.entry.is_frozen());
        }
    }
}
