//! Turns of execs: the actor grants one exec at a time and handles its end.

use std::sync::Arc;

use box_protocol::actions::OnTimeout;
use box_protocol::{BoxError, CommandId, ExecStatus, Killed};

use super::current_exec::TurnEnd;
use super::ending::broken;
use super::queue::JobOutcome;
use super::request::{Exec, Request};
use super::{Actor, FinalReply, Next};
use crate::box_actor::agent_access::{AgentLease, Purpose};
use crate::exec::{Finish, Turn};

impl Actor {
    /// Grants an exec its turn.
    pub(super) async fn exec(&mut self, exec: Box<Exec>) -> Next {
        if exec.reply.is_closed() {
            return Next::Continue;
        }
        let request = Request::Exec(exec);
        if self.instance.is_stopped()
            && let Err(why) = Box::pin(self.wake()).await
        {
            return Box::pin(self.unready(request, why)).await;
        }
        if let Err(why) = self.ready(&request).await {
            return Box::pin(self.unready(request, why)).await;
        }
        let Request::Exec(exec) = request else {
            return Next::Continue;
        };
        if exec.reply.is_closed() {
            return Next::Continue;
        }
        if self.entry.check_awake().is_err()
            && let Err(why) = Box::pin(self.wake()).await
        {
            return Box::pin(self.unready(Request::Exec(exec), why)).await;
        }
        let turn = self.turn(&exec);
        let current = &self.entry.current_exec;
        if let Ok(turn) = &turn {
            current.start(turn.command_id.clone());
            self.entry.set_used(ExecStatus::Running);
        }
        if let Err(unsent) = exec.reply.send(turn) {
            // The caller has disconnected before its command started.
            current.reset();
            drop(unsent);
            self.entry.set_exec_status(ExecStatus::Idle);
        }
        Next::Continue
    }

    fn turn(&mut self, exec: &Exec) -> Result<Turn, BoxError> {
        let (Some(lease), Some(running)) = (
            AgentLease::try_acquire(&self.entry, &exec.caller, Purpose::Exec)?,
            &mut self.instance.running,
        ) else {
            return Err(BoxError::internal("the box is not running"));
        };
        Ok(Turn {
            lease,
            command_id: running.next_exec()?,
        })
    }

    /// Waits for the end of the running exec and handles it.
    pub(super) async fn wait_exec(&mut self, command_id: &CommandId) -> Next {
        let entry = Arc::clone(&self.entry);
        let outcome = self.queue.run_job(entry.current_exec.wait_end()).await;
        self.queue.mark_used();
        match outcome {
            JobOutcome::Done(TurnEnd::Finished(finish)) => self.finish(finish, command_id).await,
            JobOutcome::Done(TurnEnd::Abandoned) => {
                match self.confirm_killed(command_id).await {
                    JobOutcome::Done(Err(reason)) => {
                        let why = self.failure_reason(reason);
                        Box::pin(self.fail(why)).await;
                    }
                    JobOutcome::BoxEnds(reason) => return Box::pin(self.end_for(reason)).await,
                    JobOutcome::Done(Ok(())) => {}
                }
                self.entry.set_used(ExecStatus::Idle);
                Next::Continue
            }
            JobOutcome::BoxEnds(reason) => Box::pin(self.end_for(reason)).await,
        }
    }

    /// Waits until all processes of an exec are gone.
    async fn confirm_killed(&mut self, command_id: &CommandId) -> JobOutcome<Result<(), String>> {
        let job = self.instance.confirm_killed(command_id);
        self.queue.run_job(Box::pin(job)).await
    }

    /// Handles the end of an exec.
    async fn finish(&mut self, finish: Finish, command_id: &CommandId) -> Next {
        match finish {
            Finish::Done => Next::Continue,
            Finish::DropBox(reply) => {
                self.record_end("deleted", "an exec timed out");
                self.end(FinalReply::Exec(reply)).await
            }
            Finish::Overdue(OnTimeout::DropBox, reply) => {
                self.record_end("deleted", "its agent did not answer");
                self.end(FinalReply::Exec(reply)).await
            }
            Finish::Overdue(OnTimeout::Kill, reply) => {
                // The agent of a box without CPU time is slow, so it gets the full kill timeout.
                match Box::pin(self.confirm_killed(command_id)).await {
                    JobOutcome::Done(Ok(())) => {
                        self.entry.set_used(ExecStatus::Idle);
                        let _ = reply.send(Ok(Killed::Command));
                        return Next::Continue;
                    }
                    JobOutcome::Done(Err(_)) => {}
                    JobOutcome::BoxEnds(reason) => {
                        let next = Box::pin(self.end_for(reason)).await;
                        let _ = reply.send(Ok(Killed::Command));
                        return next;
                    }
                }
                // No client deleted the box, so its entry stays and states the reason.
                let why = "the box's agent did not end a command after its timeout";
                Box::pin(self.fail(broken(why.to_owned()))).await;
                let _ = reply.send(Ok(Killed::Box));
                Next::Continue
            }
            Finish::Broken(reason, reply) => {
                let why = self.failure_reason(reason);
                Box::pin(self.fail(why.clone())).await;
                let _ = reply.send(Err(why));
                Next::Continue
            }
        }
    }
}
