//! Changes of state: pause, resume, stop and start.
//!
//! Pausing freezes all processes of a box, including its agent. Stopping ends the sandbox and keeps
//! the files as a layer (`stop.rs`). Starting makes a new sandbox on the layers, with the main
//! command of the box.

use std::time::Duration;

use box_protocol::actions::{AgentClear, BoxTransitionResult, TargetState};
use box_protocol::{Access, BoxError, BoxState, LifetimeAction, UnixMs};
use box_rpc::Empty;
use tokio::time::timeout;

use super::instance::{Instance, RunningBox};
use super::queue::{EndReason, JobOutcome};
use super::request::{Request, Transition};
use super::{Actor, Next, Unready, agents_error};
use crate::box_actor::agent_access::AgentAccess;

/// How long a stop waits for calls in progress before it clears the box again.
///
/// A call in progress may have started another process.
const CALL_WAIT: Duration = Duration::from_millis(50);

/// How long a box that could not be stopped at its `expires_at` keeps running.
const EXPIRY_RETRY: Duration = Duration::from_mins(1);

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

    /// Returns the state of an idle box that its lifetime keeps.
    pub(super) fn idle_target(&self) -> Option<TargetState> {
        let status = self.entry.status();
        let lifetime = status.lifetime.as_deref()?;
        let target = target(lifetime.on_idle)?;
        (status.state == BoxState::Running).then_some(target)
    }

    /// Stops or pauses an idle box.
    pub(super) async fn rest_idle(&mut self, to: TargetState) -> Next {
        match self.move_to(to).await {
            Ok(_) => Next::Continue,
            Err(Unready::BoxEnds(reason)) => Box::pin(self.end_for(reason)).await,
            Err(Unready::Refused(error) | Unready::Failed(error)) => {
                self.report_unstopped(&error);
                // The spec asks to keep the files, so the box keeps running until the next idle
                // timeout.
                self.queue.mark_used();
                Next::Continue
            }
        }
    }

    /// Ends a box at its `expires_at`, or stops or pauses it.
    pub(super) async fn expired(&mut self) -> Next {
        let expiry = self.expiry();
        let Some((_, action)) = expiry else {
            return Box::pin(self.end_for(EndReason::Expired)).await;
        };
        // As before a transition that a caller asks for, the exec that runs ends first.
        if let Some(command_id) = self.entry.current_exec.watch() {
            let next = Box::pin(self.wait_exec(&command_id)).await;
            if matches!(next, Next::End(_)) {
                return next;
            }
        }
        let state = self.entry.status().state;
        let to = match (action, state) {
            // A caller has changed the lifetime meanwhile.
            _ if self.expiry() != expiry => return Next::Continue,
            (to, BoxState::Running) => to,
            (TargetState::Stopped, BoxState::Paused) => TargetState::Stopped,
            (_, BoxState::Paused | BoxState::Stopped) => {
                self.forget_expiry();
                return Next::Continue;
            }
            _ => return Box::pin(self.end_for(EndReason::Expired)).await,
        };
        match self.move_to(to).await {
            Ok(_) => {
                self.record_event("expired", "it reached its expires_at and was kept");
                self.forget_expiry();
                Next::Continue
            }
            Err(Unready::BoxEnds(reason)) => Box::pin(self.end_for(reason)).await,
            Err(Unready::Refused(error) | Unready::Failed(error)) => {
                self.report_unstopped(&error);
                self.queue.postpone_expiry(EXPIRY_RETRY);
                Next::Continue
            }
        }
    }

    /// Returns when the box expires, and its state from then on, unless it then ends.
    fn expiry(&self) -> Option<(Option<UnixMs>, TargetState)> {
        let status = self.entry.status();
        let lifetime = status.lifetime.as_deref()?;
        Some((lifetime.expires_at, target(lifetime.on_expiry)?))
    }

    fn forget_expiry(&mut self) {
        if let Some(lifetime) = &mut self.entry.status().lifetime {
            lifetime.expires_at = None;
        }
        self.entry.mark_changed();
        self.queue.reset_timers();
    }

    fn report_unstopped(&self, error: &BoxError) {
        let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
        tracing::warn!(%owner, %box_id, %error, "cannot stop or pause a box; retrying later");
        self.record_event("unstopped", error.message());
    }
}

/// Returns the state that an action leads to, unless it deletes the box.
fn target(action: LifetimeAction) -> Option<TargetState> {
    match action {
        LifetimeAction::Delete => None,
        LifetimeAction::Stop => Some(TargetState::Stopped),
        LifetimeAction::Pause => Some(TargetState::Paused),
    }
}

impl Instance {
    /// Moves the box to a state; returns the event, or `None` if nothing changed.
    async fn move_to(&mut self, to: TargetState) -> Result<Option<&'static str>, BoxError> {
        let state = self.entry.status().state;
        let (new_state, event) = match (state, to) {
            (BoxState::Running, TargetState::Running)
            | (BoxState::Paused, TargetState::Paused)
            | (BoxState::Stopped, TargetState::Stopped) => return Ok(None),
            (BoxState::Running, TargetState::Paused) => {
                self.freeze(true).await?;
                (BoxState::Paused, "paused")
            }
            (BoxState::Paused, TargetState::Running) => {
                self.freeze(false).await?;
                (BoxState::Running, "resumed")
            }
            (BoxState::Running | BoxState::Paused, TargetState::Stopped) => {
                self.stop_and_keep(state).await?;
                return Ok(Some("stopped"));
            }
            (BoxState::Stopped, TargetState::Running) if self.is_stopped() => {
                self.start_stopped().await?;
                return Ok(Some("started"));
            }
            _ => return Err(self.entry.wrong_state(state)),
        };
        self.entry.status().set_state(new_state);
        // A copy of the files may have ended or begun meanwhile.
        let frozen = self.entry.is_frozen();
        if let Some(running) = &self.running {
            running.agent.peer().expect_silence(frozen);
        }
        self.persist().await;
        Ok(Some(event))
    }

    async fn freeze(&self, frozen: bool) -> Result<(), BoxError> {
        let state = self.entry.status().state;
        let running = self.running.as_ref();
        let running = running.ok_or_else(|| self.entry.wrong_state(state))?;
        running
            .freeze(self.shared.config.probe_timeout, frozen)
            .await
    }

    /// Ends all processes of the box and its sandbox, and keeps its files.
    async fn stop_and_keep(&mut self, from: BoxState) -> Result<(), BoxError> {
        let Some(running) = &self.running else {
            return Err(self.entry.wrong_state(from));
        };
        // From here on no call can start.
        self.entry.status().set_state(BoxState::Stopped);
        let config = &self.shared.config;
        if from == BoxState::Paused {
            let resumed = running.freeze(config.probe_timeout, false).await;
            resumed.inspect_err(|_| self.stays(from))?;
        }
        let clearing = timeout(config.stop_timeout, running.clear(&self.entry.access));
        let cleared = clearing
            .await
            .unwrap_or_else(|_| Err(BoxError::timeout("the box did not stop in time")));
        cleared.inspect_err(|_| self.stays(BoxState::Running))?;
        let kept = self.keep_files().await;
        kept.inspect_err(|_| self.stays(BoxState::Running))
    }

    /// Restores the state after a failed stop.
    ///
    /// A concurrent write may have persisted the stopped state.
    fn stays(&self, state: BoxState) {
        self.entry.status().set_state(state);
        self.entry.mark_changed();
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
