//! One box: the actor that starts it, grants its execs their turns one at a time, and ends it.
//!
//! # Reading order
//!
//! - `work`: what it is asked.
//! - `front`: its mailbox, the lane calls wait in, and its clock. The front goes on listening while
//!   the box is busy.
//! - `body`: the box itself, if there is one now: start, liveness, stop; `mounts` beside its workspace; `entry`, the command
//!   that is started with it; `pause` for when it stands still.
//! - `ending`: what calls get whose box has ended.
//! - `doubt`: what is checked before an agent is believed.
//! - this file: what follows from what.

pub(crate) mod agent_access;
mod ending;
pub(crate) mod entry;
mod instance;
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
use tokio::sync::{mpsc, oneshot};

use self::ending::{broken, ended_as};
use self::instance::{Instance, NotReady};
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

/// What the table and all sessions share.
pub(crate) struct Shared {
    pub(crate) config: RuntimeConfig,
    pub(crate) selector: Selector,
    /// What happened to the boxes.
    pub(crate) events: Events,
    /// Why those ended that are gone.
    pub(crate) ends: Ends,
    /// What agents may call here: nothing.
    pub(crate) nothing: Router,
    /// The order of calls that name the same thing.
    pub(crate) orders: Orders,
}

/// What a session begins with.
pub(crate) enum Begin {
    /// Calls, of which the first has made it.
    With(Vec<Request>),
    /// A box that was adopted.
    In(Box<RunningBox>),
    /// One whose agent has not answered yet.
    Reaching(Box<Unreached>),
}

/// Lives a session from its beginning to its end, and reports the end to the table.
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
        // The box must not outlive it.
        let _ = AssertUnwindSafe(actor.instance.stop()).catch_unwind().await;
    }
    let left = actor.queue.close();
    drop(actor);
    // A start that failed says more than this.
    if entry.access.why_shut().is_none() {
        entry.access.shut(ended());
    }
    if let Some(table) = table.upgrade() {
        let _ = table.send(Ask::Ended { entry, left }).await;
    }
    // Only now, so that whoever reads the answer finds the session gone.
    if let Ok(last) = last {
        last.say();
    }
}

