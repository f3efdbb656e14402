//! The audit log of commands.
//!
//! The runtime logs the start and the end of every command, with or without a reader. It also logs
//! commands that ended while no server was running. The log contains no command texts and no values
//! of environment variables.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use box_protocol::actions::{
    AgentEnd, AgentEnds, AgentEndsParams, AgentHealthResult, AgentStartParams,
};
use box_protocol::{BoxError, CommandId};
use box_rpc::Peer;

use crate::box_actor::entry::BoxEntry;

/// Maximum number of earlier exits that an adopted agent may report.
///
/// An agent stores fewer than that.
const EARLIER_MAX: u64 = 4096;

/// Pause after an agent has reported more exits than the runtime expects.
const REBUKE: Duration = Duration::from_secs(1);

/// The audit of one box's commands, for the lifetime of its agent.
#[derive(Clone, Default)]
pub(crate) struct Audit(Arc<Heard>);

#[derive(Default)]
struct Heard {
    listening: AtomicBool,
    /// Commands without a reported exit. The agent cannot report more exits.
    open: AtomicU64,
}

/// The commands of an earlier runtime that an adopted agent can report.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Earlier {
    open: u64,
    unheard: u64,
}

impl Earlier {
    pub(crate) fn of(health: &AgentHealthResult) -> Self {
        // Agents of older versions count only running commands.
        let open = health.open.max(health.running.len() as u64);
        Self {
            open: open.min(EARLIER_MAX),
            unheard: health.unheard.min(EARLIER_MAX),
        }
    }
}

impl Audit {
    /// Receives the exits of commands that an earlier runtime has started.
    pub(crate) fn resume(&self, earlier: Earlier, agent: &Peer, entry: &Arc<BoxEntry>) {
        let Earlier { open, unheard } = earlier;
        if open + unheard > 0 && !self.0.listening.load(Ordering::Relaxed) {
            self.0.open.fetch_add(open + unheard, Ordering::Relaxed);
            self.listen(unheard, agent, entry);
        }
    }

    /// Logs that a caller asked for a command.
    pub(crate) fn started(
        &self,
        caller: &str,
        asked: &AgentStartParams,
        agent: &Peer,
        entry: &Arc<BoxEntry>,
    ) {
        tracing::info!(
            target: "box_runtime::audit",
            caller,
            owner = &*entry.owner,
            box_id = entry.spec.box_id.as_str(),
            command_id = asked.command_id.as_str(),
            role = ?asked.role,
            "started"
        );
        self.expect(agent, entry);
    }

    /// Logs that the agent refused a command, or already had one with this id.
    pub(crate) fn not_started(&self, id: &CommandId, why: Option<&BoxError>, entry: &BoxEntry) {
        self.takes();
        tracing::info!(
            target: "box_runtime::audit",
            owner = &*entry.owner,
            box_id = entry.spec.box_id.as_str(),
            command_id = id.as_str(),
            code = why.map(|why| why.code().as_str()),
            "{}", if why.is_some() { "not started" } else { "was there already" }
        );
    }

    /// Expects the exit of one more command.
    pub(crate) fn expect(&self, agent: &Peer, entry: &Arc<BoxEntry>) {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        self.listen(0, agent, entry);
    }

    fn listen(&self, unheard: u64, agent: &Peer, entry: &Arc<BoxEntry>) {
        if !self.0.listening.swap(true, Ordering::Relaxed) {
            let (agent, entry) = (agent.clone(), Arc::clone(entry));
            tokio::spawn(hear(self.clone(), unheard, agent, entry));
        }
    }

    /// Takes one expected exit. Returns false if none is left.
    fn takes(&self) -> bool {
        let less = |open: u64| open.checked_sub(1);
        let open = &self.0.open;
        open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

/// Receives exits from the agent and writes them to the audit log.
///
/// The first `unheard` exits happened before this runtime connected to the agent. Each call
/// acknowledges the exits that are logged, so that the agent does not send them again. If this
/// process is killed in between, the next process logs them again.
async fn hear(audit: Audit, mut unheard: u64, agent: Peer, entry: Arc<BoxEntry>) {
    let mut asked = AgentEndsParams::default();
    let mut met = false;
    while let Ok(told) = agent.call::<AgentEnds>(&asked).await {
        let next = told.first.checked_add(told.ends.len() as u64);
        let next = next.filter(|next| *next > asked.heard && !told.ends.is_empty());
        let Some(next) = next else {
            let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
            tracing::warn!(target: "box_runtime", %owner, %box_id, "the box's agent tells of the same ends twice");
            break;
        };
        if met && told.first > asked.heard {
            lost(&entry, told.first - asked.heard);
        }
        met = true;
        let mut believed = true;
        for end in &told.ends {
            believed &= audit.takes();
            if !believed {
                break;
            }
            finished(&entry, end, unheard > 0);
            unheard = unheard.saturating_sub(1);
        }
        asked.heard = next;
        if !believed {
            tokio::time::sleep(REBUKE).await;
        }
    }
    let left = audit.0.open.load(Ordering::Relaxed);
    if left > 0 {
        lost(&entry, left);
    }
}

fn lost(entry: &BoxEntry, commands: u64) {
    tracing::info!(
        target: "box_runtime::audit",
        owner = &*entry.owner,
        box_id = entry.spec.box_id.as_str(),
        commands,
        "ended with their box, or unheard"
    );
}

fn finished(entry: &BoxEntry, end: &AgentEnd, adopted: bool) {
    tracing::info!(
        target: "box_runtime::audit",
        owner = &*entry.owner,
        box_id = entry.spec.box_id.as_str(),
        command_id = end.command_id.as_str(),
        role = ?end.role,
        why = ?end.exit.why,
        exit_code = end.exit.code,
        signal = end.exit.signal,
        ended_at = end.at.0,
        duration_ms = end.duration_ms,
        stdout_bytes = end.size.stdout,
        stderr_bytes = end.size.stderr,
        adopted = adopted.then_some(true),
        "finished"
    );
}

#[cfg(test)]
mod tests;
