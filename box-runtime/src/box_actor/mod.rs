//! Actor of one box: it starts the box, runs its execs one at a time, and ends it.
//!
//! # Reading order
//!
//! - `request`: the requests to the actor.
//! - `queue`: its mailbox, the queue of waiting calls, and its timers. The queue accepts requests
//!   while the box is busy.
//! - `instance`: the running box, if one exists. `mounts`: mounts besides the workspace;
//!   `main_command`: the command started with the box; `pause`: paused and stopped boxes.
//! - `lane`: the exec that runs.
//! - `entry`: the shared description of the box; `persist`: its record on disk.
//! - `agent_access`: calls that bypass the queue.
//! - `ending`: errors of calls to a box that has ended.
//! - `validate`: checks of an agent's messages.
//! - This file: the state transitions.

pub(crate) mod agent_access;
mod ending;
pub(crate) mod entry;
mod instance;
mod lane;
mod main_command;
mod mounts;
mod pause;
pub(crate) mod persist;
mod queue;
mod request;
mod validate;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use box_protocol::actions::{BoxCreateResult, BoxDeleteResult, OnTimeout};
use box_protocol::error::Ended;
use box_protocol::{BoxError, CommandId, Killed, LaneStatus};
use box_rpc::Router;
use futures::FutureExt as _;
use tokio::sync::mpsc;

use self::ending::{broken, ended_as};
use self::instance::{Instance, NotReady};
use self::lane::End;
use self::queue::{EndReason, JobOutcome, Queue, Wakeup};
use crate::adoption::{Unreached, unreachable};
use crate::box_actor::agent_access::{AgentLease, Purpose, ended};
use crate::box_actor::entry::BoxEntry;
use crate::config::RuntimeConfig;
use crate::ends::Ends;
use crate::events::Events;
use crate::exec::{Finish, Settle, Turn};
use crate::order::Orders;
use crate::registry::Ask;
use crate::select::Selector;

pub(crate) use self::instance::{RunningBox, carrier_limits};
pub(crate) use self::queue::queue_full;
pub(crate) use self::request::{Create, Delete, Exec, Mount, Reply, Request, Transition};
pub(crate) use self::validate::{Failure, Meaning, agent_violation, agents_error, end_of, look_up};

/// State shared by the table and all actors.
pub(crate) struct Shared {
    pub(crate) config: RuntimeConfig,
    pub(crate) selector: Selector,
    /// Events of the boxes.
    pub(crate) events: Events,
    /// Reasons for the end of former boxes.
    pub(crate) ends: Ends,
    /// Empty router: agents may not call the runtime.
    pub(crate) nothing: Router,
    /// Order of calls that name the same object.
    pub(crate) orders: Orders,
}

/// Initial state of an actor.
pub(crate) enum Begin {
    /// Waiting requests, the first of which created the box.
    With(Vec<Request>),
    /// Adopted box.
    In(Box<RunningBox>),
    /// Adopted box with an agent that has not answered yet.
    Reaching(Box<Unreached>),
}

/// Runs an actor from start to end and reports the end to the table.
pub(crate) async fn live(
    shared: Arc<Shared>,
    entry: Arc<BoxEntry>,
    begin: Begin,
    mailbox: mpsc::Receiver<Request>,
    table: mpsc::WeakSender<Ask>,
) {
    let mut instance = Instance::new(Arc::clone(&shared), Arc::clone(&entry));
    let first = match begin {
        Begin::With(first) => first,
        Begin::In(living) => {
            instance.is_in(*living);
            Vec::new()
        }
        Begin::Reaching(unreached) => {
            instance.reaches(*unreached);
            Vec::new()
        }
    };
    let mut actor = Actor {
        queue: Queue::new(&shared, &entry, mailbox, first),
        instance,
        entry: Arc::clone(&entry),
    };
    let last = AssertUnwindSafe(actor.run()).catch_unwind().await;
    if last.is_err() {
        let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
        tracing::error!(%owner, %box_id, "the session failed unexpectedly");
        // The box must not outlive its actor.
        let _ = AssertUnwindSafe(actor.instance.stop()).catch_unwind().await;
    }
    let left = actor.queue.close();
    drop(actor);
    // The error of a failed start is more specific.
    if entry.access.why_shut().is_none() {
        entry.access.shut(ended());
    }
    if let Some(table) = table.upgrade() {
        let _ = table.send(Ask::Ended { entry, left }).await;
    }
    // The response comes last, so that a client that receives it finds the box gone.
    if let Ok(last) = last {
        last.say();
    }
}

