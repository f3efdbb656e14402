//! `agent.clear`: ends everything in a stopped box except the agent.
//!
//! The agent keeps the files of the box.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::actions::AgentClear;
use box_rpc::{Call, Empty, Handle, Router};

use crate::agent::Agent;

/// Pause between two rounds of killing.
const ROUND_PAUSE: Duration = Duration::from_millis(2);

/// The router of `agent.clear`.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Handlers(Arc::clone(agent))))
        .on::<AgentClear>()
        .build()
}

struct Handlers(Arc<Agent>);

impl Handle<AgentClear> for Handlers {
    async fn handle(&self, _: Empty, _: Call<AgentClear>) -> Result<Empty, BoxError> {
        let agent = &self.0;
        loop {
            // First, so that commands that end now report the box as their reason.
            let open = agent.end_all();
            for shell in agent.shells().take_all() {
                let agent = Arc::clone(agent);
                tokio::spawn(async move { shell.end(&agent).await });
            }
            let is_empty = agent.init().kill_all();
            if is_empty && open == 0 {
                return Ok(Empty {});
            }
            tokio::time::sleep(ROUND_PAUSE).await;
        }
    }
}
