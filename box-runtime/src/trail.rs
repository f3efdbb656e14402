//! The trail of commands, for whoever keeps the log: a line when one is started and a line when it has ended, whether anybody
//! reads it or not. No texts, no values of variables.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use box_protocol::actions::{AgentCommand, AgentEnds, AgentStartParams};
use box_rpc::{Chunks, Empty, Peer};
use futures::StreamExt as _;

use crate::card::Card;
use crate::door::Inside;

/// What is heard of the commands of one box, as long as its agent lives.
#[derive(Clone, Default)]
pub(crate) struct Trail(Arc<Heard>);

#[derive(Default)]
struct Heard {
    listening: AtomicBool,
    /// Commands that were asked for and whose end was not heard. An agent cannot tell of more ends than there are.
    open: AtomicU64,
}

impl Trail {
    /// Listens to the ends of as many commands that an earlier runtime has started.
    pub(crate) async fn resume(&self, running: u64, agent: &Peer, card: &Arc<Card>) {
        if !self.0.listening.load(Ordering::Relaxed) {
            self.0.open.fetch_add(running, Ordering::Relaxed);
            self.listen(agent, card).await;
        }
    }

    /// Asks the agent for ends, once. When this returns the agent has been asked, so that no later end is missed.
    async fn listen(&self, agent: &Peer, card: &Arc<Card>) {
        if self.0.listening.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Ok(ends) = agent.stream::<AgentEnds>(&Empty {}).await {
            tokio::spawn(hear(self.clone(), ends, Arc::clone(card)));
        }
    }

    /// Whether one more end can be.
    fn takes(&self) -> bool {
        let less = |open: u64| open.checked_sub(1);
        let open = &self.0.open;
        open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

async fn hear(trail: Trail, mut ends: Chunks<AgentEnds>, card: Arc<Card>) {
    while let Some(Ok(told)) = ends.next().await {
        if trail.takes() {
            finished(&card, &told);
        }
    }
    let left = trail.0.open.load(Ordering::Relaxed);
    if left > 0 {
        tracing::info!(
            target: "box_runtime::audit",
            owner = &*card.owner,
            session_id = card.spec.session_id.as_str(),
            commands = left,
            "ended with their box, or unheard"
        );
    }
}

fn finished(card: &Card, told: &AgentCommand) {
    let exit = told.exit.as_ref();
    tracing::info!(
        target: "box_runtime::audit",
        owner = &*card.owner,
        session_id = card.spec.session_id.as_str(),
        command_id = told.command_id.as_str(),
        why = exit.map(|exit| tracing::field::debug(exit.why)),
        exit_code = exit.and_then(|exit| exit.code),
        signal = exit.and_then(|exit| exit.signal),
        duration_ms = told.duration_ms,
        stdout_bytes = told.size.stdout,
        stderr_bytes = told.size.stderr,
        "finished"
    );
}

impl Inside {
    /// Notes that a command is asked for.
    pub(crate) async fn starts(&self, asked: &AgentStartParams) {
        let card = self.card();
        tracing::info!(
            target: "box_runtime::audit",
            caller = self.caller(),
            owner = &*card.owner,
            session_id = card.spec.session_id.as_str(),
            command_id = asked.command_id.as_str(),
            role = ?asked.role,
            "started"
        );
        let trail = self.trail();
        trail.0.open.fetch_add(1, Ordering::Relaxed);
        trail.listen(&self.agent, card).await;
    }
}