/// Response to send once the box is gone.
enum Last {
    Nothing,
    /// Exec with a timeout that has ended the box.
    Exec(Settle),
    Delete(Reply<BoxDeleteResult>, Result<BoxDeleteResult, BoxError>),
}

impl Last {
    fn say(self) {
        match self {
            Self::Nothing => {}
            Self::Exec(settle) => drop(settle.send(Ok(Killed::Box))),
            Self::Delete(reply, result) => drop(reply.send(result)),
        }
    }
}

struct Actor {
    queue: Queue,
    instance: Instance,
    entry: Arc<BoxEntry>,
}

/// Whether the actor continues.
enum Next {
    GoOn,
    End(Last),
}

impl Actor {
    async fn run(&mut self) -> Last {
        loop {
            let next = match self.queue.next_work() {
                Some(work) if self.instance.is_out_of_reach(&work) => {
                    work.refuse(unreachable(&self.entry.spec.box_id));
                    Next::GoOn
                }
                Some(work) => match (self.entry.lane.watch(), work) {
                    (None, work) => self.serve(work).await,
                    (Some(_), Request::Delete(delete)) if delete.force => {
                        Box::pin(self.over(EndReason::Deleted(delete))).await
                    }
                    (Some(command_id), work) => {
                        self.queue.put_back(work);
                        self.exec_ends(&command_id).await
                    }
                },
                None => self.rest().await,
            };
            if let Next::End(last) = next {
                return last;
            }
        }
    }

    /// Handles a request while no exec runs.
    async fn serve(&mut self, work: Request) -> Next {
        match work {
            Request::Exec(exec) => self.exec(exec).await,
            Request::Create(create) => self.create(create).await,
            Request::Delete(delete) => self.delete(delete).await,
            Request::Transition(asked) => self.transition(asked).await,
            Request::Mount(asked) => self.mount(asked).await,
        }
    }

    /// Waits for a request, the end of an exec, a disconnect of the agent, or a timer.
    async fn rest(&mut self) -> Next {
        let wakeup = self.queue.rest(self.instance.ended()).await;
        // These wait for a running exec: it reports a disconnect itself and uses an idle box.
        if matches!(
            wakeup,
            Wakeup::ExecEnded
                | Wakeup::Broken(_)
                | Wakeup::EndReason(EndReason::Idle | EndReason::Done)
        ) && let Some(command_id) = self.entry.lane.watch()
        {
            let ends = Box::pin(self.exec_ends(&command_id)).await;
            let done = matches!(wakeup, Wakeup::EndReason(EndReason::Done));
            if !done || matches!(ends, Next::End(_)) {
                return ends;
            }
        }
        match wakeup {
            Wakeup::Request | Wakeup::ExecEnded => Next::GoOn,
            Wakeup::Broken(reason) => {
                let why = self.why_broken(reason);
                Box::pin(self.fail(why)).await;
                Next::GoOn
            }
            Wakeup::Reached(living) => {
                self.instance.is_in(*living);
                self.tell("adopted", "its agent answers");
                self.queue.used();
                self.queue.set_clock();
                Next::GoOn
            }
            Wakeup::EndReason(EndReason::Idle) => Box::pin(self.idle()).await,
            Wakeup::EndReason(over) => Box::pin(self.over(over)).await,
        }
    }

