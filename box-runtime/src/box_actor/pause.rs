//! Boxes that stand still, and boxes that are stopped: nothing runs in those but the agent, which is what keeps their files.

use std::time::Duration;

use box_protocol::actions::{AgentClear, BoxTransitionResult, TargetState};
use box_protocol::error::{Detail, Subject};
use box_protocol::{Access, BoxError, BoxState, OnIdle};
use box_rpc::Empty;
use tokio::time::timeout;

use super::instance::{Instance, RunningBox};
use super::queue::JobOutcome;
use super::request::{Request, Transition};
use super::{Actor, Next, Unready, agents_error};
use crate::box_actor::agent_access::AgentAccess;

/// How long whoever is inside a box that is being stopped has to leave before the box is cleared again: a call that was under
/// way may have started something.
const LEAVING: Duration = Duration::from_millis(50);

/// How often. Who is still inside then, as a slow download is, starts nothing.
const ROUNDS: usize = 20;

impl Actor {
    /// Brings the box where it shall be, which waits for its exec like any other work.
    pub(super) async fn transition(&mut self, asked: Box<Transition>) -> Next {
        match Box::pin(self.move_to(asked.to)).await {
            Ok(changed) => {
                let info = self.entry.info(&asked.caller);
                let _ = asked.reply.send(Ok(BoxTransitionResult { info, changed }));
                Next::GoOn
            }
            Err(why) => Box::pin(self.unready(Request::Transition(asked), why)).await,
        }
    }

    /// Sees to it that the box is not paused; refused unless it may be woken.
    pub(super) async fn wake(&mut self) -> Result<(), Unready> {
        match self.entry.access() {
            Access::WakeFirst => self.move_to(TargetState::Running).await.map(drop),
            _ => self.entry.is_awake().map_err(Unready::Refused),
        }
    }

    /// Whether the box was somewhere else before.
    async fn move_to(&mut self, to: TargetState) -> Result<bool, Unready> {
        let happened = match self.queue.during(self.instance.move_to(to)).await {
            JobOutcome::Done(Ok(Some(happened))) => happened,
            JobOutcome::Done(Ok(None)) => return Ok(false),
            JobOutcome::Done(Err(error)) => return Err(Unready::Refused(error)),
            JobOutcome::EndReason(over) => return Err(Unready::EndReason(over)),
        };
        self.tell(happened, "");
        // In each state a box has another end for want of use, and one that goes on is in use.
        self.queue.used();
        self.queue.set_clock();
        Ok(true)
    }

    /// Whether a box that nobody uses is stopped instead of deleted, and is not stopped yet.
    pub(super) fn stops_when_idle(&self) -> bool {
        let live = self.entry.live();
        let stops = |lifetime: &box_protocol::Lifetime| lifetime.on_idle == OnIdle::Stop;
        live.state == BoxState::Running && live.lifetime.as_deref().is_some_and(stops)
    }

    /// Nobody has used the box for long, and it shall be stopped then.
    pub(super) async fn stop_idle(&mut self) -> Next {
        match self.move_to(TargetState::Stopped).await {
            Ok(_) => Next::GoOn,
            Err(Unready::EndReason(over)) => Box::pin(self.over(over)).await,
            Err(Unready::Refused(error) | Unready::Failed(error)) => {
                let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
                tracing::warn!(%owner, %box_id, %error, "an idle box cannot be stopped yet");
                self.tell("unstopped", error.message());
                // It was to keep its files, so it goes on; the next try is as far away as this one was.
                self.queue.used();
                Next::GoOn
            }
        }
    }
}

impl Instance {
    /// What happened to the box; nothing if it is there already.
    async fn move_to(&mut self, to: TargetState) -> Result<Option<&'static str>, BoxError> {
        let state = self.entry.live().state;
        let living = self.living.as_ref().ok_or_else(|| self.unmoved(state))?;
        let config = &self.shared.config;
        let (then, happened) = match (state, to) {
            (BoxState::Running, TargetState::Running)
            | (BoxState::Paused, TargetState::Paused)
            | (BoxState::Stopped, TargetState::Stopped) => return Ok(None),
            (BoxState::Running, TargetState::Paused) => {
                living.freeze(config.probe_timeout, true).await?;
                (BoxState::Paused, "paused")
            }
            (BoxState::Paused, TargetState::Running) => {
                living.freeze(config.probe_timeout, false).await?;
                (BoxState::Running, "resumed")
            }
            (BoxState::Running | BoxState::Paused, TargetState::Stopped) => {
                // From here on nobody comes in.
                self.entry.live().state = BoxState::Stopped;
                if state == BoxState::Paused {
                    let resumed = living.freeze(config.probe_timeout, false).await;
                    resumed.inspect_err(|_| self.stays(state))?;
                }
                let clearing = timeout(config.stop_timeout, living.clear(&self.entry.access));
                let cleared = clearing
                    .await
                    .unwrap_or_else(|_| Err(BoxError::timeout("the box was not stopped in time")));
                cleared.inspect_err(|_| self.stays(BoxState::Running))?;
                (BoxState::Stopped, "stopped")
            }
            (BoxState::Stopped, TargetState::Running) => {
                self.enter_main().await?;
                (BoxState::Running, "started")
            }
            _ => return Err(self.unmoved(state)),
        };
        self.entry.live().state = then;
        self.keep().await;
        Ok(Some(happened))
    }

    /// It did not come to a stop. Somebody may have kept meanwhile that it had.
    fn stays(&self, state: BoxState) {
        self.entry.live().state = state;
        self.entry.changed();
    }

    fn unmoved(&self, from: BoxState) -> BoxError {
        let id = &self.entry.spec.box_id;
        let from = match from {
            BoxState::Stopped => "stopped",
            _ => "neither running nor paused",
        };
        BoxError::conflict(format!("box {id} is {from}")).with_detail(&Detail::about(Subject::Box))
    }
}

impl RunningBox {
    /// Ends everything in it but its agent, also what calls that are inside have just started.
    async fn clear(&self, access: &AgentAccess) -> Result<(), BoxError> {
        let agent = self.agent.peer();
        for _ in 0..ROUNDS {
            let cleared = agent.call::<AgentClear>(&Empty {}).await;
            cleared.map_err(agents_error)?;
            if access.is_unused() {
                break;
            }
            let _ = timeout(LEAVING, access.unused()).await;
        }
        Ok(())
    }
}
