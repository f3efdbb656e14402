//! Requests about other requests: LangBot's server asks the same of them as of its actions.

use std::sync::Arc;

use box_protocol::BoxError;
use box_protocol::langbot::WITHOUT_CONTEXT;
use box_rpc::Warden;

use super::Host;
use super::actions::Connection;
use super::context::{self, Placement};

/// Those that need no workspace.
const OF_ANYONE: [&str; 2] = ["__ping", "__file_chunk"];

impl Warden for Connection {
    fn check(&self, request: &str, context: Option<&str>) -> Result<(), BoxError> {
        if OF_ANYONE.contains(&request) {
            return context::check_instance(context, &self.host.instance);
        }
        let placement = context::placement(context, &self.host.instance)?;
        self.host.note(placement)
    }

    fn owns(&self, context: Option<&str>, action: &str, of: Option<&str>) -> bool {
        let whose = |context| context::placement(context, &self.host.instance).ok();
        // What needs no workspace belongs to none.
        !WITHOUT_CONTEXT.contains(&action)
            && whose(context).is_some_and(|one| Some(one) == whose(of))
    }

    fn file_bytes(&self) -> usize {
        self.host.config().limits.max_rpc_file_bytes
    }
}

impl Host {
    /// Notes that there is such a placement, as a call of it would.
    fn note(self: &Arc<Self>, placement: Placement) -> Result<(), BoxError> {
        // Of a workspace that has called nothing yet there is nothing to end.
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
