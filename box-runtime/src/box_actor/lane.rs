//! The exec that runs in a box, shared by its actor and the task of the call.
//!
//! The actor grants a turn and returns to its mailbox. The end of a turn wakes the actor only if
//! the actor has something to do: a request waits, or the command did not simply end.

use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::CommandId;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::exec::Finish;

/// State of the exec of a box.
pub(crate) struct Lane {
    state: Mutex<State>,
    /// Wakes the actor.
    ended: Notify,
}

struct State {
    exec: Option<Running>,
    /// End of the last exec.
    used: Instant,
}

struct Running {
    command_id: CommandId,
    /// Whether the actor waits for the end.
    watched: bool,
    end: Option<End>,
}

/// End of a turn.
pub(super) enum End {
    Finished(Finish),
    /// The call was cancelled, and its command may still run.
    Abandoned,
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                exec: None,
                used: Instant::now(),
            }),
            ended: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a turn. The actor starts one only when no other turn runs.
    pub(super) fn start(&self, command_id: CommandId) {
        self.state().exec = Some(Running {
            command_id,
            watched: false,
            end: None,
        });
    }

    /// Ends a turn, unless the actor has ended the box in the meantime.
    pub(crate) fn finish(&self, command_id: &CommandId, finish: Finish) {
        self.end(command_id, End::Finished(finish));
    }

    /// Ends the turn of a cancelled call.
    pub(crate) fn abandon(&self, command_id: &CommandId) {
        self.end(command_id, End::Abandoned);
    }

    fn end(&self, command_id: &CommandId, end: End) {
        let mut state = self.state();
        let Some(exec) = state.exec.as_mut() else {
            return;
        };
        // A turn ends once; a later one has another id.
        if exec.command_id != *command_id || exec.end.is_some() {
            return;
        }
        let wakes = exec.watched || !matches!(end, End::Finished(Finish::Done));
        if wakes {
            exec.end = Some(end);
        } else {
            state.exec = None;
        }
        state.used = Instant::now();
        drop(state);
        if wakes {
            self.ended.notify_one();
        }
    }

    /// Returns the command of the current turn, and asks for a wake-up at its end.
    pub(super) fn watch(&self) -> Option<CommandId> {
        let mut state = self.state();
        let exec = state.exec.as_mut()?;
        exec.watched = true;
        Some(exec.command_id.clone())
    }

    /// Waits for the end of the turn that the actor watches.
    pub(super) async fn ended(&self) -> End {
        loop {
            if let Some(end) = self.take_end() {
                return end;
            }
            self.ended.notified().await;
        }
    }

    fn take_end(&self) -> Option<End> {
        let mut state = self.state();
        let Some(exec) = state.exec.as_mut() else {
            return Some(End::Finished(Finish::Done));
        };
        let end = exec.end.take()?;
        state.exec = None;
        Some(end)
    }

    /// Resolves when a turn has ended and the actor must act.
    pub(super) async fn needs_actor(&self) {
        self.ended.notified().await;
    }

    /// Drops the current turn, because its box ends.
    pub(super) fn reset(&self) {
        self.state().exec = None;
    }

    /// Returns the time of the last end of an exec.
    pub(super) fn used(&self) -> Instant {
        self.state().used
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
        let lane = Lane::new();
        lane.start(id(1));
        lane.finish(&id(1), Finish::Done);
        assert!(lane.needs_actor().now_or_never().is_none());
        assert!(lane.watch().is_none());
        lane.start(id(2));
        assert_eq!(lane.watch(), Some(id(2)));
        assert!(lane.ended().now_or_never().is_none());
        lane.finish(&id(2), Finish::Done);
        assert!(matches!(lane.ended().await, End::Finished(Finish::Done)));
        assert!(lane.watch().is_none());
    }

    #[tokio::test]
    async fn an_abandoned_turn_wakes_a_resting_actor() {
        let lane = Lane::new();
        lane.start(id(1));
        lane.abandon(&id(1));
        assert!(lane.needs_actor().now_or_never().is_some());
        assert_eq!(lane.watch(), Some(id(1)));
        assert!(matches!(lane.ended().await, End::Abandoned));
    }

    #[tokio::test]
    async fn an_end_of_an_earlier_turn_changes_nothing() {
        let lane = Lane::new();
        lane.start(id(1));
        lane.reset();
        lane.start(id(2));
        lane.finish(&id(1), Finish::Done);
        lane.abandon(&id(1));
        assert_eq!(lane.watch(), Some(id(2)));
        assert!(lane.ended().now_or_never().is_none());
    }
}
