//! A box that is stopped: everything in it ends but the agent, which is what keeps its files.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::actions::AgentClear;
use box_rpc::{Call, Empty, Handle, Router};

use crate::agent::Agent;

/// How long what was killed is given before it is looked for again.
const AGAIN: Duration = Duration::from_millis(2);

/// What the agent serves for that.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Served(Arc::clone(agent))))
        .on::<AgentClear>()
        .build()
}

struct Served(Arc<Agent>);

impl Handle<AgentClear> for Served {
    async fn handle(&self, _: Empty, _: Call<AgentClear>) -> Result<Empty, BoxError> {
        let agent = &self.0;
        loop {
            // First, so that what ends now is known to end with the box.
            let left = agent.end_all();
            for shell in agent.shells().take_all() {
                let agent = Arc::clone(agent);
                tokio::spawn(async move { shell.end(&agent).await });
            }
            let nothing = agent.init().kill_all();
            if nothing && left == 0 {
                return Ok(Empty {});
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}
