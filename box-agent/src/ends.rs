//! The ends of commands, kept until a runtime has heard of them, whether anybody reads those commands or not: one that is killed
//! and another that comes later miss none.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{AgentEnd, AgentEnds, AgentEndsParams, AgentEndsResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle, Router};
use tokio::sync::Notify;

use crate::agent::{Agent, RUNNING_MAX};
use crate::command::Command;

/// Ends that are kept. More than commands can end while there is no runtime, which could start others; beyond, the oldest goes.
const KEPT: usize = 2 * RUNNING_MAX;

/// Ends that go into one answer.
const TOLD: usize = 64;

/// The ends that nobody has heard of.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    kept: Mutex<Kept>,
    more: Notify,
}

#[derive(Debug, Default)]
struct Kept {
    /// The number of the oldest.
    first: u64,
    ends: VecDeque<AgentEnd>,
}

impl Ends {
    /// A command has ended.
    pub(crate) fn tell(&self, command: &Command) {
        let Some(told) = command.ended() else {
            return;
        };
        let Some(exit) = told.exit else {
            return;
        };
        let mut kept = self.kept();
        if kept.ends.len() == KEPT {
            kept.forget_oldest();
        }
        kept.ends.push_back(AgentEnd {
            command_id: told.command_id,
            role: command.role,
            exit,
            at: UnixMs::now(),
            duration_ms: told.duration_ms,
            size: told.size,
        });
        drop(kept);
        self.more.notify_waiters();
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.kept().ends.len() as u64
    }

    /// Those from this number on, once there are some. The ones before are forgotten.
    async fn from(&self, heard: u64) -> AgentEndsResult {
        loop {
            let more = self.more.notified();
            {
                let mut kept = self.kept();
                while kept.first < heard && !kept.ends.is_empty() {
                    kept.forget_oldest();
                }
                if !kept.ends.is_empty() {
                    return AgentEndsResult {
                        first: kept.first,
                        ends: kept.ends.iter().take(TOLD).cloned().collect(),
                    };
                }
            }
            more.await;
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn forget_oldest(&mut self) {
        if self.ends.pop_front().is_some() {
            self.first += 1;
        }
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
    async fn handle(
        &self,
        params: AgentEndsParams,
        _: Call<AgentEnds>,
    ) -> Result<AgentEndsResult, BoxError> {
        Ok(self.0.ends().from(params.heard).await)
    }
}
