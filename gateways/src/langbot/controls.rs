//! Control requests, which have the same requirements as LangBot's actions.

use std::sync::{Arc, PoisonError};

use box_protocol::BoxError;
use box_rpc::ControlPolicy;
use box_rpc::codec::Control;

use super::Host;
use super::actions::Connection;
use super::context::{self, Placement};
use super::view::WITHOUT_CONTEXT;

impl ControlPolicy for Connection {
    fn check(&self, control: &Control<'_>, context: Option<&str>) -> Result<(), BoxError> {
        match control {
            // These requests need no workspace.
            Control::Ping | Control::Pong | Control::Bye { .. } | Control::Other { .. } => {
                context::check_instance(context, &self.host.instance)
            }
            Control::Cancel { .. } | Control::Grant { .. } | Control::Invalid(_) => {
                let placement = context::placement(context, &self.host.instance)?;
                self.host.note(placement)
            }
        }
    }

    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool {
        let whose = |context| context::placement(context, &self.host.instance).ok();
        // An action that needs no workspace belongs to none.
        !WITHOUT_CONTEXT.contains(&action)
            && whose(context).is_some_and(|one| Some(one) == whose(of))
    }

    fn other(&self, _: &str, piece: &str) -> Result<(), BoxError> {
        let most = self.host.config().limits.max_rpc_file_bytes;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.add(piece, most)
    }
}

impl Host {
    /// Records a placement, as a call of it would.
    fn note(self: &Arc<Self>, placement: Placement) -> Result<(), BoxError> {
        // A workspace without previous calls has nothing to end.
        if !self.fence.knows(&placement.workspace) {
            return Ok(());
        }
        let most = self.config().limits.max_admission_records;
        let lease = self.fence.observe(&placement, 0, most)?;
        let host = Arc::clone(self);
        if !lease.is_cleared() {
            tokio::spawn(async move { lease.cleared_by(|| host.clear_older(&placement)).await });
        }
        Ok(())
    }
}
