//! Boxes that stand still.

use box_protocol::actions::{BoxTransitionResult, TargetState};
use box_protocol::error::{Detail, Subject};
use box_protocol::{Access, BoxError, BoxState};

use super::body::Body;
use super::work::Transition;
use super::{Actor, Next};

impl Actor {
    /// Brings the box where it shall be, which waits for its exec like any other work.
    pub(super) async fn transition(&mut self, asked: Box<Transition>) -> Next {
        let moved = Box::pin(self.move_to(asked.to)).await;
        let _ = asked.reply.send(moved.map(|changed| BoxTransitionResult {
            info: self.card.info(),
            changed,
        }));
        Next::GoOn
    }

    /// Sees to it that the box is not paused; refused unless it may be woken.
    pub(super) async fn wake(&mut self) -> Result<(), BoxError> {
        match self.card.access() {
            Access::WakeFirst => self.move_to(TargetState::Running).await.map(drop),
            _ => self.card.is_awake(),
        }
    }

    /// Whether the box was somewhere else before.
    async fn move_to(&mut self, to: TargetState) -> Result<bool, BoxError> {
        let changed = self.body.move_to(to).await?;
        if changed {
            let paused = to == TargetState::Paused;
            self.tell(if paused { "paused" } else { "resumed" }, "");
            // A paused box has no end for want of use, and one that goes on is in use.
            self.front.used();
            self.front.set_clock();
        }
        Ok(changed)
    }
}

impl Body {
    async fn move_to(&mut self, to: TargetState) -> Result<bool, BoxError> {
        let state = self.card.live().state;
        let (frozen, then) = match (state, to) {
            (_, TargetState::Stopped) => {
                return Err(BoxError::unsupported(
                    "a box cannot be stopped yet: pause it or delete it",
                ));
            }
            (BoxState::Running, TargetState::Running) | (BoxState::Paused, TargetState::Paused) => {
                return Ok(false);
            }
            (BoxState::Running, TargetState::Paused) => (true, BoxState::Paused),
            (BoxState::Paused, TargetState::Running) => (false, BoxState::Running),
            _ => return Err(self.unmoved()),
        };
        let living = self.living.as_ref().ok_or_else(|| self.unmoved())?;
        let limit = self.shared.config.probe_timeout;
        living.freeze(limit, frozen).await?;
        self.card.live().state = then;
        self.keep();
        Ok(true)
    }

    fn unmoved(&self) -> BoxError {
        let id = &self.card.spec.session_id;
        BoxError::conflict(format!("Box session {id} is neither running nor paused"))
            .with_detail(&Detail::about(Subject::Box))
    }
}
