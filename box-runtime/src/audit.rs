//! The audit log of commands.
//!
//! The runtime logs the start and the end of every command, with or without a reader. It also logs
//! commands that ended while no server was running. The log contains no command texts and no values
//! of environment variables.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
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
const MAX_EARLIER: u64 = 4096;

/// Pause after an agent has reported more exits than the runtime expects.
const EXCESS_PAUSE: Duration = Duration::from_secs(1);

/// The audit of one box's commands, for the lifetime of its agent.
#[derive(Clone, Default)]
pub(crate) struct Audit(Arc<ExitTracker>);

#[derive(Default)]
struct ExitTracker {
    listening: AtomicBool,
    /// Commands without a reported exit. The agent cannot report more exits.
    open: AtomicU64,
    /// The entry that the box has moved to, if it was taken from a pool.
    moved_to: Mutex<Weak<BoxEntry>>,
}

/// The commands of an earlier runtime that an adopted agent can report.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Earlier {
    open: u64,
    unreported: u64,
}

impl Earlier {
    pub(crate) fn of(health: &AgentHealthResult) -> Self {
        // Agents of older versions count only running commands.
        let open = health.open.max(health.running.len() as u64);
        Self {
            open: open.min(MAX_EARLIER),
            unreported: health.unacknowledged.min(MAX_EARLIER),
        }
    }
}

impl Audit {
    /// Receives the exits of commands that an earlier runtime has started.
    pub(crate) fn resume(&self, earlier: Earlier, agent: &Peer, entry: &Arc<BoxEntry>) {
        let Earlier { open, unreported } = earlier;
        if open + unreported > 0 && !self.0.listening.load(Ordering::Relaxed) {
            self.0.open.fetch_add(open + unreported, Ordering::Relaxed);
            self.listen(unreported, agent, entry);
        }
    }

    /// Logs that a box of a pool now belongs to a request, as do its later exits.
    pub(crate) fn taken(&self, from: &BoxEntry, entry: &Arc<BoxEntry>) {
        *self.moved_to() = Arc::downgrade(entry);
        tracing::info!(
            target: "box_runtime::audit",
            owner = &*entry.owner,
            box_id = entry.spec.box_id.as_str(),
            waited_as = from.spec.box_id.as_str(),
            "taken from a pool"
        );
    }

    /// Only assignments run under this lock.
    fn moved_to(&self) -> MutexGuard<'_, Weak<BoxEntry>> {
        let moved_to = self.0.moved_to.lock();
        moved_to.unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs that a caller asked for a command.
    pub(crate) fn started(
        &self,
        caller: &str,
        agent_params: &AgentStartParams,
        agent: &Peer,
        entry: &Arc<BoxEntry>,
    ) {
        tracing::info!(
            target: "box_runtime::audit",
            caller,
            owner = &*entry.owner,
            box_id = entry.spec.box_id.as_str(),
            command_id = agent_params.command_id.as_str(),
            role = ?agent_params.role,
            "started"
        );
        self.expect(agent, entry);
    }

    /// Logs that the agent refused a command, or already had one with this id.
    pub(crate) fn not_started(&self, id: &CommandId, why: Option<&BoxError>, entry: &BoxEntry) {
        self.take_expected();
        tracing::info!(
            target: "box_runtime::audit",
            owner = &*entry.owner,
            box_id = entry.spec.box_id.as_str(),
            command_id = id.as_str(),
            code = why.map(|why| why.code().as_str()),
            "{}", if why.is_some() { "not started" } else { "already exists" }
        );
    }

    /// Expects the exit of one more command.
    pub(crate) fn expect(&self, agent: &Peer, entry: &Arc<BoxEntry>) {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        self.listen(0, agent, entry);
    }

    fn listen(&self, unreported: u64, agent: &Peer, entry: &Arc<BoxEntry>) {
        if !self.0.listening.swap(true, Ordering::Relaxed) {
            let (agent, entry) = (agent.clone(), Arc::clone(entry));
            tokio::spawn(receive_exits(self.clone(), unreported, agent, entry));
        }
    }

    /// Takes one expected exit. Returns false if none is left.
    fn take_expected(&self) -> bool {
        let less = |open: u64| open.checked_sub(1);
        let open = &self.0.open;
        open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

/// Receives exits from the agent and writes them to the audit log.
///
/// The first `unreported` exits happened before this runtime connected to the agent. Each call
/// acknowledges the exits that are logged, so that the agent does not send them again. If this
/// process is killed in between, the next process logs them again.
async fn receive_exits(audit: Audit, mut unreported: u64, agent: Peer, mut entry: Arc<BoxEntry>) {
    let mut params = AgentEndsParams::default();
    let mut has_answer = false;
    while let Ok(answer) = agent.call::<AgentEnds>(&params).await {
        let moved_to = audit.moved_to().upgrade();
        entry = moved_to.unwrap_or(entry);
        let next = answer.first.checked_add(answer.ends.len() as u64);
        let next = next.filter(|next| *next > params.acknowledged && !answer.ends.is_empty());
        let Some(next) = next else {
            let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
            tracing::warn!(target: "box_runtime", %owner, %box_id, "agent reported the same exits twice");
            break;
        };
        if has_answer && answer.first > params.acknowledged {
            log_unobserved(&entry, answer.first - params.acknowledged);
        }
        has_answer = true;
        let mut expected = true;
        for end in &answer.ends {
            expected &= audit.take_expected();
            if !expected {
                break;
            }
            log_finished(&entry, end, unreported > 0);
            unreported = unreported.saturating_sub(1);
        }
        params.acknowledged = next;
        if !expected {
            tokio::time::sleep(EXCESS_PAUSE).await;
        }
    }
    let left = audit.0.open.load(Ordering::Relaxed);
    if left > 0 {
        log_unobserved(&entry, left);
    }
}

fn log_unobserved(entry: &BoxEntry, commands: u64) {
    tracing::info!(
        target: "box_runtime::audit",
        owner = &*entry.owner,
        box_id = entry.spec.box_id.as_str(),
        commands,
        "exit not observed"
    );
}

fn log_finished(entry: &BoxEntry, end: &AgentEnd, adopted: bool) {
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
