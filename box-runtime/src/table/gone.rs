//! Boxes that have ended, and why, for calls that come later.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use box_protocol::error::{Detail, Ended, Subject};
use box_protocol::{BoxError, SessionId};

use crate::card::Card;

/// Ended boxes that are remembered of each owner. The oldest go first.
const KEPT: usize = 128;

/// The boxes of each owner that have ended lately. Owners are as many as there are tokens.
#[derive(Default)]
pub(super) struct Gone(HashMap<Arc<str>, VecDeque<(SessionId, BoxError)>>);

impl Gone {
    /// A box has ended, for the reason on its card.
    pub(super) fn add(&mut self, card: &Card) {
        self.forget(&card.owner, &card.spec.session_id);
        let Some(why) = card.door.why_shut() else {
            return;
        };
        let of_owner = self.0.entry(Arc::clone(&card.owner)).or_default();
        if of_owner.len() == KEPT {
            of_owner.pop_front();
        }
        of_owner.push_back((card.spec.session_id.clone(), why));
    }

    /// There is a box of this id again.
    pub(super) fn forget(&mut self, owner: &str, id: &SessionId) {
        if let Some(of_owner) = self.0.get_mut(owner) {
            of_owner.retain(|(gone, _)| gone != id);
        }
    }

    /// The error of a call for a box that is not there: with its end, if this owner had one.
    pub(super) fn not_found(&self, owner: &str, id: &SessionId) -> BoxError {
        let message = format!("Box session {id} not found");
        let detail = Detail::about(Subject::Box);
        let mut of_owner = self.0.get(owner).into_iter().flatten();
        let Some((_, why)) = of_owner.find(|(gone, _)| gone == id) else {
            return BoxError::not_found(message).with_detail(&detail);
        };
        let ended = why.detail().and_then(|detail: Detail| detail.ended);
        let detail = Detail {
            expired: true,
            ended,
            ..detail
        };
        if ended == Some(Ended::Deleted) {
            return BoxError::not_found(message).with_detail(&detail);
        }
        let why = why.message();
        let did = why.strip_prefix(&format!("Box session {id} "));
        let message = format!("{message}: it {}", did.unwrap_or(why));
        BoxError::not_found(message).with_detail(&detail)
    }
}
