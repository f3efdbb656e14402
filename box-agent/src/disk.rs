//! `agent.disk`: disk usage of the box's private files.

use std::sync::Arc;

use box_protocol::BoxError;
use box_protocol::actions::{AgentDisk, AgentDiskResult};
use box_rpc::{Call, Empty, Handle, Router};

/// A directory of the file system that holds all private files.
///
/// It is a mount, so the guest cannot replace it.
const PRIVATE_DIR: &str = "/tmp";

/// The router of `agent.disk`.
pub(crate) fn router() -> Router {
    Router::builder(Arc::new(Handlers))
        .on::<AgentDisk>()
        .build()
}

struct Handlers;

impl Handle<AgentDisk> for Handlers {
    async fn handle(&self, _: Empty, _: Call<AgentDisk>) -> Result<AgentDiskResult, BoxError> {
        let stat = rustix::fs::statvfs(PRIVATE_DIR);
        let stat =
            stat.map_err(|_| BoxError::internal("disk usage of the private files cannot be read"))?;
        let used = stat.f_blocks.saturating_sub(stat.f_bfree);
        Ok(AgentDiskResult {
            private_bytes: used.saturating_mul(stat.f_frsize),
        })
    }
}
