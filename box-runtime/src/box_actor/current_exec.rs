//! The exec that runs in a box, shared by its actor and the task of the call.
//!
//! The actor grants a turn and returns to its mailbox. The end of a turn wakes the actor only if
//! a request waits, or if the actor must handle the end: a timeout, a failure or a cancelled call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::CommandId;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::exec::Finish;

/// State of the exec of a box.
pub(crate) struct CurrentExec {
    state: Mutex<TurnState>,
    /// Wakes the actor.
    wakeup: Notify,
}

struct TurnState {
    exec: Option<RunningExec>,
    /// Time of the last end of a turn.
    last_used: Instant,
}

struct RunningExec {
    command_id: CommandId,
    /// Whether the actor waits for the end.
    is_watched: bool,
    end: Option<TurnEnd>,
}

/// How a turn ended.
pub(super) enum TurnEnd {
    Finished(Finish),
    /// The call was cancelled, and its command may still run.
    Abandoned,
}

impl CurrentExec {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(TurnState {
                exec: None,
                last_used: Instant::now(),
            }),
            wakeup: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a turn. The actor starts one only when no other turn runs.
    pub(super) fn start(&self, command_id: CommandId) {
        self.state().exec = Some(RunningExec {
            command_id,
            is_watched: false,
            end: None,
        });
    }

    /// Ends a turn, unless the actor has ended the box in the meantime.
    pub(crate) fn finish(&self, command_id: &CommandId, finish: Finish) {
        self.end(command_id, TurnEnd::Finished(finish));
    }

    /// Ends the turn of a cancelled call.
    pub(crate) fn abandon(&self, command_id: &CommandId) {
        self.end(command_id, TurnEnd::Abandoned);
    }

    fn end(&self, command_id: &CommandId, end: TurnEnd) {
        let mut state = self.state();
        let Some(exec) = state.exec.as_mut() else {
            return;
        };
        // A turn ends once; a later one has another id.
        if exec.command_id != *command_id || exec.end.is_some() {
            return;
        }
        let wakes_actor = exec.is_watched || !matches!(end, TurnEnd::Finished(Finish::Done));
        if wakes_actor {
            exec.end = Some(end);
        } else {
            state.exec = None;
        }
        state.last_used = Instant::now();
        drop(state);
        if wakes_actor {
            self.wakeup.notify_one();
        }
    }

    /// Returns the command of the current turn, and asks for a wake-up at its end.
    pub(super) fn watch(&self) -> Option<CommandId> {
        let mut state = self.state();
        let exec = state.exec.as_mut()?;
        exec.is_watched = true;
        Some(exec.command_id.clone())
    }

    /// Waits for the end of the turn that the actor watches.
    pub(super) async fn wait_end(&self) -> TurnEnd {
        loop {
            if let Some(end) = self.take_end() {
                return end;
            }
            self.wakeup.notified().await;
        }
    }

    fn take_end(&self) -> Option<TurnEnd> {
        let mut state = self.state();
        let Some(exec) = state.exec.as_mut() else {
            return Some(TurnEnd::Finished(Finish::Done));
        };
        let end = exec.end.take()?;
        state.exec = None;
        Some(end)
    }

    /// Resolves when a turn has ended and the actor must act.
    pub(super) async fn needs_actor(&self) {
        self.wakeup.notified().await;
    }

    /// Drops the current turn, because its box ends.
    pub(super) fn reset(&self) {
        self.state().exec = None;
    }

    /// Returns the time of the last end of an exec.
    pub(super) fn last_used(&self) -> Instant {
        self.state().last_used
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn id(number: u32) -> CommandId {
        CommandId::new(format!("exec-{number}")).unwrap()
    }

    #[tokio::test]
    async fn a_plain_end_wakes_the_actor_only_if_it_waits() {
        let current = CurrentExec::new();
        current.start(id(1));
        current.finish(&id(1), Finish::Done);
        assert!(current.needs_actor().now_or_never().is_none());
        assert!(current.watch().is_none());
        current.start(id(2));
        assert_eq!(current.watch(), Some(id(2)));
        assert!(current.wait_end().now_or_never().is_none());
        current.finish(&id(2), Finish::Done);
        assert!(matches!(
            current.wait_end().await,
            TurnEnd::Finished(Finish::Done)
        ));
        assert!(current.watch().is_none());
    }

    #[tokio::test]
    async fn an_abandoned_turn_wakes_a_resting_actor() {
        let current = CurrentExec::new();
        current.start(id(1));
        current.abandon(&id(1));
        assert!(current.needs_actor().now_or_never().is_some());
        assert_eq!(current.watch(), Some(id(1)));
        assert!(matches!(current.wait_end().await, TurnEnd::Abandoned));
    }

    #[tokio::test]
    async fn an_end_of_an_earlier_turn_changes_nothing() {
        let current = CurrentExec::new();
        current.start(id(1));
        current.reset();
        current.start(id(2));
        current.finish(&id(1), Finish::Done);
        current.abandon(&id(1));
        assert_eq!(current.watch(), Some(id(2)));
        assert!(current.wait_end().now_or_never().is_none());
    }
}
