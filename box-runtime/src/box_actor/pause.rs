//! Paused boxes and stopped boxes.
//!
//! Pausing freezes all processes of a box, including its agent. Stopping kills all processes except
//! the agent, which keeps the files of the box alive. Starting a stopped box starts its main command.

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

/// How long a stop waits for calls in progress before it clears the box again.
///
/// A call in progress may have started another process.
const CALL_WAIT: Duration = Duration::from_millis(50);

/// Limit of clear attempts. A call that is still in progress then starts nothing.
const MAX_CLEARS: usize = 20;

impl Actor {
    /// Moves the box to the requested state, after the execs queued before.
    pub(super) async fn transition(&mut self, request: Box<Transition>) -> Next {
        match Box::pin(self.move_to(request.to)).await {
            Ok(changed) => {
                let info = self.entry.info(&request.caller);
                let _ = request
                    .reply
                    .send(Ok(BoxTransitionResult { info, changed }));
                Next::Continue
            }
            Err(why) => Box::pin(self.unready(Request::Transition(request), why)).await,
        }
    }

    /// Ensures that the box is running; fails unless the spec permits a wake-up.
    pub(super) async fn wake(&mut self) -> Result<(), Unready> {
        match self.entry.access() {
            Access::WakeFirst => self.move_to(TargetState::Running).await.map(drop),
            _ => self.entry.check_awake().map_err(Unready::Refused),
        }
    }

    /// Moves the box to a state; returns whether the state changed.
    async fn move_to(&mut self, to: TargetState) -> Result<bool, Unready> {
        let event = match self.queue.run_job(self.instance.move_to(to)).await {
            JobOutcome::Done(Ok(Some(event))) => event,
            JobOutcome::Done(Ok(None)) => return Ok(false),
            JobOutcome::Done(Err(error)) => return Err(Unready::Refused(error)),
            JobOutcome::BoxEnds(reason) => return Err(Unready::BoxEnds(reason)),
        };
        self.record_event(event, "");
        // Each state has its own idle timeout, and a change of state counts as use.
        self.queue.mark_used();
        self.queue.reset_timers();
        Ok(true)
    }

    /// Returns whether an idle timeout stops the box instead of deleting it.
    pub(super) fn stops_when_idle(&self) -> bool {
        let status = self.entry.status();
        let stops = |lifetime: &box_protocol::Lifetime| lifetime.on_idle == OnIdle::Stop;
        status.state == BoxState::Running && status.lifetime.as_deref().is_some_and(stops)
    }

    /// Stops an idle box.
    pub(super) async fn stop_idle(&mut self) -> Next {
        match self.move_to(TargetState::Stopped).await {
            Ok(_) => Next::Continue,
            Err(Unready::BoxEnds(reason)) => Box::pin(self.end_for(reason)).await,
            Err(Unready::Refused(error) | Unready::Failed(error)) => {
                let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
                tracing::warn!(%owner, %box_id, %error, "cannot stop an idle box; retrying later");
                self.record_event("unstopped", error.message());
                // The spec asks to keep the files, so the box keeps running until the next idle
                // timeout.
                self.queue.mark_used();
                Next::Continue
            }
        }
    }
}

impl Instance {
    /// Moves the box to a state; returns the event, or `None` if nothing changed.
    async fn move_to(&mut self, to: TargetState) -> Result<Option<&'static str>, BoxError> {
        let state = self.entry.status().state;
        let running = self
            .running
            .as_ref()
            .ok_or_else(|| self.wrong_state(state))?;
        let config = &self.shared.config;
        let (new_state, event) = match (state, to) {
            (BoxState::Running, TargetState::Running)
            | (BoxState::Paused, TargetState::Paused)
            | (BoxState::Stopped, TargetState::Stopped) => return Ok(None),
            (BoxState::Running, TargetState::Paused) => {
                running.freeze(config.probe_timeout, true).await?;
                (BoxState::Paused, "paused")
            }
            (BoxState::Paused, TargetState::Running) => {
                running.freeze(config.probe_timeout, false).await?;
                (BoxState::Running, "resumed")
            }
            (BoxState::Running | BoxState::Paused, TargetState::Stopped) => {
                // From here on no call can start.
                self.entry.status().state = BoxState::Stopped;
                if state == BoxState::Paused {
                    let resumed = running.freeze(config.probe_timeout, false).await;
                    resumed.inspect_err(|_| self.stays(state))?;
                }
                let clearing = timeout(config.stop_timeout, running.clear(&self.entry.access));
                let cleared = clearing
                    .await
                    .unwrap_or_else(|_| Err(BoxError::timeout("the box did not stop in time")));
                cleared.inspect_err(|_| self.stays(BoxState::Running))?;
                (BoxState::Stopped, "stopped")
            }
            (BoxState::Stopped, TargetState::Running) => {
                self.start_main().await?;
                (BoxState::Running, "started")
            }
            _ => return Err(self.wrong_state(state)),
        };
        self.entry.status().state = new_state;
        self.persist().await;
        Ok(Some(event))
    }

    /// Restores the state after a failed stop.
    ///
    /// A concurrent write may have persisted the stopped state.
    fn stays(&self, state: BoxState) {
        self.entry.status().state = state;
        self.entry.mark_changed();
    }

    fn wrong_state(&self, from: BoxState) -> BoxError {
        let id = &self.entry.spec.box_id;
        let from = match from {
            BoxState::Stopped => "stopped",
            _ => "neither running nor paused",
        };
        BoxError::conflict(format!("box {id} is {from}")).with_detail(&Detail::about(Subject::Box))
    }
}

impl RunningBox {
    /// Kills all processes except the agent, including those just started by calls.
    async fn clear(&self, access: &AgentAccess) -> Result<(), BoxError> {
        let agent = self.agent.peer();
        for _ in 0..MAX_CLEARS {
            let cleared = agent.call::<AgentClear>(&Empty {}).await;
            cleared.map_err(agents_error)?;
            if access.is_unused() {
                break;
            }
            let _ = timeout(CALL_WAIT, access.wait_unused()).await;
        }
        Ok(())
    }
}
