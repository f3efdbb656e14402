//! `box.rollback`: return to a checkpoint.

use box_protocol::actions::BoxRollbackParams;
use box_protocol::{BoxError, BoxInfo};
use box_rpc::Caller;

use crate::box_actor::{Request, Rollback};
use crate::runtime::BoxRuntime;

impl BoxRuntime {
    /// Replaces the private files of a box by those of a checkpoint.
    ///
    /// All processes end, after the execs that arrived earlier. A box that was not stopped starts
    /// again.
    pub async fn rollback(
        &self,
        caller: &Caller,
        params: BoxRollbackParams,
    ) -> Result<BoxInfo, BoxError> {
        let rollback = |reply| Rollback {
            caller: caller.clone(),
            box_id: params.box_id,
            name: params.name,
            reply,
        };
        self.request(|reply| Request::Rollback(Box::new(rollback(reply))))
            .await
    }
}
