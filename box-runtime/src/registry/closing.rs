//! Shutdowns in progress, with their callers, remaining boxes and deadlines.

use box_protocol::BoxError;
use box_protocol::actions::SystemShutdownResult;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::caller::Rights as _;
use box_rpc::Caller;

type Reply = oneshot::Sender<Result<SystemShutdownResult, BoxError>>;

/// All shutdowns in progress. Each covers the owners visible to its caller.
#[derive(Default)]
pub(super) struct Closings(Vec<Closing>);

struct Closing {
    caller: Caller,
    until: Instant,
    left: usize,
    ended: u64,
    reply: Reply,
}

/// How a box ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Orderly,
    GivenUp,
}

impl Closings {
    /// Begins a shutdown of `left` boxes. A shutdown of none is finished at once.
    pub(super) fn begin(&mut self, caller: Caller, left: usize, until: Instant, reply: Reply) {
        self.0.push(Closing {
            caller,
            until,
            left,
            ended: 0,
            reply,
        });
        self.answer_finished();
    }

    /// Returns whether a shutdown covers this owner, who then gets no new boxes.
    pub(super) fn cover(&self, owner: &str) -> bool {
        self.0.iter().any(|closing| closing.caller.sees(owner))
    }

    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|closing| closing.until).min()
    }

    /// Returns the callers of the overdue shutdowns.
    pub(super) fn overdue(&self, now: Instant) -> Vec<Caller> {
        let overdue = self.0.iter().filter(|closing| closing.until <= now);
        overdue.map(|closing| closing.caller.clone()).collect()
    }

    /// Counts a box of this owner that has ended.
    pub(super) fn gone(&mut self, owner: &str, end: End) {
        for closing in &mut self.0 {
            if closing.caller.sees(owner) {
                closing.left = closing.left.saturating_sub(1);
                closing.ended += u64::from(end == End::Orderly);
            }
        }
    }

    /// Answers the shutdowns without remaining boxes.
    pub(super) fn answer_finished(&mut self) {
        for at in (0..self.0.len()).rev() {
            if self.0[at].left == 0 {
                let Closing { reply, ended, .. } = self.0.swap_remove(at);
                let _ = reply.send(Ok(SystemShutdownResult { ended }));
            }
        }
    }
}
