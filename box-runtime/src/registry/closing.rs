//! Shutdowns under way: who asked, what is left, until when.

use box_protocol::BoxError;
use box_protocol::actions::SystemShutdownResult;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::caller::Rights as _;
use box_rpc::Caller;

type Reply = oneshot::Sender<Result<SystemShutdownResult, BoxError>>;

/// All shutdowns under way. Each covers the owners its caller sees.
#[derive(Default)]
pub(super) struct Closings(Vec<Closing>);

struct Closing {
    caller: Caller,
    until: Instant,
    left: usize,
    ended: u64,
    reply: Reply,
}

/// How a session went.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Orderly,
    GivenUp,
}

impl Closings {
    /// A shutdown of `left` sessions begins; of none, it is over at once.
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

    /// Whether this owner may have nothing new.
    pub(super) fn cover(&self, owner: &str) -> bool {
        self.0.iter().any(|closing| closing.caller.sees(owner))
    }

    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|closing| closing.until).min()
    }

    /// The callers of those whose time is over.
    pub(super) fn overdue(&self, now: Instant) -> Vec<Caller> {
        let overdue = self.0.iter().filter(|closing| closing.until <= now);
        overdue.map(|closing| closing.caller.clone()).collect()
    }

    /// A session of this owner is gone.
    pub(super) fn gone(&mut self, owner: &str, end: End) {
        for closing in &mut self.0 {
            if closing.caller.sees(owner) {
                closing.left = closing.left.saturating_sub(1);
                closing.ended += u64::from(end == End::Orderly);
            }
        }
    }

    /// Answers those with nothing left to wait for.
    pub(super) fn answer_finished(&mut self) {
        for at in (0..self.0.len()).rev() {
            if self.0[at].left == 0 {
                let Closing { reply, ended, .. } = self.0.swap_remove(at);
                let _ = reply.send(Ok(SystemShutdownResult { ended }));
            }
        }
    }
}