    /// Handles the idle timeout.
    ///
    /// Running background commands count as use, even if no client is attached.
    async fn idle(&mut self) -> Next {
        match self.queue.during(self.instance.may_be_busy()).await {
            JobOutcome::Done(false) => {}
            JobOutcome::Done(true) => {
                self.queue.used();
                return Next::GoOn;
            }
            JobOutcome::EndReason(over) => return Box::pin(self.over(over)).await,
        }
        // A call may have arrived in the meantime; from here on none can.
        if !self.queue.is_idle() {
            return Next::GoOn;
        }
        if self.stops_when_idle() {
            return self.stop_idle().await;
        }
        let reason = EndReason::Idle.reason(&self.entry.spec.box_id);
        if self.entry.access.shut_if_unused(reason) {
            return Box::pin(self.over(EndReason::Idle)).await;
        }
        Next::GoOn
    }

    /// Prepares the box for a call, unless the box ends first.
    async fn ready(&mut self, work: &Request) -> Result<bool, Unready> {
        let Some(spec) = work.spec() else {
            return Ok(false);
        };
        match self.queue.during(self.instance.ready(spec)).await {
            JobOutcome::Done(Ok(started)) => {
                self.queue.used();
                if started {
                    self.queue.set_clock();
                }
                Ok(started)
            }
            JobOutcome::Done(Err(NotReady::Refused(error))) => Err(Unready::Refused(error)),
            JobOutcome::Done(Err(NotReady::Failed(error))) => Err(Unready::Failed(error)),
            JobOutcome::EndReason(over) => Err(Unready::EndReason(over)),
        }
    }

    /// Handles a call that cannot use its box.
    async fn unready(&mut self, work: Request, why: Unready) -> Next {
        match why {
            Unready::Refused(error) => {
                work.refuse(error);
                Next::GoOn
            }
            Unready::Failed(error) => {
                self.tell("failed", error.message());
                // All calls that waited for this start receive its error.
                self.entry.access.shut(error.clone());
                self.queue.refuse_waiting(&error);
                work.refuse(error);
                let _ = self.instance.stop().await;
                Next::End(Last::Nothing)
            }
            Unready::EndReason(over) => {
                let id = &self.entry.spec.box_id;
                match over {
                    // The next box would expire as well.
                    EndReason::Expired | EndReason::Idle => work.refuse(BoxError::conflict(
                        format!("box {id} expired before it was ready"),
                    )),
                    EndReason::Deleted(_) => work.refuse(over.reason(id)),
                    // The call has not begun, so it can run in the next box.
                    EndReason::Done | EndReason::Closed => self.queue.put_back(work),
                }
                Box::pin(self.over(over)).await
            }
        }
    }

    async fn create(&mut self, create: Box<Create>) -> Next {
        let work = Request::Create(create);
        let started = match self.ready(&work).await {
            Ok(started) => started,
            Err(why) => return Box::pin(self.unready(work, why)).await,
        };
        if let Request::Create(create) = work {
            let _ = create.reply.send(Ok(BoxCreateResult {
                info: self.entry.info(&create.caller),
                existed: !started,
                earlier: started
                    .then(|| self.shared().ends.earlier(&self.entry))
                    .flatten(),
                adjusted: Vec::new(),
            }));
        }
        Next::GoOn
    }

    /// Grants an exec its turn.
    async fn exec(&mut self, exec: Box<Exec>) -> Next {
        if exec.reply.is_closed() {
            return Next::GoOn;
        }
        let work = Request::Exec(exec);
        if let Err(why) = self.ready(&work).await {
            return Box::pin(self.unready(work, why)).await;
        }
        let Request::Exec(exec) = work else {
            return Next::GoOn;
        };
        if exec.reply.is_closed() {
            return Next::GoOn;
        }
        if self.entry.is_awake().is_err()
            && let Err(why) = Box::pin(self.wake()).await
        {
            return Box::pin(self.unready(Request::Exec(exec), why)).await;
        }
        let turn = self.turn(&exec);
        let lane = &self.entry.lane;
        if let Ok(turn) = &turn {
            lane.start(turn.command_id.clone());
            self.entry.used(LaneStatus::Running);
        }
        if let Err(refused) = exec.reply.send(turn) {
            // The caller has left before its command started.
            lane.reset();
            drop(refused);
            self.entry.set_lane(LaneStatus::Idle);
        }
        Next::GoOn
    }

