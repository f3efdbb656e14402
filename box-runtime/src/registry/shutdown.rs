//! Shutdowns in progress, with their callers, remaining boxes and deadlines.

use box_protocol::BoxError;
use box_protocol::actions::SystemShutdownResult;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::caller::Visibility as _;
use box_rpc::Caller;

type Reply = oneshot::Sender<Result<SystemShutdownResult, BoxError>>;

/// All shutdowns in progress. Each covers the owners visible to its caller.
#[derive(Default)]
pub(super) struct Shutdowns(Vec<Shutdown>);

struct Shutdown {
    caller: Caller,
    until: Instant,
    left: usize,
    ended: u64,
    reply: Reply,
}

/// What became of a box during a shutdown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BoxOutcome {
    /// The box has ended.
    Ended,
    /// The deadline passed while the box was still ending.
    Abandoned,
}

impl Shutdowns {
    /// Begins a shutdown of `left` boxes. A shutdown of none is finished at once.
    pub(super) fn begin(&mut self, caller: Caller, left: usize, until: Instant, reply: Reply) {
        self.0.push(Shutdown {
            caller,
            until,
            left,
            ended: 0,
            reply,
        });
        self.answer_finished();
    }

    /// Returns whether a shutdown covers this owner, who then gets no new boxes.
    pub(super) fn covers(&self, owner: &str) -> bool {
        self.0.iter().any(|shutdown| shutdown.caller.can_see(owner))
    }

    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|shutdown| shutdown.until).min()
    }

    /// Returns the callers of the overdue shutdowns.
    pub(super) fn overdue(&self, now: Instant) -> Vec<Caller> {
        let overdue = self.0.iter().filter(|shutdown| shutdown.until <= now);
        overdue.map(|shutdown| shutdown.caller.clone()).collect()
    }

    /// Counts a box of this owner that has ended.
    pub(super) fn count_box(&mut self, owner: &str, outcome: BoxOutcome) {
        for shutdown in &mut self.0 {
            if shutdown.caller.can_see(owner) {
                shutdown.left = shutdown.left.saturating_sub(1);
                shutdown.ended += u64::from(outcome == BoxOutcome::Ended);
            }
        }
    }

    /// Answers the shutdowns without remaining boxes.
    pub(super) fn answer_finished(&mut self) {
        for at in (0..self.0.len()).rev() {
            if self.0[at].left == 0 {
                let Shutdown { reply, ended, .. } = self.0.swap_remove(at);
                let _ = reply.send(Ok(SystemShutdownResult { ended }));
            }
        }
    }
}
