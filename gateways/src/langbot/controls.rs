//! Control requests, which have the same requirements as LangBot's actions.

use std::sync::{Arc, PoisonError};

use box_protocol::BoxError;
use box_rpc::ControlPolicy;
use box_rpc::codec::Control;

use super::Installation;
use super::actions::Connection;
use super::context::{self, Placement};
use super::view::WITHOUT_CONTEXT;

impl ControlPolicy for Connection {
    fn check(&self, control: &Control<'_>, context: Option<&str>) -> Result<(), BoxError> {
        match control {
            // These requests need no workspace.
            Control::Ping | Control::Pong | Control::Bye { .. } | Control::Other { .. } => {
                context::check_instance(context, &self.installation.instance)
            }
            Control::Cancel { .. } | Control::Grant { .. } | Control::Invalid(_) => {
                let placement = context::placement(context, &self.installation.instance)?;
                self.installation.record_placement(placement)
            }
        }
    }

    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool {
        let placement_of = |context| context::placement(context, &self.installation.instance).ok();
        // An action that needs no workspace belongs to none.
        !WITHOUT_CONTEXT.contains(&action)
            && placement_of(context).is_some_and(|one| Some(one) == placement_of(of))
    }

    fn other(&self, _: &str, chunk: &str) -> Result<(), BoxError> {
        let limit = self.installation.config().limits.max_rpc_file_bytes;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.add(chunk, limit)
    }
}

impl Installation {
    /// Records a placement, as a call of it would.
    fn record_placement(self: &Arc<Self>, placement: Placement) -> Result<(), BoxError> {
        // A workspace without previous calls has nothing to end.
        if !self.fence.knows(&placement.workspace) {
            return Ok(());
        }
        let limit = self.config().limits.max_admission_records;
        let lease = self.fence.observe(&placement, 0, limit)?;
        let installation = Arc::clone(self);
        if !lease.is_cleared() {
            tokio::spawn(async move {
                lease
                    .cleared_by(|| installation.clear_older(&placement))
                    .await;
            });
        }
        Ok(())
    }
}