    fn turn(&mut self, exec: &Exec) -> Result<Turn, BoxError> {
        let (Some(lease), Some(living)) = (
            AgentLease::now(&self.entry, &exec.caller, Purpose::Exec)?,
            &mut self.instance.living,
        ) else {
            return Err(BoxError::internal("there is no box for the command"));
        };
        Ok(Turn {
            lease,
            command_id: living.next_exec()?,
        })
    }

    /// Waits for the end of the running exec and handles it.
    async fn exec_ends(&mut self, command_id: &CommandId) -> Next {
        let entry = Arc::clone(&self.entry);
        let during = self.queue.during(entry.lane.ended()).await;
        self.queue.used();
        match during {
            JobOutcome::Done(End::Finished(finish)) => self.finish(finish, command_id).await,
            JobOutcome::Done(End::Abandoned) => {
                match self.ended(command_id).await {
                    JobOutcome::Done(Err(reason)) => {
                        let why = self.why_broken(reason);
                        Box::pin(self.fail(why)).await;
                    }
                    JobOutcome::EndReason(over) => return Box::pin(self.over(over)).await,
                    JobOutcome::Done(Ok(())) => {}
                }
                self.entry.used(LaneStatus::Idle);
                Next::GoOn
            }
            JobOutcome::EndReason(over) => Box::pin(self.over(over)).await,
        }
    }

    /// Waits until all processes of an exec are gone.
    async fn ended(&mut self, command_id: &CommandId) -> JobOutcome<Result<(), String>> {
        let job = self.instance.confirm_killed(command_id);
        self.queue.during(Box::pin(job)).await
    }

    /// Handles the end of an exec.
    async fn finish(&mut self, finish: Finish, command_id: &CommandId) -> Next {
        match finish {
            Finish::Done => Next::GoOn,
            Finish::DropBox(settle) => {
                self.ends("deleted", "an exec took too long");
                self.end(Last::Exec(settle)).await
            }
            Finish::Overdue(OnTimeout::DropBox, settle) => {
                self.ends("deleted", "its agent is silent");
                self.end(Last::Exec(settle)).await
            }
            Finish::Overdue(OnTimeout::Kill, settle) => {
                // The agent of a box without CPU time is slow, so it gets the full kill timeout.
                match Box::pin(self.ended(command_id)).await {
                    JobOutcome::Done(Ok(())) => {
                        self.entry.used(LaneStatus::Idle);
                        let _ = settle.send(Ok(Killed::Command));
                        return Next::GoOn;
                    }
                    JobOutcome::Done(Err(_)) => {}
                    JobOutcome::EndReason(over) => {
                        let next = Box::pin(self.over(over)).await;
                        let _ = settle.send(Ok(Killed::Command));
                        return next;
                    }
                }
                // No client deleted the box, so its entry stays and states the reason.
                let why = "the box's agent does not end a command whose time is over";
                Box::pin(self.fail(broken(why.to_owned()))).await;
                let _ = settle.send(Ok(Killed::Box));
                Next::GoOn
            }
            Finish::Broken(reason, settle) => {
                let why = self.why_broken(reason);
                Box::pin(self.fail(why.clone())).await;
                let _ = settle.send(Err(why));
                Next::GoOn
            }
        }
    }

    async fn mount(&mut self, asked: Box<Mount>) -> Next {
        let job = Box::pin(self.instance.add_mounts(&asked.mounts));
        match self.queue.during(job).await {
            JobOutcome::Done(added) => drop(asked.reply.send(added)),
            JobOutcome::EndReason(over) => {
                return Box::pin(self.unready(Request::Mount(asked), Unready::EndReason(over)))
                    .await;
            }
        }
        Next::GoOn
    }

