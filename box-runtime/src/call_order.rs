//! Keeps calls in order that name the same object in a box.
//!
//! The agent receives these calls in the order of their arrival. The time that each call waits
//! before that does not change the order.

use std::sync::Arc;

use box_protocol::BoxId;
use box_protocol::actions::{OrderKey, Ordered};
use box_rpc::{Turn, Turns};

use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// An object in a box of one caller.
type Key = (Arc<str>, BoxId, OrderKey);

/// The turns of all boxes.
pub(crate) type CallOrders = Turns<Key>;

/// The position of one call in the order.
///
/// It ends when the call is sent to the agent.
#[derive(Debug)]
pub struct OrderTicket(Option<Turn<Key>>);

impl OrderTicket {
    /// A call without an order relative to others.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Waits until the earlier calls are sent.
    pub(crate) async fn wait_turn(&self) {
        if let Some(turn) = &self.0 {
            turn.wait().await;
        }
    }
}

impl BoxRuntime {
    /// Takes the ticket of a call.
    ///
    /// The call must do this before its first await, because calls are first polled in the order in
    /// which they were sent.
    pub(crate) fn order_ticket(
        &self,
        caller: &Caller,
        id: &BoxId,
        params: &impl Ordered,
    ) -> OrderTicket {
        let names = params.order_keys();
        if names.is_empty() {
            return OrderTicket(None);
        }
        let keys = names.into_iter();
        let keys = keys.map(|named| (caller.name(), id.clone(), named));
        OrderTicket(Some(self.shared().orders.take(keys)))
    }
}