/// The answer that is given once the session is gone.
enum Last {
    Nothing,
    /// An exec whose timeout has ended the box.
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

/// Whether the session goes on.
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
                Some(Request::Exec(exec)) => self.exec(exec).await,
                Some(Request::Create(create)) => self.create(create).await,
                Some(Request::Delete(delete)) => self.delete(delete).await,
                Some(Request::Transition(asked)) => self.transition(asked).await,
                Some(Request::Mount(asked)) => self.mount(asked).await,
                None => self.rest().await,
            };
            if let Next::End(last) = next {
                return last;
            }
        }
    }

    /// Nothing to do: waits for work, for the end of the agent, or for its own end.
    async fn rest(&mut self) -> Next {
        match self.queue.rest(self.instance.ended()).await {
            Wakeup::Request => Next::GoOn,
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

    /// Nobody has used the box for long. Commands that go on by themselves are work, though nobody asks about them.
    async fn idle(&mut self) -> Next {
        match self.queue.during(self.instance.may_be_busy()).await {
            JobOutcome::Done(false) => {}
            JobOutcome::Done(true) => {
                self.queue.used();
                return Next::GoOn;
            }
            JobOutcome::EndReason(over) => return Box::pin(self.over(over)).await,
        }
        // Somebody may have come meanwhile; from here on nobody can.
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

    /// Makes the box ready for this call, unless the session is over meanwhile.
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

    /// What follows for a call whose box is not ready.
    async fn unready(&mut self, work: Request, why: Unready) -> Next {
        match why {
            Unready::Refused(error) => {
                work.refuse(error);
                Next::GoOn
            }
            Unready::Failed(error) => {
                self.tell("failed", error.message());
                // All who waited for this start share its outcome.
                self.entry.access.shut(error.clone());
                self.queue.refuse_waiting(&error);
                work.refuse(error);
                let _ = self.instance.stop().await;
                Next::End(Last::Nothing)
            }
            Unready::EndReason(over) => {
                let id = &self.entry.spec.box_id;
                match over {
                    // The next box would have the same end.
                    EndReason::Expired | EndReason::Idle => work.refuse(BoxError::conflict(
                        format!("box {id} expired before it was ready"),
                    )),
                    EndReason::Deleted(_) => work.refuse(over.reason(id)),
                    // It has not begun, so it may begin in the next box.
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

    /// Grants an exec its turn, and waits for its end.
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
        if let Err(why) = Box::pin(self.wake()).await {
            return Box::pin(self.unready(Request::Exec(exec), why)).await;
        }
        let (finish, finished) = oneshot::channel();
        let turn = self.turn(&exec, finish);
        let command_id = turn.as_ref().ok().map(|turn| turn.command_id.clone());
        self.entry.used(LaneStatus::Running);
        let granted = exec.reply.send(turn).is_ok();
        let Some(command_id) = command_id.filter(|_| granted) else {
            self.entry.set_lane(LaneStatus::Idle);
            return Next::GoOn;
        };
        let during = self.queue.during(finished).await;
        self.queue.used();
        match during {
            JobOutcome::Done(Ok(finish)) => self.finish(finish, &command_id).await,
            JobOutcome::Done(Err(_)) => {
                match self.ended(&command_id).await {
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

    fn turn(&mut self, exec: &Exec, finish: oneshot::Sender<Finish>) -> Result<Turn, BoxError> {
        let (Some(lease), Some(living)) = (
            AgentLease::now(&self.entry, &exec.caller, Purpose::Exec)?,
            &mut self.instance.living,
        ) else {
            return Err(BoxError::internal("there is no box for the command"));
        };
        Ok(Turn {
            lease,
            command_id: living.next_exec()?,
            finish,
        })
    }

    /// Waits until nothing is left of an exec.
    async fn ended(&mut self, command_id: &CommandId) -> JobOutcome<Result<(), String>> {
        let job = self.instance.confirm_killed(command_id);
        self.queue.during(Box::pin(job)).await
    }

    /// What follows from the end of an exec.
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
                // A box in want of processor time has a slow agent: it gets the time that a kill has.
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
                // Nobody asked for the end of the box, so what is known of it stays, and says why.
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
        self.tell("deleted", "somebody deleted it");
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
        // Before the agent goes, so that calls inside learn why it does.
        self.entry.access.shut(over.reason(&self.entry.spec.box_id));
        match over {
            EndReason::Deleted(delete) => {
                // What waited for the box was asked for before: it shall not make another one.
                let error = ended_as(Ended::Deleted, &self.entry.spec.box_id);
                self.queue.refuse_lane(&error);
                self.delete(delete).await
            }
            EndReason::Expired => self.end_as("expired", "its time is over").await,
            EndReason::Idle => self.end_as("expired", "nobody has used it for long").await,
            EndReason::Done => self.end_as("deleted", "its main command has ended").await,
            EndReason::Closed => self.end_as("deleted", "the runtime lets go of it").await,
        }
    }

    async fn end_as(&mut self, kind: &str, why: &str) -> Next {
        self.ends(kind, why);
        self.end(Last::Nothing).await
    }

    /// Why a box is of no more use: what its backend knows, or else this.
    fn why_broken(&self, reason: String) -> BoxError {
        self.instance.why_gone().unwrap_or_else(|| broken(reason))
    }

    /// Tells whoever wants to know what happened to the box.
    fn tell(&self, kind: &str, message: &str) {
        self.shared().events.tell(&self.entry, kind, message);
    }

    /// The same, of an end that no caller asked for.
    fn ends(&self, kind: &str, why: &str) {
        self.tell(kind, why);
        self.shared().ends.ended(&self.entry, why);
    }

    fn shared(&self) -> &Shared {
        &self.instance.shared
    }

    /// The box is of no more use. Its record stays, so that people find out; the next call makes a
    /// new box.
    async fn fail(&mut self, why: BoxError) {
        let reason = why.message();
        let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
        tracing::warn!(%owner, %box_id, %reason, "the box failed");
        self.ends("failed", reason);
        self.entry.failed(why);
        let _ = self.instance.stop().await;
        self.entry.set_lane(LaneStatus::Idle);
        // From here on it is the record that waits to be forgotten.
        self.queue.used();
        self.queue.set_clock();
    }
}

/// Why a call's box is not ready.
enum Unready {
    /// Only this call's fault.
    Refused(BoxError),
    /// There is no box.
    Failed(BoxError),
    /// The session ends.
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