    async fn delete(&mut self, delete: Box<Delete>) -> Next {
        self.entry.set_lane(LaneStatus::Closing);
        let box_id = &self.entry.spec.box_id;
        self.entry.access.shut(ended_as(Ended::Deleted, box_id));
        let stopped = self.instance.stop().await;
        self.tell("deleted", "a caller deleted it");
        self.shared().ends.deleted(&self.entry);
        let Delete { reply, box_id, .. } = *delete;
        let result = stopped.map(|()| BoxDeleteResult { deleted: box_id });
        Next::End(Last::Delete(reply, result))
    }

    async fn end(&mut self, last: Last) -> Next {
        self.entry.set_lane(LaneStatus::Closing);
        let box_id = &self.entry.spec.box_id;
        self.entry.access.shut(ended_as(Ended::Deleted, box_id));
        let _ = self.instance.stop().await;
        Next::End(last)
    }

    async fn over(&mut self, over: EndReason) -> Next {
        self.entry.lane.reset();
        // The access shuts before the agent disconnects, so that calls in progress get the reason.
        self.entry.access.shut(over.reason(&self.entry.spec.box_id));
        match over {
            EndReason::Deleted(delete) => {
                // These calls came before the delete and must not start another box.
                let error = ended_as(Ended::Deleted, &self.entry.spec.box_id);
                self.queue.refuse_lane(&error);
                self.delete(delete).await
            }
            EndReason::Expired => self.end_as("expired", "its time is over").await,
            EndReason::Idle => self.end_as("expired", "idle for too long").await,
            EndReason::Done => self.end_as("deleted", "its main command has ended").await,
            EndReason::Closed => self.end_as("deleted", "the runtime lets go of it").await,
        }
    }

    async fn end_as(&mut self, kind: &str, why: &str) -> Next {
        self.ends(kind, why);
        self.end(Last::Nothing).await
    }

    /// Returns the backend's reason for a broken box, or this one.
    fn why_broken(&self, reason: String) -> BoxError {
        self.instance.why_gone().unwrap_or_else(|| broken(reason))
    }

    /// Publishes an event of the box.
    fn tell(&self, kind: &str, message: &str) {
        self.shared().events.tell(&self.entry, kind, message);
    }

    /// Publishes an end that no client requested, and records its reason.
    fn ends(&self, kind: &str, why: &str) {
        self.tell(kind, why);
        self.shared().ends.ended(&self.entry, why);
    }

    fn shared(&self) -> &Shared {
        &self.instance.shared
    }

    /// Marks the box as failed and stops it.
    ///
    /// The entry stays, so that clients can read the reason. The next call starts a new box.
    async fn fail(&mut self, why: BoxError) {
        let reason = why.message();
        let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
        tracing::warn!(%owner, %box_id, %reason, "the box failed");
        self.ends("failed", reason);
        self.entry.failed(why);
        let _ = self.instance.stop().await;
        self.entry.set_lane(LaneStatus::Idle);
        // From here on, the idle timer applies to the failed entry.
        self.queue.used();
        self.queue.set_clock();
    }
}

/// Reason why a call cannot use its box.
enum Unready {
    /// The box refuses only this call.
    Refused(BoxError),
    /// The box does not exist.
    Failed(BoxError),
    /// The box ends.
    EndReason(EndReason),
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    #[test]
    fn a_session_is_small() {
        let config = RuntimeConfig::new(Vec::new());
        let shared = Arc::new(Shared {
            selector: Selector::new(&config),
            events: Events::new(),
            ends: Ends::new(None),
            nothing: Router::empty(),
            orders: Orders::default(),
            config,
        });
        let spec = SpecDraft::new("s").build().unwrap();
        let entry = Arc::new(BoxEntry::new("me".into(), &spec));
        let (_sender, mailbox) = mpsc::channel(1);
        let (table, _asks) = mpsc::channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _guard = runtime.enter();
        let begin = Begin::With(Vec::new());
        let task = live(
            shared,
            Arc::clone(&entry),
            begin,
            mailbox,
            table.downgrade(),
        );
        let size = size_of_val(&task) + size_of_val(&*entry);
        assert!(
            size < 3584,
            "{} and {} bytes",
            size_of_val(&task),
            size_of_val(&*entry)
        );
    }
}
