//! The ends of commands, told to the runtime as they come, whether anybody reads those commands or not.

use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::BoxError;
use box_protocol::actions::{AgentCommand, AgentEnds};
use box_rpc::{Call, Empty, Handle, Router};
use tokio::sync::mpsc;

use crate::agent::Agent;

/// Ends that may wait to be told. Beyond, a runtime that does not listen misses them.
const WAITING: usize = 1024;

/// Whom ends are told: the runtime that asked last.
#[derive(Debug, Default)]
pub(crate) struct Ends(Mutex<Option<mpsc::Sender<AgentCommand>>>);

impl Ends {
    /// A command has ended.
    pub(crate) fn tell(&self, told: AgentCommand) {
        let listener = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = &*listener {
            // One that does not take them, or is gone, has missed this one.
            let _ = listener.try_send(told);
        }
    }

    fn listen(&self) -> mpsc::Receiver<AgentCommand> {
        let (sender, ends) = mpsc::channel(WAITING);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        ends
    }
}

/// What the agent serves for that.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Served(Arc::clone(agent))))
        .on::<AgentEnds>()
        .build()
}

struct Served(Arc<Agent>);

impl Handle<AgentEnds> for Served {
    async fn handle(&self, _: Empty, mut call: Call<AgentEnds>) -> Result<Empty, BoxError> {
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation("ends only come in chunks"));
        };
        let mut ends = self.0.ends().listen();
        while let Some(told) = ends.recv().await {
            sink.send(&told).await?;
        }
        Ok(Empty {})
    }
}
