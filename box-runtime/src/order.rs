//! The order of calls that name the same thing in a box: they are handed to its agent as they came, however long each was
//! looked for, and waited for, before.

use std::sync::Arc;

use box_protocol::BoxId;
use box_protocol::actions::{OrderKey, Ordered};
use box_rpc::{Turn, Turns};

use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Something in a box of one caller.
type Key = (Arc<str>, BoxId, OrderKey);

/// The turns of all boxes.
pub(crate) type Orders = Turns<Key>;

/// The place of one call. It ends when the call is on its way to the agent.
#[derive(Debug)]
pub struct Queued(Option<Turn<Key>>);

impl Queued {
    /// No place among others: the call has an order of its own.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Returns once the calls before it are on their way.
    pub(crate) async fn comes(&self) {
        if let Some(turn) = &self.0 {
            turn.comes().await;
        }
    }
}

impl BoxRuntime {
    /// The place of a call. To be taken before anything is waited for: calls are first polled in the order in which they
    /// were sent.
    pub(crate) fn order(&self, caller: &Caller, id: &BoxId, params: &impl Ordered) -> Queued {
        let names = params.order_keys();
        if names.is_empty() {
            return Queued(None);
        }
        let keys = names.into_iter();
        let keys = keys.map(|named| (caller.name(), id.clone(), named));
        Queued(Some(self.shared().orders.take(keys)))
    }
}
