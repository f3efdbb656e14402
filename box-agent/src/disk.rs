//! What the files take that only the box has.

use std::sync::Arc;

use box_protocol::BoxError;
use box_protocol::actions::{AgentDisk, AgentDiskResult};
use box_rpc::{Call, Empty, Handle, Router};

/// A place of the one file system that holds all of them. Nobody in the box can put another there: it is a mount.
const PRIVATE: &str = "/tmp";

/// What the agent serves for that.
pub(crate) fn router() -> Router {
    Router::builder(Arc::new(Served)).on::<AgentDisk>().build()
}

struct Served;

impl Handle<AgentDisk> for Served {
    async fn handle(&self, _: Empty, _: Call<AgentDisk>) -> Result<AgentDiskResult, BoxError> {
        let told = rustix::fs::statvfs(PRIVATE);
        let told = told.map_err(|_| BoxError::internal("the private files cannot be counted"))?;
        let used = told.f_blocks.saturating_sub(told.f_bfree);
        Ok(AgentDiskResult {
            private_bytes: used.saturating_mul(told.f_frsize),
        })
    }
}
