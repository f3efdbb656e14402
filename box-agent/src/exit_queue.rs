//! Exits of commands that the runtime has yet to acknowledge.
//!
//! The queue does not depend on readers: a runtime that starts after a crash misses no exit.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{AgentEnd, AgentEnds, AgentEndsParams, AgentEndsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle, Router};
use tokio::sync::Notify;

use crate::agent::{Agent, RUNNING_MAX};
use crate::command::Command;

/// Maximum number of queued exits; beyond it the oldest is dropped.
///
/// More than the commands that can end while no runtime is connected to start others.
const QUEUE_MAX: usize = 2 * RUNNING_MAX;

/// Exits in one reply.
const BATCH: usize = 64;

/// The queue of unacknowledged exits.
#[derive(Debug, Default)]
pub(crate) struct ExitQueue {
    queued: Mutex<Queued>,
    more: Notify,
}

#[derive(Debug, Default)]
struct Queued {
    /// The number of the oldest exit.
    first: u64,
    ends: VecDeque<AgentEnd>,
}

impl ExitQueue {
    /// Queues the exit of a command.
    pub(crate) fn push(&self, command: &Command) {
        let Some(summary) = command.end_summary() else {
            return;
        };
        let Some(exit) = summary.exit else {
            return;
        };
        let mut queued = self.queued();
        if queued.ends.len() == QUEUE_MAX {
            queued.drop_oldest();
        }
        queued.ends.push_back(AgentEnd {
            command_id: summary.command_id,
            role: command.role,
            exit,
            at: UnixMs::now(),
            duration_ms: summary.duration_ms,
            size: summary.size,
        });
        drop(queued);
        self.more.notify_waiters();
    }

    /// The number of queued exits.
    pub(crate) fn count(&self) -> u64 {
        self.queued().ends.len() as u64
    }

    /// Waits for exits from this number on. Earlier ones are acknowledged and removed.
    async fn wait_from(&self, acknowledged: u64) -> AgentEndsResult {
        loop {
            let more = self.more.notified();
            {
                let mut queued = self.queued();
                while queued.first < acknowledged && !queued.ends.is_empty() {
                    queued.drop_oldest();
                }
                if !queued.ends.is_empty() {
                    return AgentEndsResult {
                        first: queued.first,
                        ends: queued.ends.iter().take(BATCH).cloned().collect(),
                    };
                }
            }
            more.await;
        }
    }

    fn queued(&self) -> MutexGuard<'_, Queued> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queued {
    fn drop_oldest(&mut self) {
        if self.ends.pop_front().is_some() {
            self.first += 1;
        }
    }
}

/// The router of `agent.ends`.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Handlers(Arc::clone(agent))))
        .on::<AgentEnds>()
        .build()
}

struct Handlers(Arc<Agent>);

impl Handle<AgentEnds> for Handlers {
    async fn handle(
        &self,
        params: AgentEndsParams,
        _: Call<AgentEnds>,
    ) -> Result<AgentEndsResult, BoxError> {
        Ok(self.0.exit_queue().wait_from(params.acknowledged).await)
    }
}
